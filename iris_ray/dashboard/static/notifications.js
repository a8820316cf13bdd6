// Who was told what about jobs, and what still waits: the latest first. With an id, of one job.
import { fill, h, jobLink, link, table, tr } from "./dom.js";
import { badge } from "./format.js";
import { ask, every } from "./store.js";

const COLUMNS = ["When", "Job", "User", "Event", "To", "Outcome", "Tries", "Note"];
const LOOK_MS = 5_000;
const filters = { text: "" };

export function notificationsPage(root, id) {
  const search = h("input", {
    type: "search", id: "notifications-search", placeholder: "Job, user, destination or word", value: filters.text,
    oninput: () => { filters.text = search.value.trim().toLowerCase(); show(); },
  });
  const { element, body } = table(COLUMNS, "Notifications, the latest first");
  const none = h("p", { class: "found", role: "status" });
  const trouble = h("p", { class: "callout", hidden: true });
  root.append(id === null ? "" : h("p", { class: "crumbs" }, link("notifications", "All notifications")),
    h("h1", {}, id === null ? "Notifications" : ["Notifications of ", jobLink(id)]),
    h("p", { class: "lead" }, "Who was told what about jobs in the last 30 days, and what still waits."),
    h("div", { class: "bar" }, h("label", { for: "notifications-search", class: "unseen" }, "Search notifications"), search), trouble, none, element);

  let said = null; // until the first answer
  let ended = false;
  async function look() {
    const { value, error } = await ask(`/api/notifications${id === null ? "" : `?job=${encodeURIComponent(id)}`}`);
    if (ended) return;
    trouble.hidden = !error;
    fill(trouble, error ?? "");
    said = value ?? said;
    show();
  }
  function show() {
    if (said === null) return;
    const found = said.rows.filter(matches);
    fill(body, found.map(row));
    element.hidden = found.length === 0;
    const more = said.cut ? `the latest ${said.rows.length}; iris-ray job notifications ls --limit 1000 shows more` : "";
    fill(none, found.length ? more : "Nobody was told anything like that.");
  }

  const end = every(LOOK_MS, look);
  return { update: () => {}, end: () => { end(); ended = true; } };
}

function matches(one) {
  return [one.job_id, one.name, one.user, one.event, one.to, one.outcome, one.text, one.error].some((text) => text.toLowerCase().includes(filters.text));
}

function row(one) {
  const when = new Date(one.at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });
  return tr(COLUMNS, [when, jobLink(one.job_id), one.user, one.event, one.to, badge(one.outcome), one.tries || "–",
    h("span", { class: "why" }, one.error ? h("span", { class: "tag" }, one.error) : null, " ", one.text)]);
}
