// Tabs by the pattern of the ARIA Authoring Practices: arrows, Home, and End go from one to another; Tab goes past them.

export class Tabs {
  /** The tab whose name is in the address (`#/chat`) is open at first. `onOpen(name)` is called for each that opens later. */
  constructor(list, onOpen) {
    this._tabs = [...list.querySelectorAll('[role="tab"]')];
    this._onOpen = onOpen;
    for (const tab of this._tabs) {
      tab.addEventListener("click", () => this.open(nameOf(tab)));
      tab.addEventListener("keydown", (event) => this._step(event, tab));
    }
    window.addEventListener("hashchange", () => this.open(this._addressed()));
    this._show(this._addressed());
  }

  get current() {
    return nameOf(this._tabs.find((tab) => tab.getAttribute("aria-selected") === "true"));
  }

  open(name) {
    this._show(name);
    this._onOpen(name);
  }

  focus() {
    this._tabs.find((tab) => tab.tabIndex === 0).focus();
  }

  _show(name) {
    for (const tab of this._tabs) {
      const isOpen = nameOf(tab) === name;
      tab.setAttribute("aria-selected", String(isOpen));
      tab.tabIndex = isOpen ? 0 : -1;
      document.getElementById(nameOf(tab)).hidden = !isOpen;
    }
    // No element's id: with one, the browser would go there, and Tab on from there, past the head of the page.
    history.replaceState(null, "", `#/${name}`);
  }

  _addressed() {
    const name = location.hash.slice(2);
    return this._tabs.some((tab) => nameOf(tab) === name) ? name : this.current;
  }

  _step(event, tab) {
    const last = this._tabs.length - 1;
    const index = this._tabs.indexOf(tab);
    const next = { ArrowLeft: index === 0 ? last : index - 1, ArrowRight: index === last ? 0 : index + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.open(nameOf(this._tabs[next]));
    this._tabs[next].focus();
  }
}

function nameOf(tab) {
  return tab.getAttribute("aria-controls");
}
