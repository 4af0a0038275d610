// What an answer's headers say of its way through the gateway.

/** Parameters of a structured field's item (RFC 9651), in order: [name, value], true where there is none. */
function parametersOf(text) {
  return [...text.matchAll(/;\s*([\w*.-]+)(?:\s*=\s*("(?:[^"\\]|\\.)*"|[^;,\s]+))?/g)].map(([, name, value]) => [
    name.toLowerCase(),
    value === undefined ? true : value.startsWith('"') ? value.slice(1, -1).replace(/\\(.)/g, "$1") : value,
  ]);
}

/** `Cache-Status` (RFC 9211): `outcome` is hit, miss, collapsed, fresh, bypass, or unknown; `text` is for people. */
export function cacheOutcome(header, age = null) {
  const said = Object.fromEntries(parametersOf(header ?? ""));
  if (said.hit) {
    const where = [said.detail, age === null ? null : `${age} s old`].filter((part) => part && part !== true);
    return { outcome: "hit", text: ["hit", ...where].join(", ") };
  }
  if (said.collapsed) return { outcome: "collapsed", text: "collapsed with the same request" };
  if (said.fwd === "miss") return { outcome: "miss", text: "miss" };
  if (said.fwd === "request") return { outcome: "fresh", text: "fresh, as asked" };
  if (said.fwd === "bypass") return { outcome: "bypass", text: typeof said.detail === "string" ? `not cached: ${said.detail}` : "not cached" };
  return { outcome: "unknown", text: "not told" };
}

/** `Server-Timing`: `steps` of {name, ms}, `total_ms` null where it is not told. What the steps leave of the total is
 *  one more, called other. */
export function serverTiming(header) {
  const metrics = (header ?? "").match(/[^,"]+(?:"(?:[^"\\]|\\.)*"[^,"]*)*/g) ?? [];
  const steps = [];
  let total_ms = null;
  for (const metric of metrics) {
    const name = metric.split(";")[0].trim();
    const ms = Number(Object.fromEntries(parametersOf(metric)).dur ?? NaN);
    if (name === "" || !Number.isFinite(ms)) continue;
    if (name === "total") total_ms = ms;
    else steps.push({ name, ms });
  }
  const rest = (total_ms ?? 0) - steps.reduce((sum, { ms }) => sum + ms, 0);
  if (steps.length && rest > 0.001) steps.push({ name: "other", ms: rest });
  return { steps, total_ms };
}
