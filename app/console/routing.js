// The second view: models, their variants, the pools behind them, and every replica, as /v1/routing tells it.

import { byId, el, say, setText, sync } from "./dom.js";
import * as format from "./format.js";
import { Table } from "./table.js";

const VARIANTS = ["Variant", "Pool", "Share", "Weight", "Revision", "Role"];
const REPLICAS = ["Replica", "State", "Breaker", "In flight", "First token", "Answer", "Requests", "Failures"];
const WORDS = new Set(["Variant", "Pool", "Revision", "Role", "Replica", "State", "Breaker"]);

export class Routing {
  constructor() {
    this._body = byId("routing-body");
    this._note = byId("routing-note");
    this._views = new WeakMap(); // of the cards, by their elements
  }

  show(part) {
    const { value } = part;
    const worker = value?.workers > 1 ? `As worker ${value.worker} of ${value.workers} sees it; each has a view of its own.` : null;
    say(this._note, part.note ?? worker);
    const models = (value?.models ?? []).map((model) => ({ kind: "Model", ...model }));
    const pools = (value?.pools ?? []).map((pool) => ({ kind: "Pool", ...pool }));
    sync(this._body, [...models, ...pools], ({ kind, name }) => `${kind} ${name}`, (item) => this._make(item), (element, item) =>
      this._views.get(element).show(item),
    );
  }

  _make(item) {
    const view = new Card(item.kind, item.name, item.kind === "Model" ? VARIANTS : REPLICAS);
    this._views.set(view.element, view);
    return view.element;
  }
}

class Card {
  constructor(kind, name, columns) {
    this._isModel = kind === "Model";
    this._facts = el("ul", { class: "facts" });
    this._alert = el("p", { class: "note", hidden: true });
    const holder = el("div", {});
    this._table = new Table(holder, {
      id: `${kind.toLowerCase()}-${name}`,
      title: `${kind} ${name}`,
      columns: columns.map((column) => ({ name: column, isNumber: !WORDS.has(column) })),
    });
    const section = this._table.element;
    section.querySelector("h3").replaceChildren(el("span", { class: "kind", text: kind }), ` ${name}`);
    section.querySelector(".about").replaceWith(this._facts, this._alert);
    this.element = section;
  }

  show(item) {
    if (this._isModel) this._showModel(item);
    else this._showPool(item);
  }

  _showModel({ sticky_by, variants, guardrail, shadow }) {
    const facts = variants.length > 1 ? [["sticky by", sticky_by]] : [];
    if (shadow) {
      facts.push(["shadow", `${shadow.variant}: ${format.count(shadow.answered)} answered, ${format.count(shadow.dropped)} dropped`]);
      if (shadow.difference_mean !== null) facts.push(["difference", format.percent(shadow.difference_mean)]);
    }
    if (guardrail) {
      facts.push(["canary", [guardrail.variant, guardrail.state.replace("_", " "), guardrail.step === null ? null : `step ${guardrail.step + 1}`].filter(Boolean).join(", ")]);
      facts.push(["canary's errors", `${format.percent(guardrail.canary.error_rate)} against ${format.percent(guardrail.stable.error_rate)}`]);
      facts.push(["canary's TTFT", `${format.seconds(guardrail.canary.ttft_median_s)} against ${format.seconds(guardrail.stable.ttft_median_s)}`]);
    }
    this._showFacts(facts);
    say(this._alert, guardrail?.state === "rolled_back" ? `Rolled back: ${guardrail.reason ?? "no reason is told"}.` : null);
    const rows = variants.map((variant) => {
      const isCanary = guardrail?.variant === variant.name;
      const role = isCanary ? `canary, ${guardrail.state.replace("_", " ")}` : shadow?.variant === variant.name ? "shadow" : "–";
      const cells = [
        variant.name || "–", variant.pool, { text: format.percent(variant.share), share: variant.share }, format.count(variant.weight), short(variant.revision),
        { text: role, tone: isCanary && guardrail.state === "rolled_back" ? "bad" : "" },
      ];
      return { key: variant.name, cells };
    });
    this._table.update({ rows });
  }

  _showPool({ engine, balance, is_ready, replicas, admission, retries, waited_for_replica, spilled_over }) {
    const refused = Object.values(admission.refused).reduce((sum, number) => sum + number, 0);
    this._showFacts([
      ["engine", engine],
      ["balance", balance],
      ["in flight", format.count(admission.in_flight)],
      ["waiting", format.count(admission.waiting)],
      ["admitted", format.count(admission.admitted)],
      ["refused", format.count(refused)],
      ["mean wait", format.seconds(admission.waited ? admission.waited_s / admission.waited : null)],
      ["retries", format.count(retries)],
      ["waited for a replica", format.count(waited_for_replica)],
      ["spilled over", format.count(spilled_over)],
    ]);
    say(this._alert, is_ready ? null : "Not ready: no replica can answer.");
    const busiest = Math.max(1, ...replicas.map(({ in_flight }) => in_flight));
    const rows = replicas.map((replica) => ({
      key: replica.name,
      cells: [
        replica.name, stateOf(replica),
        { text: replica.state.replace("_", " "), tone: { open: "bad", half_open: "warn" }[replica.state] ?? "" },
        { text: format.count(replica.in_flight), share: replica.in_flight / busiest },
        format.seconds(replica.ttft_s), format.seconds(replica.answer_s), format.count(replica.requests),
        { text: format.count(replica.failures), tone: replica.failures ? "bad" : "" },
      ],
    }));
    this._table.update({ rows, note: rows.length ? null : "No replicas: the name resolves to no address." });
  }

  _showFacts(facts) {
    const make = ([name]) => el("li", {}, el("span", { text: name }), " ", el("strong", {}));
    sync(this._facts, facts, ([name]) => name, make, (element, [, text]) => setText(element.lastElementChild, text));
  }
}

function stateOf({ is_ready, resting_s }) {
  if (!is_ready) return { text: "down", tone: "bad" };
  return resting_s > 0 ? { text: `rests ${format.seconds(resting_s)}`, tone: "warn" } : { text: "up", tone: "good" };
}

function short(revision) {
  return revision ? { text: revision.slice(0, 12), title: revision } : "–";
}
