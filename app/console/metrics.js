// Prometheus's text format 0.0.4, and what a run of it tells: rates, shares, quantiles.

const ESCAPES = { "\\": "\\", "n": "\n", '"': '"' };

/** A list of {name, labels, value} for each sample whose name `isWanted`. Lines that are none are passed over. */
export function parse(text, isWanted = () => true) {
  const samples = [];
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const nameEnd = line.search(/[{\s]/);
    if (nameEnd < 1) continue;
    const name = line.slice(0, nameEnd);
    if (!isWanted(name)) continue;
    const [labels, rest] = line[nameEnd] === "{" ? labelsOf(line, nameEnd + 1) : [{}, nameEnd];
    const value = numberOf(line.slice(rest).trim().split(/\s+/)[0]);
    if (labels !== null && value !== null) samples.push({ name, labels, value });
  }
  return samples;
}

/** The labels from `at` on, and where the closing brace was passed; null where it is none. */
function labelsOf(line, at) {
  const labels = {};
  for (;;) {
    while (line[at] === "," || line[at] === " ") at += 1;
    if (line[at] === "}") return [labels, at + 1];
    const equals = line.indexOf('="', at);
    if (equals < 0) return [null, at];
    const name = line.slice(at, equals).trim();
    let value = "";
    at = equals + 2;
    while (line[at] !== '"') {
      if (at >= line.length) return [null, at];
      if (line[at] === "\\") {
        at += 1;
        value += ESCAPES[line[at]] ?? `\\${line[at]}`;
      } else value += line[at];
      at += 1;
    }
    at += 1;
    labels[name] = value;
  }
}

function numberOf(text) {
  if (text === "+Inf" || text === "Inf") return Infinity;
  if (text === "-Inf") return -Infinity;
  if (text === undefined || text === "") return null;
  const value = Number(text);
  return Number.isNaN(value) && text !== "NaN" ? null : value;
}

/** All samples of one look at /metrics. `at`: seconds on a clock that only goes forward. */
export class Snapshot {
  constructor(at, samples) {
    this.at = at;
    this._byName = new Map();
    for (const { name, labels, value } of samples) {
      let series = this._byName.get(name);
      if (!series) this._byName.set(name, (series = new Map()));
      series.set(keyOf(labels), { labels, value });
    }
  }

  /** {labels, value} of each series; none: the name is not there. */
  of(name) {
    return [...(this._byName.get(name)?.values() ?? [])];
  }

  value(name, labels) {
    return this._byName.get(name)?.get(keyOf(labels))?.value ?? null;
  }

  has(name) {
    return this._byName.has(name);
  }
}

function keyOf(labels) {
  return JSON.stringify(Object.entries(labels).sort(([one], [other]) => (one < other ? -1 : 1)));
}

/** Whether the labels have all these values. */
export function fits(labels, wanted) {
  return Object.entries(wanted).every(([name, value]) => labels[name] === value);
}

/** The sum of a gauge over all series that fit; null: there are none. */
export function total(snapshot, name, wanted = {}) {
  const found = snapshot.of(name).filter(({ labels }) => fits(labels, wanted));
  return found.length ? found.reduce((sum, { value }) => sum + value, 0) : null;
}

/** How much the counters grew from one snapshot to the other, by the label (a name, or a function of labels) that tells
 *  them apart. A counter that went back was reset: it counts from 0. One that was not there began at 0. */
export function growth(before, after, name, by, wanted = {}) {
  const grown = new Map();
  for (const { labels, value } of after.of(name)) {
    if (!fits(labels, wanted)) continue;
    const old = before.value(name, labels) ?? 0;
    const group = typeof by === "function" ? by(labels) : (labels[by] ?? "");
    grown.set(group, (grown.get(group) ?? 0) + (value < old ? value : value - old));
  }
  return grown;
}

export function grownBy(before, after, name, wanted = {}) {
  return growth(before, after, name, () => "", wanted).get("") ?? 0;
}

/** A quantile of what a histogram observed between two snapshots, in its own unit; null: nothing was. Linear within a
 *  bucket, as PromQL's histogram_quantile; in the last one its lower bound. */
export function quantile(before, after, name, q, wanted = {}) {
  const grown = growth(before, after, `${name}_bucket`, "le", wanted);
  const buckets = [...grown].map(([bound, number]) => [numberOf(bound), number]).sort(([one], [other]) => one - other);
  const all = buckets.at(-1)?.[1] ?? 0;
  if (all <= 0) return null;
  let [from, below] = [0, 0];
  for (const [bound, upTo] of buckets) {
    if (upTo >= q * all) return bound === Infinity ? from : from + ((bound - from) * (q * all - below)) / (upTo - below || 1);
    [from, below] = [bound, upTo];
  }
  return from;
}
