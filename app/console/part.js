// One thing that the page asks the gateway for again and again, and what to say where it does not get it.

import { ApiError, Unreachable } from "./api.js";

const SELDOM_MS = 30_000;
const LASTING = new Set([401, 403, 404]);

export class Part {
  /** `read`: asks. `what`: what it is, as in "Reading the metrics"; `scope`: what the token needs for it, null: nothing. */
  constructor(read, { what, scope = null }) {
    this._read = read;
    this._what = what;
    this._scope = scope;
    // Mutable: the last answer, what was wrong with the last try, when to ask again, and how many tokens there were.
    this.value = null;
    this.error = null;
    this._notBefore = 0;
    this._era = 0;
  }

  /** Ask, unless it is too early for that. True: the gateway answered, if only to refuse. */
  async refresh() {
    if (performance.now() < this._notBefore) return true;
    const era = this._era;
    try {
      const value = await this._read();
      if (era !== this._era) return true; // what another token was told
      this.value = value;
      this.error = null;
    } catch (error) {
      if (era !== this._era) return true;
      this.value = null;
      this.error = error;
      if (!(error instanceof ApiError)) return false;
      // What is not there or not allowed will not be in two seconds either; another token resets this.
      const wait_ms = LASTING.has(error.status) ? SELDOM_MS : (error.retryAfter_s ?? 0) * 1000;
      this._notBefore = error.code === "missing_token" ? Infinity : performance.now() + wait_ms;
    }
    return true;
  }

  /** As if it had been asked for, and refused like another part. */
  refuse(error) {
    this.value = null;
    this.error = error;
  }

  /** Another token: what was found with the old one is not shown. */
  reset() {
    this._era += 1;
    this.value = null;
    this.error = null;
    this._notBefore = 0;
  }

  /** There is no token, or it is not accepted. */
  get isUnauthorized() {
    return this.error instanceof ApiError && this.error.status === 401;
  }

  /** Why there is nothing to show; null: there is, or nobody has asked yet. */
  get note() {
    const { error } = this;
    if (error === null || error instanceof Unreachable) return error && error.message;
    if (!(error instanceof ApiError)) return `${this._what} failed: ${error.message}`;
    if (this._scope !== null && error.code === "missing_token") return `This needs a token with the scope ${this._scope}.`;
    if (this._scope !== null && error.status === 403) return `This needs the scope ${this._scope}, which the token does not have.`;
    return `${this._what} failed: ${error.inWords()}`;
  }
}
