// Small helpers that make and update elements. Text is always set as text, never as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
}

// Makes the children of an element those of the items, in their order. A child is made anew only if its item is another
// object than before, so that what did not change keeps its focus and its selection.
export function keyed(parent, items, keyOf, make) {
  const known = parent.keyedChildren ?? new Map();
  const next = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    const before = known.get(key);
    const element = before && before.item === item ? before.element : make(item);
    if (before && element !== before.element) {
      const focused = before.element.contains(document.activeElement);
      before.element.replaceWith(element);
      if (place === before.element) place = element;
      if (focused) (element.matches("a,button") ? element : element.querySelector("a,button"))?.focus();
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    next.set(key, { item, element });
  }
  for (const [key, { element }] of known) if (!next.has(key)) element.remove();
  parent.keyedChildren = next;
}

export function link(page, text, attributes = {}) {
  return h("a", { href: `#/${page}`, ...attributes }, text);
}

export const jobLink = (id) => link(`jobs/${encodeURIComponent(id)}`, id, { class: "name" });
// A job's link, and its group if it is in one.
export const named = (job) => (job.group ? h("span", {}, jobLink(job.id), " ", h("span", { class: "tag", title: "its group" }, job.group)) : jobLink(job.id));
export const sliceLink = (name) => link(`slices/${encodeURIComponent(name)}`, name, { class: "name" });

// A table whose cells carry the names of their columns, so that a phone can show each row as a card.
export function table(columns, caption) {
  const head = h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)));
  const body = h("tbody");
  const element = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, head), body);
  return { element: h("div", { class: "scroll" }, element), body };
}

export function tr(columns, cells, attributes = {}) {
  return h("tr", attributes, cells.map((cell, at) => h("td", { "data-column": columns[at] }, cell ?? "")));
}
