// Numbers as people read them. Null and NaN are a dash: nothing is known.

const DASH = "–";

function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

export function count(value) {
  if (!isKnown(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)} G`;
  if (size >= 1e6) return `${trim(value / 1e6)} M`;
  if (size >= 1e4) return `${trim(value / 1e3)} k`;
  return trim(value);
}

export function perSecond(value) {
  return isKnown(value) ? `${count(value)}/s` : DASH;
}

export function percent(share) {
  return isKnown(share) ? `${trim(share * 100)} %` : DASH;
}

export function seconds(value) {
  if (!isKnown(value)) return DASH;
  if (value === 0) return "0 ms";
  if (value < 0.001) return `${trim(value * 1e6)} µs`;
  if (value < 1) return `${trim(value * 1e3)} ms`;
  if (value < 120) return `${trim(value)} s`;
  return value < 7200 ? `${trim(value / 60)} min` : `${trim(value / 3600)} h`;
}

export function bytes(value) {
  if (!isKnown(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${trim(value / 1024 ** step)} ${units[step]}`;
}

/** Three digits that count, and no zeros after them. */
function trim(value) {
  const size = Math.abs(value);
  if (size >= 100) return String(Math.round(value));
  return size < 1e-6 ? "0" : String(Number(value.toPrecision(3)));
}
