// What the page asks for, how often, and which view shows it.

import { ApiError, Unreachable, getJson, getText, hasToken, useToken } from "./api.js";
import { Chat } from "./chat.js";
import { byId, say, setText } from "./dom.js";
import { History } from "./history.js";
import { Overview, toneOf } from "./overview.js";
import { Part } from "./part.js";
import { Routing } from "./routing.js";
import { Tabs } from "./tabs.js";

const EVERY_MS = 2000;
const MODELS_EVERY = 15; // looks

const health = new Part(() => getJson("health"), { what: "Reading the health" });
const metrics = new Part(() => getText("metrics"), { what: "Reading the metrics" });
const stats = new Part(() => getJson("v1/cache/stats"), { what: "Reading the cache's figures", scope: "cache:read" });
const routes = new Part(() => getJson("v1/routing"), { what: "Reading the routing", scope: "routing:read" });
const models = new Part(() => getJson("v1/models"), { what: "Reading the models", scope: "inference" });

const past = new History();
const overview = new Overview(past);
const routing = new Routing();
const chat = new Chat(() => checkToken());

// Mutable: the timer of the next look, how many there were, and whether one is under way; what is wrong with what was
// typed in.
let timer = null;
let looks = 0;
let isLooking = false;
let complaint = null;

const tabs = new Tabs(document.querySelector('[role="tablist"]'), () => look());

/** Ask for all that is in view, show it, and come back. */
async function look() {
  if (isLooking || document.hidden) return;
  isLooking = true;
  clearTimeout(timer);
  const begun = performance.now();
  const view = tabs.current;
  const readsModels = looks % MODELS_EVERY === 0 || models.value === null;
  looks += 1;
  const looksAtMetrics = lookAtMetrics();
  const isThere = await health.refresh();
  if (isThere && readsModels) await models.refresh();
  if (isThere) await lookAt(view === "overview" ? stats : view === "routing" ? routes : null);
  await looksAtMetrics;
  isLooking = false;
  show(isThere);
  timer = setTimeout(look, Math.max(0, EVERY_MS - (performance.now() - begun)));
  if (view !== tabs.current) look();
}

/** A part that needs a token. Where the models were refused for want of one, it is not asked for in vain. */
async function lookAt(part) {
  if (!models.isUnauthorized) {
    await part?.refresh();
    if (part?.isUnauthorized) await models.refresh();
  }
  if (models.isUnauthorized) for (const other of [stats, routes]) other.refuse(models.error);
}

async function lookAtMetrics() {
  const asked = performance.now();
  metrics.value = null; // an answer is for one point; without a new one there is none
  await metrics.refresh();
  if (metrics.value !== null) past.add(metrics.value, asked / 1000);
}

function show(isThere) {
  const status = isThere ? (health.value?.status ?? "unknown") : "unreachable";
  setText(byId("status"), status);
  byId("status").dataset.tone = isThere ? toneOf(status) : "bad";
  document.title = status === "ok" ? "Headrace console" : `${status} – Headrace console`;
  const why = health.error instanceof Unreachable ? health.error.message : "The gateway does not answer in time.";
  say(byId("banner"), isThere ? health.note : `${why} Trying again every ${EVERY_MS / 1000} s.`);
  overview.show(health, metrics, stats);
  routing.show(routes);
  chat.showModels(models);
  showToken();
}

/** Another token, or the one in use was refused just now: what was found with it is not shown any more. */
async function checkToken() {
  for (const part of [stats, routes, models]) part.reset();
  await models.refresh();
  if (models.isUnauthorized) for (const other of [stats, routes]) other.refuse(models.error);
  show(health.value !== null);
}

function showToken() {
  const refusal = models.error instanceof ApiError ? models.error : null;
  const isRefused = models.isUnauthorized;
  const isKnown = models.value !== null || refusal !== null;
  byId("token-entry").hidden = !isKnown || (hasToken() ? !isRefused : models.value !== null);
  byId("token-forget").hidden = !hasToken();
  const words = complaint ?? (isRefused ? (hasToken() ? `Not accepted: ${refusal.inWords()}` : "A token is needed.") : hasToken() ? "Token in use." : models.value ? "No token needed." : "");
  setText(byId("token-state"), words);
}

async function changeToken(text) {
  complaint = useToken(text) ? null : "This is no token: it has characters that none has.";
  if (complaint !== null) return showToken();
  byId("token").value = "";
  await checkToken();
  if (byId("token-entry").hidden) tabs.focus();
  else byId("token").focus();
  look();
}

byId("token-use").addEventListener("click", () => changeToken(byId("token").value.trim() || null));
byId("token").addEventListener("keydown", (event) => {
  if (event.key === "Enter") changeToken(byId("token").value.trim() || null);
});
byId("token-forget").addEventListener("click", () => changeToken(null));
document.addEventListener("visibilitychange", look);
look();
