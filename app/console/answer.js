// One question and its answer in the conversation: the text as it comes, and what is told of it.

import { el, say, setText, svg } from "./dom.js";
import * as format from "./format.js";
import { cacheOutcome, serverTiming } from "./headers.js";

const STEP_TONES = ["purple", "amber", "green", "teal", "red", "grey"];
const TONE_OF_STEP = { engine: "blue", other: "rest" };
const TONE_OF_OUTCOME = { hit: "good", collapsed: "good", bypass: "warn" };

export class Turn {
  /** `onAgain`: what the button for that does. */
  constructor(question, model, onAgain) {
    this.question = question;
    // Mutable: what has come so far. `state` is running, done, stopped, or failed.
    this.state = "running";
    this.text = "";
    this.usage = null;
    this.outcome = cacheOutcome(null);
    this._sent = performance.now();
    this._first = null;
    this._last = null;
    this._events = 0;
    this._isDrawing = false;
    this._reasoning = "";

    this._thoughts = el("p", { class: "text" });
    this._reasoned = el("details", { hidden: true }, el("summary", { text: "Reasoning" }), this._thoughts);
    this._answer = el("p", { class: "text answer", "aria-busy": "true" });
    this._error = el("p", { class: "note error", hidden: true });
    this._facts = el("ul", { class: "chips" });
    this._steps = el("div", { class: "steps", hidden: true });
    const again = el("button", { type: "button", class: "quiet again", text: "Ask again", on: { click: onAgain } });
    this._tools = el("div", { class: "tools", hidden: true }, again);
    this.element = el(
      "li",
      { class: "turn", "data-state": "running" },
      el("div", { class: "asked" }, el("span", { class: "hidden", text: "You: " }), el("p", { class: "text", text: question })),
      el("div", { class: "said card" }, el("p", { class: "who", text: model }), this._reasoned, this._answer, this._error, this._facts, this._steps, this._tools),
    );
  }

  /** The headers are there. */
  begin(headers) {
    this.outcome = cacheOutcome(headers.get("cache-status"), headers.get("age"));
    this._variant = headers.get("x-headrace-variant");
    this._requestId = headers.get("x-request-id");
    this._timing = serverTiming(headers.get("server-timing"));
    this._tell();
  }

  /** A chunk of the stream. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const delta = chunk.choices?.[0]?.delta ?? {};
    const text = typeof delta.content === "string" ? delta.content : "";
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    if (text === "" && thought === "") return;
    this._last = performance.now();
    this._first ??= this._last;
    this._events += 1;
    this.text += text;
    this._reasoning += thought;
    // A frame shows what came since the last one: hundreds of tokens a second are not laid out one by one.
    if (this._isDrawing) return;
    this._isDrawing = true;
    requestAnimationFrame(() => this._draw());
  }

  end(state, error = null) {
    this.state = state;
    this.element.dataset.state = state;
    this._draw();
    this._answer.removeAttribute("aria-busy");
    say(this._error, error ?? (state === "stopped" ? "Stopped." : null));
    this._tools.hidden = false;
    this._tell();
    this.onDraw?.();
  }

  _draw() {
    const wasFirst = this._answer.textContent === "";
    this._isDrawing = false;
    setText(this._answer, this.text);
    this._reasoned.hidden = this._reasoning === "";
    setText(this._thoughts, this._reasoning);
    if (wasFirst && this._first !== null) this._tell();
    this.onDraw?.();
  }

  _tell() {
    if (!this._timing) return;
    const ttft_s = this._first === null ? null : (this._first - this._sent) / 1000;
    const facts = [
      chip("Cache", this.outcome.text, { tone: TONE_OF_OUTCOME[this.outcome.outcome] ?? "", name: "cache" }),
      this._variant ? chip("Variant", this._variant, { name: "variant" }) : null,
      chip("TTFT", format.seconds(ttft_s), { name: "ttft", title: "From sending the question to the first token, measured in this browser" }),
      this.state === "running" ? null : this._speed(),
      this.usage ? chip("Tokens", `${format.count(this.usage.prompt_tokens)} + ${format.count(this.usage.completion_tokens)}`, { name: "tokens", title: "Of the prompt, and of the answer" }) : null,
      this._requestId ? idChip(this._requestId) : null,
    ];
    this._facts.replaceChildren(...facts.filter((fact) => fact !== null));
    this._tellSteps();
  }

  /** Tokens a second after the first one. What comes out of the cache is replayed, and says nothing of the model. */
  _speed() {
    const number = this.usage?.completion_tokens ?? this._events;
    const took_s = (this._last - this._first) / 1000;
    const isKnown = number > 1 && took_s > 0.001;
    const rate = `${this.usage ? "" : "≈ "}${format.count((number - 1) / took_s)} tok/s`;
    if (this.outcome.outcome === "hit") {
      return chip("Replayed", isKnown ? rate : "at once", { name: "speed", title: "How fast the stored answer was sent, not how fast the model is" });
    }
    const title = this.usage ? "After the first token" : "By the events of the stream: it ended before it told its tokens";
    return chip("Speed", isKnown ? rate : "–", { name: "speed", title });
  }

  _tellSteps() {
    const { steps, total_ms } = this._timing;
    this._steps.hidden = steps.length === 0;
    if (steps.length === 0) return;
    const all = Math.max(total_ms ?? 0, steps.reduce((sum, { ms }) => sum + ms, 0)) || 1;
    const bar = el("div", { class: "stepbar", "aria-hidden": "true" });
    const list = el("ul", { class: "steplist", "aria-label": "Steps in the gateway up to the answer's beginning" });
    steps.forEach(({ name, ms }, index) => {
      const tone = TONE_OF_STEP[name] ?? STEP_TONES[index % STEP_TONES.length];
      const piece = el("span", { "data-tone": tone, title: `${name} ${format.seconds(ms / 1000)}` });
      piece.style.flexGrow = String(ms / all);
      bar.append(piece);
      const key = svg("svg", { width: 8, height: 8, "aria-hidden": "true" }, svg("rect", { width: 8, height: 8, rx: 2, class: "swatch", "data-tone": tone }));
      list.append(el("li", {}, key, el("span", { text: name }), el("strong", { text: format.seconds(ms / 1000) })));
    });
    if (total_ms !== null) list.append(el("li", {}, el("span", { text: "total" }), el("strong", { text: format.seconds(total_ms / 1000) })));
    this._steps.replaceChildren(bar, list);
  }
}

function chip(label, text, { tone = "", title = null, name }) {
  return el("li", { title, "data-fact": name }, el("span", { text: label }), el("strong", { text, "data-tone": tone }));
}

function idChip(id) {
  const code = el("code", { text: id });
  const button = el("button", { type: "button", class: "quiet", text: "Copy", "aria-label": "Copy the request id" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(id);
      setText(button, "Copied");
    } catch {
      // Not from plain HTTP, or not allowed: then it is at least selected.
      getSelection().selectAllChildren(code);
      setText(button, "Selected");
    }
  });
  return el("li", { "data-fact": "request" }, el("span", { text: "Request" }), code, button);
}
