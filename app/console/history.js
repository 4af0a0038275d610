// What /metrics said in the last minutes: looks at it, and the points of the charts that come of them.

import { Snapshot, growth, grownBy, parse, quantile, total } from "./metrics.js";

export const WINDOW_S = 300;
const LEAST_WINDOW_S = 60;
const KEPT_S = 61; // looks; their points are kept for WINDOW_S
const RATE_S = 10; // what rates are of
const SPAN_S = 30; // what quantiles and shares are of: fewer seconds hold too few requests
export const TABLE_S = 60;

export const OUTCOMES = ["ok", "refused", "error", "disconnected"];
export const TIERS = ["memory", "redis", "disk"];
export const TOKENS = { completion: "generated", prompt: "read", saved_by_cache: "from the cache", saved_by_singleflight: "read along" };

/** The names of what the page makes use of: of a large answer, little is kept. */
function isOurs(name) {
  return /^headrace_(requests_total|time_to_first_token_seconds_bucket|tokens_total|cache_answers_total|engine_|replica_|admission_|variant_share|canary_|pool_retries|connections$)/.test(name);
}

export class History {
  constructor() {
    // Mutable, changed by `add` alone.
    this._looks = [];
    this.points = [];
  }

  get latest() {
    return this._looks.at(-1) ?? null;
  }

  /** The look of `span_s` ago, or the oldest that is kept; after a pause, the last one before it. Null: there is one
   *  look at most. */
  before(span_s) {
    const latest = this.latest;
    const older = this._looks.slice(0, -1);
    return older.find(({ at }) => at >= latest.at - span_s - 0.5) ?? older.at(-1) ?? null;
  }

  /** What the time axis shows: it grows with what there is. */
  get window_s() {
    const covered_s = this.points.length ? this.points.at(-1).at - this.points[0].at : 0;
    return [LEAST_WINDOW_S, 120, 180, 240].find((window_s) => window_s >= covered_s) ?? WINDOW_S;
  }

  add(text, at) {
    this._looks.push(new Snapshot(at, parse(text, isOurs)));
    this._looks = this._looks.filter((look) => look.at >= at - KEPT_S || look === this._looks.at(-2));
    const point = this._point();
    if (point) this.points.push(point);
    this.points = this.points.filter((old) => old.at >= at - WINDOW_S);
  }

  _point() {
    const now = this.latest;
    const [short, long] = [this.before(RATE_S), this.before(SPAN_S)];
    if (short === null) return null;
    const rate = (number) => number / (now.at - short.at);
    const outcomes = growth(short, now, "headrace_requests_total", "outcome");
    const kinds = growth(short, now, "headrace_tokens_total", "kind");
    const ttft = (q) => quantile(long, now, "headrace_time_to_first_token_seconds", q);
    return {
      at: now.at,
      requests: OUTCOMES.map((outcome) => rate(outcomes.get(outcome) ?? 0)),
      tokens: Object.keys(TOKENS).map((kind) => rate(kinds.get(kind) ?? 0)),
      ttft: [ttft(0.5), ttft(0.95)],
      hits: hitShares(long, now),
      queue: [
        total(now, "headrace_admission_in_flight"),
        total(now, "headrace_admission_waiting"),
        grownBy(short, now, "headrace_admission_refused_total"),
      ],
      variants: new Map(variantsOf(now).map(({ name, labels }) => [name, trafficOf(short, long, now, labels)])),
      kv: new Map(now.of("headrace_engine_kv_cache_usage_ratio").map(({ labels, value }) => [labels.pool, value])),
    };
  }
}

/** {name, labels} of each variant that requests were for or may fall to; of a model without variants, its own. */
export function variantsOf(now) {
  const found = new Map();
  const shares = now.of("headrace_variant_share");
  const split = new Set(shares.map(({ labels }) => labels.model));
  for (const { labels } of [...shares, ...now.of("headrace_requests_total")]) {
    const { model, variant } = labels;
    if (!model || (!variant && split.has(model))) continue; // refused before a model was known, or a variant chosen
    const name = variant ? `${model} / ${variant}` : model;
    found.set(name, { name, labels: { model, variant } });
  }
  return [...found.values()].sort((one, other) => (one.name < other.name ? -1 : 1));
}

/** What one variant's requests came to up to now, since `short` in number, since `long` in kind; null: nothing is known. */
export function trafficOf(short, long, now, labels) {
  const sum = (numbers) => [...numbers.values()].reduce((all, number) => all + number, 0);
  const outcomes = growth(long, now, "headrace_requests_total", "outcome", labels);
  const ttft = (q) => quantile(long, now, "headrace_time_to_first_token_seconds", q, labels);
  const all = sum(outcomes);
  return {
    rate: sum(growth(short, now, "headrace_requests_total", "outcome", labels)) / (now.at - short.at),
    median: ttft(0.5),
    slow: ttft(0.95),
    errors: all ? (outcomes.get("error") ?? 0) / all : null,
  };
}

/** Of the requests that could be answered from the cache, those that were, by tier, and those that read along. Null each
 *  where there were none. */
function hitShares(before, now) {
  const answers = growth(before, now, "headrace_cache_answers_total", ({ outcome, tier }) => (outcome === "hit" ? tier : outcome));
  const of = (name) => answers.get(name) ?? 0;
  const shown = [...TIERS, "collapsed"].map(of);
  const all = shown.reduce((sum, number) => sum + number, of("miss"));
  return shown.map((number) => (all ? number / all : null));
}
