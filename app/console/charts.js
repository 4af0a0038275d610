// Line and area charts over time, drawn as SVG. Each has its latest values in words, and can be read point by point with
// the pointer or the arrow keys.

import { el, setText, svg, sync } from "./dom.js";

const HEIGHT = 150;
const MARGIN = { top: 8, right: 8, bottom: 20, left: 46 };
const TICKS = 4;
// Told apart by the dashes, too, for who cannot by the colours.
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "1 4", "12 4"];
const TONES = ["blue", "amber", "green", "purple", "red", "grey"];
const GAP_S = 7; // without a point for longer, the line is broken

export class Chart {
  /** `format`: a value in words; `max`: where the axis ends at least; `isStacked`: each series lies on the one before. */
  constructor(parent, { id, title, about, format, max = 0, isStacked = false }) {
    this._format = format;
    this._max = max;
    this._isStacked = isStacked;
    this._title = title;
    // Mutable: what was drawn last, and the point that is looked at (null: none).
    this._drawn = { names: [], points: [], window_s: 60 };
    this._at = null;
    this._svg = svg("svg", { role: "img", tabindex: "0", class: "plot", height: HEIGHT, "aria-label": title });
    this._legend = el("ul", { class: "legend" });
    this._tip = el("p", { class: "tip", hidden: true });
    this._note = el("p", { class: "note", hidden: true });
    this.element = el(
      "figure",
      { class: "card chart", id: `chart-${id}` },
      el("figcaption", {}, el("h3", { text: title }), el("p", { class: "about", text: about }), this._legend),
      this._note,
      el("div", { class: "frame" }, this._svg, this._tip),
    );
    parent.append(this.element);
    this._svg.addEventListener("pointermove", (event) => this._lookAt(this._pointAt(event.offsetX)));
    this._svg.addEventListener("pointerleave", () => this._lookAt(null));
    this._svg.addEventListener("blur", () => this._lookAt(null));
    this._svg.addEventListener("keydown", (event) => this._step(event));
    new ResizeObserver(() => this._draw()).observe(this._svg);
  }

  /** `names`: of the series, in their order; `tones`: a colour's name for each. `points`: {at, values}, a value for each
   *  name, null where nothing is known. `note`: what to say in place of values. */
  update({ names, tones, points, window_s, note = null }) {
    this._drawn = { names, tones, points, window_s };
    this._note.hidden = note === null;
    setText(this._note, note ?? "");
    this._tell();
    this._draw();
  }

  _tell() {
    const { names, tones, points } = this._drawn;
    const latest = points.at(-1)?.values ?? [];
    const items = names.map((name, index) => ({ name, tone: tones[index], index, value: this._format(latest[index]) }));
    sync(this._legend, items, ({ name }) => name, makeItem, updateItem);
    const values = items.map(({ name, value }) => `${name} ${value}`).join(", ");
    this._svg.setAttribute("aria-label", `${this._title}, now: ${values || "nothing yet"}`);
  }

  _draw() {
    const { names, tones, points, window_s } = this._drawn;
    const width = this._svg.clientWidth;
    if (width < 80) return;
    this._svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const end = points.at(-1)?.at ?? 0;
    const x = (at) => MARGIN.left + (1 - (end - at) / window_s) * (width - MARGIN.left - MARGIN.right);
    const levels = points.map((point) => ({ at: point.at, levels: this._levels(point.values) }));
    const top = niceTop(Math.max(this._max, ...levels.flatMap((point) => point.levels.map((value) => value ?? 0))));
    const y = (value) => MARGIN.top + (1 - value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    this._scale = { x, width };
    const shapes = names.flatMap((name, index) => this._shapes(levels, index, x, y, tones[index]));
    if (this._isStacked) shapes.reverse(); // where one adds nothing, the line below it is what is seen
    this._svg.replaceChildren(...grid(top, y, width, this._format), ...times(window_s, width), ...shapes, ...this._cursor(levels, x, y));
    this._show();
  }

  /** Where each series stands on the axis. */
  _levels(values) {
    if (!this._isStacked) return values;
    let sum = 0;
    return values.map((value) => (value === null ? null : (sum += value)));
  }

  _shapes(levels, index, x, y, tone) {
    const shapes = [];
    for (const run of runsOf(levels, index)) {
      const place = (at, level) => `${x(at).toFixed(1)},${y(level).toFixed(1)}`;
      const line = run.map(({ at, levels: of }) => place(at, of[index])).join("L");
      if (this._isStacked) {
        const below = run.map(({ at, levels: of }) => place(at, of[index - 1] ?? 0)).reverse().join("L");
        shapes.push(svg("path", { d: `M${line}L${below}Z`, class: "area", "data-tone": tone }));
      }
      const dash = this._isStacked ? null : dashOf(index);
      if (run.length > 1) shapes.unshift(svg("path", { d: `M${line}`, class: "line", "data-tone": tone, "stroke-dasharray": dash }));
      else shapes.unshift(svg("circle", { cx: x(run[0].at), cy: y(run[0].levels[index]), r: 2, class: "dot", "data-tone": tone }));
    }
    return this._isStacked ? shapes : shapes.reverse();
  }

  _cursor(levels, x, y) {
    const point = this._at === null ? undefined : levels.find(({ at }) => at === this._at);
    if (!point) return [];
    const at = x(point.at);
    const dots = point.levels.map((level, index) =>
      level === null ? null : svg("circle", { cx: at, cy: y(level), r: 3, class: "dot", "data-tone": this._drawn.tones[index] }),
    );
    const line = svg("line", { x1: at, x2: at, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, class: "cursor" });
    return [line, ...dots.filter((dot) => dot !== null)];
  }

  _pointAt(offset) {
    if (!this._scale) return null;
    const distance = ({ at }) => Math.abs(this._scale.x(at) - offset);
    const near = this._drawn.points.reduce((best, point) => (best && distance(best) <= distance(point) ? best : point), null);
    return near?.at ?? null;
  }

  _step(event) {
    const { points } = this._drawn;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this._lookAt(null);
    if (step === undefined || points.length === 0) return;
    event.preventDefault();
    const index = this._at === null ? points.length : points.findIndex(({ at }) => at === this._at);
    this._lookAt(points[Math.min(points.length - 1, Math.max(0, index + step))].at);
  }

  _lookAt(at) {
    if (at === this._at) return;
    this._at = at;
    this._draw();
  }

  /** What the point that is looked at says, beside it. */
  _show() {
    const { names, points } = this._drawn;
    const point = this._at === null ? undefined : points.find(({ at }) => at === this._at);
    this._tip.hidden = !point;
    if (!point || !this._scale) return;
    const ago = Math.round(points.at(-1).at - point.at);
    const values = names.map((name, index) => `${name} ${this._format(point.values[index])}`);
    setText(this._tip, [ago ? `${ago} s ago` : "now", ...values].join("\n"));
    const at = this._scale.x(point.at);
    const isRight = at > this._scale.width / 2;
    this._tip.style.left = isRight ? "auto" : `${at + 8}px`;
    this._tip.style.right = isRight ? `${this._scale.width - at + 8}px` : "auto";
  }
}

export function toneOfSeries(index) {
  return TONES[index % TONES.length];
}

/** Once all colours were used, each comes with another dash. */
function dashOf(index) {
  return DASHES[(index + Math.floor(index / TONES.length)) % DASHES.length] || null;
}

function makeItem({ name, tone, index }) {
  const key = svg("svg", { class: "key", width: 18, height: 8, "aria-hidden": "true" });
  key.append(svg("line", { x1: 1, x2: 17, y1: 4, y2: 4, class: "line", "data-tone": tone, "stroke-dasharray": dashOf(index) }));
  return el("li", {}, key, el("span", { text: name }), el("strong", {}));
}

function updateItem(element, { value }) {
  setText(element.lastElementChild, value);
}

/** The parts of a series without holes in them. */
function runsOf(levels, index) {
  const runs = [];
  let before = null;
  for (const point of levels) {
    if (point.levels[index] === null) before = null;
    else if (before !== null && point.at - before <= GAP_S) runs.at(-1).push(point);
    else runs.push([point]);
    if (point.levels[index] !== null) before = point.at;
  }
  return runs;
}

function grid(top, y, width, format) {
  return Array.from({ length: TICKS + 1 }, (_, index) => (top * index) / TICKS).flatMap((value) => [
    svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value), class: value ? "rule" : "rule base" }),
    svg("text", { x: MARGIN.left - 6, y: y(value) + 3.5, class: "tick end", text: format(value) }),
  ]);
}

function times(window_s, width) {
  const text = (x, label, place) => svg("text", { x, y: HEIGHT - 4, class: `tick ${place}`, text: label });
  const name = (ago_s) => (ago_s % 60 === 0 ? `−${ago_s / 60} min` : `−${ago_s} s`);
  const middle = MARGIN.left + (width - MARGIN.left - MARGIN.right) / 2;
  return [
    text(MARGIN.left, name(window_s), "start"),
    text(middle, name(window_s / 2), "middle"),
    text(width - MARGIN.right, "now", "end"),
  ];
}

/** The least of 1, 2, 4, 5, 8 times a power of ten that is not below: a quarter of it is a round number. */
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}
