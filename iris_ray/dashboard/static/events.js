// What has happened since the dashboard began: the latest first.
import { h, jobLink, keyed, setText, sliceLink } from "./dom.js";
import { clock } from "./format.js";
import { tables } from "./store.js";

const KINDS = { all: "All", job: "Jobs", host: "Hosts", bad: "Trouble only" };
const MARKS = { good: "✓", bad: "✕", notice: "!", plain: "•" };
const filters = { kind: "all", text: "" };

export function eventsPage(root) {
  const search = h("input", {
    type: "search", id: "events-search", placeholder: "Job, slice, user or word", value: filters.text,
    oninput: () => { filters.text = search.value.trim().toLowerCase(); show(); },
  });
  const choices = h("div", { class: "choices", role: "group", "aria-label": "Which events" });
  const found = h("p", { class: "found", role: "status" });
  const list = h("ol", { class: "events", reversed: true });
  root.append(h("h1", {}, "Events"), h("p", { class: "lead" }, "What has happened since this dashboard was started, the latest first."),
    h("div", { class: "bar" }, choices, h("label", { for: "events-search", class: "unseen" }, "Search events"), search), found, list);

  function show() {
    const items = Object.keys(KINDS).map((name) => `${name} ${filters.kind === name}`);
    keyed(choices, items, (item) => item.split(" ")[0], (item) => choice(item, show));
    const wanted = Object.values(tables.events).filter(matches).sort((a, b) => b.number - a.number);
    setText(found, wanted.length ? "" : "Nothing like that has happened yet.");
    keyed(list, wanted, (event) => event.number, eventLine);
  }
  return { update: (changed) => { if (changed.has("events")) show(); } };
}

function choice(item, show) {
  const [name, pressed] = item.split(" ");
  return h("button", { type: "button", "aria-pressed": pressed, onclick: () => { filters.kind = name; show(); } }, KINDS[name]);
}

function matches(event) {
  const ofKind = { all: true, job: event.job !== null, host: event.slice !== null, bad: event.level === "bad" || event.level === "notice" };
  const text = filters.text;
  return ofKind[filters.kind] && (!text || [event.job, event.slice, event.user, event.text].some((one) => one?.toLowerCase().includes(text)));
}

function eventLine(event) {
  return h("li", { class: event.level }, clock(event.at), h("span", { class: "mark", "aria-hidden": "true" }, MARKS[event.level]),
    h("span", {}, event.job ? jobLink(event.job) : sliceLink(event.slice), " ", h("span", { class: "text" }, event.text)));
}
