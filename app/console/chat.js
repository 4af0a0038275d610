// The third view: a conversation with a model. It is kept in this page's memory alone.

import { ApiError, Unreachable, apiError, post } from "./api.js";
import { Turn } from "./answer.js";
import { byId, el, say, setText, sync } from "./dom.js";
import { eventsOf } from "./sse.js";

const NEAR_END_PX = 80;

export class Chat {
  /** `onUnauthorized`: called when a question was refused for want of a good token. */
  constructor(onUnauthorized) {
    this._onUnauthorized = onUnauthorized;
    this._model = byId("model");
    this._question = byId("question");
    this._list = byId("turns");
    // Mutable: the conversation, what stops the answer that comes just now (null: none does), and whether the end is in
    // view: growing text must not push it out then, and must not scroll otherwise.
    this._turns = [];
    this._stopper = null;
    this._isAtEnd = true;
    document.addEventListener("scroll", () => (this._isAtEnd = this._leftBelow() < NEAR_END_PX), { capture: true, passive: true });
    byId("settings").open = matchMedia("(min-width: 721px)").matches;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this._send();
    });
    this._question.addEventListener("keydown", (event) => {
      // While a word is being composed, Enter is the input method's.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this._send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this._startAnew());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing && this._stopper !== null) this.stop();
    });
  }

  showModels(part) {
    const names = part.value?.data.map(({ id }) => id) ?? [];
    say(byId("model-note"), part.note ?? (part.value && names.length === 0 ? "The token may use no model." : null));
    if (part.value === null) return;
    sync(this._model, names, (name) => name, (name) => el("option", { value: name, text: name }), () => {});
  }

  stop() {
    this._stopper?.abort();
  }

  _startAnew() {
    this.stop();
    this._turns = [];
    this._list.replaceChildren();
    setText(byId("chat-state"), "");
    this._question.focus();
  }

  _send() {
    const question = this._question.value.trim();
    if (question === "" || this._stopper !== null) return;
    this._question.value = "";
    this._ask(question);
  }

  _again(turn) {
    if (this._stopper !== null) return;
    this._turns = this._turns.filter((other) => other !== turn);
    turn.element.remove();
    this._ask(turn.question);
    this._question.focus();
  }

  async _ask(question) {
    const body = this._request(question);
    const turn = new Turn(question, body.model || "no model", () => this._again(turn));
    turn.onDraw = () => this._follow();
    this._turns.push(turn);
    this._list.append(turn.element);
    this._isAtEnd = true;
    this._follow();
    const stopper = (this._stopper = new AbortController());
    this._showRunning(true, "The model is answering.");
    try {
      await this._read(turn, body, stopper.signal);
      turn.end("done");
    } catch (error) {
      if (stopper.signal.aborted) turn.end("stopped");
      else turn.end("failed", inWords(error));
      if (error.status === 401) this._giveBack(turn);
    }
    this._stopper = null;
    this._showRunning(false, wordsFor(turn));
  }

  /** A question that nobody took stands where it was typed, for when there is another token. */
  _giveBack(turn) {
    if (this._question.value === "") this._question.value = turn.question;
    this._onUnauthorized();
  }

  /** Raises: ApiError, Unreachable, AbortError, and TypeError when the connection breaks. */
  async _read(turn, body, signal) {
    const response = await post("v1/chat/completions", body, signal);
    turn.begin(response.headers);
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw apiError(null, chunk.error);
      turn.take(chunk);
    }
    throw new ApiError(null, { message: "The stream broke off before its end." });
  }

  _request(question) {
    const body = { model: this._model.value, messages: this._messages(question), stream: true, stream_options: { include_usage: true } };
    for (const [name, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"]]) {
      const value = byId(id).valueAsNumber;
      if (Number.isFinite(value)) body[name] = value;
    }
    return body;
  }

  /** What failed is not part of the conversation; what was stopped is, as far as it came. */
  _messages(question) {
    const system = byId("system").value.trim();
    const heard = this._turns.filter(({ state, text }) => (state === "done" || state === "stopped") && text !== "");
    const said = heard.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.text },
    ]);
    return [...(system ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: question }];
  }

  _showRunning(isRunning, words) {
    const hadFocus = document.activeElement === byId("stop") || document.activeElement === byId("send");
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
    if (hadFocus) this._question.focus();
    setText(byId("chat-state"), words);
  }

  /** Keep the end in view for who is there; who has scrolled up stays. */
  _follow() {
    if (this._isAtEnd) this._scroller().scrollTop = this._scroller().scrollHeight;
  }

  /** On a narrow screen the whole page scrolls, and not the conversation within it. */
  _scroller() {
    return getComputedStyle(this._list).overflowY === "auto" ? this._list : document.scrollingElement;
  }

  _leftBelow() {
    const { scrollHeight, scrollTop, clientHeight } = this._scroller();
    return scrollHeight - scrollTop - clientHeight;
  }
}

function inWords(error) {
  if (error instanceof ApiError) return error.inWords();
  if (error instanceof Unreachable) return error.message;
  if (error instanceof SyntaxError) return "The stream holds something that is no JSON.";
  return "The connection broke before the answer's end.";
}

function wordsFor({ state, usage, outcome }) {
  if (state === "stopped") return "Stopped.";
  if (state === "failed") return "The answer failed.";
  return `The answer is complete${usage ? `: ${usage.completion_tokens} tokens` : ""}, cache ${outcome.text}.`;
}
