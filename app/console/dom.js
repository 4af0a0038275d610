// Elements without markup in strings: all text that is shown goes through text nodes, whoever wrote it.

const SVG = "http://www.w3.org/2000/svg";

/** `properties`: attributes; `text`, `on` (listeners by event), and `class` besides. Null and false are left out. */
export function el(name, properties = {}, ...children) {
  return fill(document.createElement(name), properties, children);
}

export function svg(name, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Change the text only if it is another: a selection in it stays, and nothing is read out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show a text, or hide the element that is for it. */
export function say(element, text) {
  setText(element, text ?? "");
  element.hidden = !text;
}

/** Keep one child for each item, in their order; those that are there already are updated and not made anew.
 *  `keyOf(item)`: a string; `make(item)`: an element; `update(element, item)`. */
export function sync(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}
