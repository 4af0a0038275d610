// The gateway, as this page calls it. The token lives here, in a variable of the module, and nowhere else.

const TIMEOUT_MS = 5000;
const ROOT = new URL("../", import.meta.url); // the page lies at /console/, behind whatever path a proxy puts before it

let token = null;

/** `text` null: none. False: a header cannot hold it, so it is none; what was in use stays. */
export function useToken(text) {
  if (text !== null && !/^[\x21-\x7e]+$/.test(text)) return false;
  token = text;
  return true;
}

export function hasToken() {
  return token !== null;
}

/** An answer that is an error, in OpenAI's form where the gateway made it. `retryAfter_s`: null if it does not say. */
export class ApiError extends Error {
  constructor(status, { message, code = null, requestId = null, retryAfter_s = null }) {
    super(message);
    this.status = status;
    this.code = code;
    this.requestId = requestId;
    this.retryAfter_s = retryAfter_s;
  }

  /** For people: what is wrong, when to try again, and the id to ask about. */
  inWords() {
    const parts = [this.message];
    if (this.retryAfter_s !== null) parts.push(`Try again in ${this.retryAfter_s} s.`);
    const facts = [this.status, this.code, this.requestId && `request ${this.requestId}`].filter(Boolean);
    return facts.length ? `${parts.join(" ")} (${facts.join(", ")})` : parts.join(" ");
  }
}

/** Neither an answer nor an error of the gateway's: it cannot be reached, or does not answer in time. */
export class Unreachable extends Error {}

/** Raises: ApiError, Unreachable. */
export async function getJson(path) {
  return (await get(path)).json();
}

/** Raises: ApiError, Unreachable. */
export async function getText(path) {
  return (await get(path)).text();
}

async function get(path) {
  const response = await call(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The response as soon as its headers are there. Raises: ApiError, Unreachable; AbortError when `signal` says so. */
export async function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const response = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function call(path, options) {
  const headers = { ...options.headers, ...(token === null ? {} : { authorization: `Bearer ${token}` }) };
  try {
    return await fetch(new URL(path, ROOT), { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new Unreachable("The gateway cannot be reached.");
  }
}

async function errorOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not the gateway's own: a proxy's page, or cut short.
  }
  return apiError(response.status, error, response.headers);
}

/** Of an error object. `status` and `headers` null: it came within a stream. */
export function apiError(status, error, headers = null) {
  const retryAfter = Number(headers?.get("retry-after") ?? NaN);
  return new ApiError(status, {
    message: typeof error?.message === "string" ? error.message : status === null ? "The answer broke off with an error." : `The answer has the status ${status}.`,
    code: error?.code ?? null,
    requestId: error?.request_id ?? headers?.get("x-request-id") ?? null,
    retryAfter_s: Number.isFinite(retryAfter) ? retryAfter : null,
  });
}
