// Tables whose cells are updated in place, and which become lists on a narrow screen.

import { el, setText, sync } from "./dom.js";

export class Table {
  /** `columns`: {name, isNumber}. The roles are told, since `display` takes them away on a narrow screen. */
  constructor(parent, { id, title, about = null, columns }) {
    this._columns = columns;
    this._about = el("p", { class: "about", text: about ?? "" });
    this._note = el("p", { class: "note", hidden: true });
    this._rows = el("tbody", { role: "rowgroup" });
    const heads = columns.map(({ name, isNumber }) => el("th", { scope: "col", role: "columnheader", class: isNumber && "number", text: name }));
    this._table = el(
      "table",
      { role: "table", "aria-label": title, hidden: true },
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)),
      this._rows,
    );
    this.element = el("section", { class: "card", id: `table-${id}` }, el("h3", { text: title }), this._about, this._note, this._table);
    parent.append(this.element);
  }

  /** `rows`: {key, cells}, a cell for each column: a text, or {text, share (a bar from 0 to 1), tone, title}. */
  update({ rows, note = null }) {
    this._note.hidden = note === null;
    setText(this._note, note ?? "");
    this._table.hidden = rows.length === 0;
    sync(this._rows, rows, ({ key }) => key, () => this._makeRow(), updateRow);
  }

  _makeRow() {
    const cells = this._columns.map(({ name, isNumber }) =>
      el("td", { role: "cell", "data-label": name, class: isNumber && "number" }, el("span", { class: "value" }), el("span", { class: "bar", hidden: true }, el("span", {}))),
    );
    return el("tr", { role: "row" }, ...cells);
  }
}

function updateRow(row, { cells }) {
  cells.forEach((cell, index) => {
    const { text, share = null, tone = "", title = "" } = typeof cell === "string" ? { text: cell } : cell;
    const [value, bar] = row.children[index].children;
    setText(value, text);
    value.dataset.tone = tone;
    if (title) value.title = title;
    bar.hidden = share === null;
    bar.firstElementChild.style.width = `${Math.min(1, Math.max(0, share ?? 0)) * 100}%`;
  });
}
