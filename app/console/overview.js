// The first view: a row of figures, charts of the last minutes, and tables of variants, engines, replicas, and tiers.

import { Chart, toneOfSeries } from "./charts.js";
import { byId, el, setText, sync } from "./dom.js";
import * as format from "./format.js";
import { OUTCOMES, TABLE_S, TIERS, TOKENS, trafficOf, variantsOf } from "./history.js";
import { grownBy, total } from "./metrics.js";
import { Table } from "./table.js";

const CHARTS = [
  { id: "requests", title: "Requests", about: "a second, by outcome", format: format.perSecond, names: OUTCOMES, tones: ["blue", "amber", "red", "grey"] },
  { id: "ttft", title: "Time to first token", about: "of streams, over 30 s", format: format.seconds, names: ["median", "95 %"], tones: ["blue", "purple"] },
  { id: "hits", title: "Hit rate by tier", about: "of cacheable requests, over 30 s", format: format.percent, max: 1, isStacked: true, names: [...TIERS, "collapsed"], tones: ["blue", "green", "purple", "amber"] },
  { id: "queue", title: "Queue", about: "requests before and in the engines", format: format.count, max: 4, names: ["in flight", "waiting", "refused in 10 s"], tones: ["blue", "amber", "red"] },
  { id: "tokens", title: "Tokens", about: "a second, as requests end", format: format.perSecond, names: Object.values(TOKENS), tones: ["blue", "grey", "green", "purple"] },
];
// Their series come and go: `read(point)` is a map of values by the series' names.
const CHANGING_CHARTS = [
  { id: "variant-requests", title: "Variants: requests", about: "a second", format: format.perSecond, read: ({ variants }) => only(variants, "rate") },
  { id: "variant-ttft", title: "Variants: time to first token", about: "median over 30 s", format: format.seconds, read: ({ variants }) => only(variants, "median") },
  { id: "kv", title: "KV cache", about: "in use, of this gateway's engines", format: format.percent, max: 1, read: ({ kv }) => kv, none: "No engine in this gateway tells it. Servers elsewhere keep their own." },
];
const WITHOUT_METRICS = "No values: this gateway does not serve /metrics here.";

export class Overview {
  constructor(history) {
    this._history = history;
    this._tiles = byId("tiles");
    this._notices = byId("notices");
    this._charts = CHARTS.map((options) => [options, new Chart(byId("charts"), options)]);
    this._changing = CHANGING_CHARTS.map((options) => [options, new Chart(byId("charts"), options)]);
    const column = (name) => ({ name });
    const number = (name) => ({ name, isNumber: true });
    const table = (id, title, about, columns) => new Table(byId("tables"), { id, title, about, columns });
    this._variants = table("variants", "Variants side by side", "over the last minute", [
      column("Model"), column("Variant"), number("Share"), number("Requests"), number("TTFT median"), number("TTFT 95 %"), number("Errors"), column("Canary"),
    ]);
    this._engines = table("engines", "Engines in this gateway", "prefix hits over the last minute", [
      column("Pool"), column("State"), number("KV cache"), number("Running"), number("Waiting"), number("Prefix hits"), number("Preemptions"), number("Restarts"),
    ]);
    this._tiers = table("tiers", "Cache tiers", "since the start", [
      column("Tier"), number("Entries"), number("Size"), number("Hits"), number("Misses"), number("Stored"), number("Evicted"), number("Failures"),
    ]);
    this._replicas = table("replicas", "Replicas", "latency as the balancer sees it", [
      column("Pool"), column("Replica"), column("State"), column("Breaker"), number("In flight"), number("First token"), number("Answer"), number("Requests"), number("Failures"),
    ]);
  }

  /** `health`, `metrics`, `stats`: the parts, as they are now. */
  show(health, metrics, stats) {
    const note = metrics.error?.status === 404 ? WITHOUT_METRICS : metrics.note;
    this._showTiles(health);
    this._showNotices(health, stats);
    this._showCharts(note);
    const { latest } = this._history;
    if (latest !== null) {
      const before = this._history.before(TABLE_S);
      this._showVariants(before, latest, note);
      this._showEngines(before, latest, note);
      this._showReplicas(before, latest, note);
    } else for (const each of [this._variants, this._engines, this._replicas]) each.update({ rows: [], note });
    this._showTiers(stats);
  }

  _showTiles(health) {
    const point = this._history.points.at(-1);
    const { value } = health;
    const sum = (values) => values?.reduce((all, one) => all + one, 0) ?? null;
    const [ttft, queue, hits] = [point?.ttft ?? [null, null], point?.queue ?? [null, null, null], point?.hits ?? [null]];
    const all = sum(point?.requests);
    const hit = hits[0] === null ? null : sum(hits.slice(0, TIERS.length));
    const unwell = notWell(value).map(([name]) => name);
    const tiles = [
      { name: "Status", value: value?.status ?? "–", tone: toneOf(value?.status), note: unwell.length ? unwell.join(", ") : value ? `up ${format.seconds(value.uptime_seconds)}, version ${value.version}` : "" },
      { name: "Requests", value: format.perSecond(all), note: all ? `${format.percent((point.requests[2] ?? 0) / all)} errors` : "over 10 s" },
      { name: "Hit rate", value: format.percent(hit), note: hit === null ? "nothing cacheable in 30 s" : `collapsed ${format.percent(hits[3])}` },
      { name: "TTFT, 95 %", value: format.seconds(ttft[1]), note: ttft[0] === null ? "no streams in 30 s" : `median ${format.seconds(ttft[0])}` },
      { name: "Queue", value: format.count(queue[1]), tone: queue[2] ? "warn" : "", note: `refused ${format.count(queue[2])} in 10 s` },
      { name: "In flight", value: format.count(queue[0]), note: `generated ${format.perSecond(point?.tokens[0] ?? null)} tokens` },
    ];
    sync(this._tiles, tiles, ({ name }) => name, makeTile, updateTile);
  }

  _showNotices(health, stats) {
    const items = notWell(health.value).map(([name, component]) => ({ name, text: `${component.status}${because(component)}` }));
    for (const { component, message } of stats.value?.alerts ?? []) items.push({ name: `cache: ${component}`, text: message });
    this._notices.hidden = items.length === 0;
    const make = ({ name }) => el("li", {}, el("strong", { text: name }), " ", el("span", {}));
    sync(this._notices, items, ({ name }) => name, make, (element, { text }) => setText(element.lastElementChild, text));
  }

  _showCharts(note) {
    const { points, window_s } = this._history;
    const of = (id) => points.map((point) => ({ at: point.at, values: point[id] }));
    for (const [{ id, names, tones }, chart] of this._charts) chart.update({ names, tones, points: of(id), window_s, note });
    for (const [{ read, none = null }, chart] of this._changing) {
      const maps = points.map((point) => ({ at: point.at, map: read(point) }));
      const names = [...new Set(maps.flatMap(({ map }) => [...map.keys()]))].sort();
      const values = maps.map(({ at, map }) => ({ at, values: names.map((name) => map.get(name) ?? null) }));
      const isEmpty = points.length > 0 && names.length === 0;
      chart.update({ names, tones: names.map((_, index) => toneOfSeries(index)), points: isEmpty ? [] : values, window_s, note: note ?? (isEmpty ? none : null) });
    }
  }

  _showVariants(before, now, note) {
    const nothing = { rate: null, median: null, slow: null, errors: null };
    const found = variantsOf(now).map((each) => ({ ...each, ...(before ? trafficOf(before, before, now, each.labels) : nothing) }));
    const most = (name) => Math.max(...found.map((row) => row[name] ?? 0)) || 1;
    const [mostRequests, mostMedian, mostSlow] = ["rate", "median", "slow"].map(most);
    const rows = found.map(({ name, labels, rate, median, slow, errors }) => {
      const share = total(now, "headrace_variant_share", labels);
      const rolledBack = total(now, "headrace_canary_rolled_back", labels);
      const cells = [
        labels.model,
        labels.variant || "–",
        share === null ? "all" : { text: format.percent(share), share },
        { text: format.perSecond(rate), share: rate === null ? null : rate / mostRequests },
        { text: format.seconds(median), share: median === null ? null : median / mostMedian },
        { text: format.seconds(slow), share: slow === null ? null : slow / mostSlow },
        { text: format.percent(errors), tone: errors ? "bad" : "" },
        rolledBack === null ? "–" : rolledBack ? { text: "rolled back", tone: "bad" } : { text: "watched", tone: "good" },
      ];
      return { key: name, cells };
    });
    this._variants.update({ rows, note: note ?? (rows.length ? null : "No requests so far.") });
  }

  _showEngines(before, now, note) {
    const rows = now.of("headrace_engine_up").map(({ labels, value }) => {
      const { pool } = labels;
      const of = (name) => total(now, `headrace_engine_${name}`, { pool });
      const kv = of("kv_cache_usage_ratio");
      const looked = before ? grownBy(before, now, "headrace_engine_prefix_cache_queries_total", { pool }) : 0;
      const found = before ? grownBy(before, now, "headrace_engine_prefix_cache_hits_total", { pool }) : 0;
      const state = value ? { text: "up", tone: "good" } : { text: "down", tone: "bad" };
      const cells = [
        pool, state, { text: format.percent(kv), share: kv }, format.count(of("running")), format.count(of("waiting")),
        format.percent(looked ? found / looked : null), format.count(of("preemptions_total")), format.count(of("restarts_total")),
      ];
      return { key: pool, cells };
    });
    this._engines.update({ rows, note: note ?? (rows.length ? null : "None: all pools are of servers elsewhere.") });
  }

  _showReplicas(before, now, note) {
    const found = now.of("headrace_replica_up");
    const busiest = Math.max(1, ...now.of("headrace_replica_in_flight").map(({ value }) => value));
    const rows = found.map(({ labels, value }) => {
      const of = (name, more = {}) => total(now, `headrace_replica_${name}`, { ...labels, ...more });
      const per_s = (name) => (before ? grownBy(before, now, `headrace_replica_${name}`, labels) / (now.at - before.at) : null);
      const [inFlight, failures, open] = [of("in_flight"), per_s("failures_total"), of("breaker_open")];
      const cells = [
        labels.pool, labels.replica, value ? { text: "up", tone: "good" } : { text: "down", tone: "bad" },
        open === 1 ? { text: "open", tone: "bad" } : open ? { text: "half open", tone: "warn" } : "closed",
        { text: format.count(inFlight), share: (inFlight ?? 0) / busiest },
        format.seconds(of("latency_seconds", { of: "stream" })), format.seconds(of("latency_seconds", { of: "answer" })),
        format.perSecond(per_s("requests_total")), { text: format.perSecond(failures), tone: failures ? "bad" : "" },
      ];
      return { key: `${labels.pool}\n${labels.replica}`, cells };
    });
    this._replicas.update({ rows, note: note ?? (rows.length ? null : "None are known.") });
  }

  _showTiers(stats) {
    const rows = Object.entries(stats.value?.tiers ?? {}).map(([name, tier]) => ({
      key: name,
      cells: [name, format.count(tier.entries), format.bytes(tier.size_bytes), ...["hits", "misses", "stores", "evictions", "failures"].map((kind) => format.count(tier[kind]))],
    }));
    this._tiers.update({ rows, note: stats.note ?? (stats.value && rows.length === 0 ? "The cache is off." : null) });
  }
}

function only(variants, figure) {
  return new Map([...variants].map(([name, figures]) => [name, figures[figure]]));
}

function notWell(health) {
  return Object.entries(health?.components ?? {}).filter(([, { status }]) => status !== "ok");
}

function because({ last_error, reason, stage }) {
  const why = reason ?? last_error ?? stage;
  return why ? `: ${why}` : "";
}

export function toneOf(status) {
  return { ok: "good", degraded: "warn", starting: "warn", draining: "warn", down: "bad" }[status] ?? "";
}

function makeTile({ name }) {
  return el("li", { class: "tile card" }, el("span", { class: "name", text: name }), el("strong", {}), el("span", { class: "about" }));
}

function updateTile(element, { value, tone = "", note }) {
  const [, strong, about] = element.children;
  setText(strong, value);
  strong.dataset.tone = tone;
  setText(about, note);
}
