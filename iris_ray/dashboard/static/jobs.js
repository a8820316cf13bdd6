// All jobs that the Controller knows, including jobs that ended lately.
import { h, keyed, named, setText, table, tr } from "./dom.js";
import { badge, counted, howFar, since, wants } from "./format.js";
import { inShort } from "./queue.js";
import { tables } from "./store.js";

const COLUMNS = ["Job", "User", "State", "Wants", "Runs on", "Attempt", "Age", "Note"];
const MOST = 300;
const STATES = {
  now: ["Now", (job) => !job.over],
  running: ["Running", (job) => job.state === "running" || job.state === "starting"],
  waiting: ["Waiting", (job) => job.state === "pending"],
  ended: ["Ended", (job) => job.over],
};
const filters = { state: "now", text: "" };

export function jobsPage(root) {
  const search = h("input", {
    type: "search", id: "jobs-search", placeholder: "Job, user, team, type or slice", value: filters.text,
    oninput: () => { filters.text = search.value.trim().toLowerCase(); show(); },
  });
  const choices = h("div", { class: "choices", role: "group", "aria-label": "Which jobs" });
  const found = h("p", { class: "found", role: "status" });
  const { element, body } = table(COLUMNS, "Jobs, the latest first");
  root.append(h("h1", {}, "Jobs"),
    h("div", { class: "bar" }, choices, h("label", { for: "jobs-search", class: "unseen" }, "Search jobs"), search), found, element);

  function show() {
    const all = Object.values(tables.jobs).filter((job) => !job.spare_for);
    const items = Object.keys(STATES).map((name) => `${name} ${all.filter(STATES[name][1]).length} ${filters.state === name}`);
    keyed(choices, items, (item) => item.split(" ")[0], (item) => choice(item, show));
    const wanted = all.filter(STATES[filters.state][1]).filter(matches).sort((a, b) => b.number - a.number);
    setText(found, wanted.length === 0 ? "No job is like that." : wanted.length > MOST ? `the latest ${MOST} of ${counted(wanted.length, "job")}` : "");
    element.hidden = wanted.length === 0;
    keyed(body, wanted.slice(0, MOST).map(entry), (one) => one.job.id, ({ job }) => row(job));
  }
  return { update: (changed) => { if (changed.has("jobs") || changed.has("queue")) show(); } };
}

// The same object as long as nothing about the job, or why it waits, has changed. It goes with the job.
const entries = new WeakMap();
function entry(job) {
  const known = entries.get(job);
  const queued = tables.queue[job.id];
  if (known && known.queued === queued) return known;
  entries.set(job, { job, queued });
  return entries.get(job);
}

function choice(item, show) {
  const [name, count, pressed] = item.split(" ");
  return h("button", { type: "button", "aria-pressed": pressed, onclick: () => { filters.state = name; show(); } },
    STATES[name][0], " ", h("b", {}, count));
}

function matches(job) {
  const text = filters.text;
  return !text || [job.id, job.name, job.user, job.team, job.group, job.type ?? "", ...job.groups].some((one) => one.toLowerCase().includes(text));
}

function row(job) {
  const lost = [
    job.preemptions && counted(job.preemptions, "preemption"), job.failures && counted(job.failures, "failure"),
    job.evictions && counted(job.evictions, "eviction"),
  ].filter(Boolean).join(", ");
  const said = job.state === "running" ? howFar(job) : "";
  const waits = tables.queue[job.id] && inShort(tables.queue[job.id]);
  const note = job.gives_way ? `its hosts are to go: ${job.gives_way.to}` : said || waits || (job.error?.split("\n")[0] ?? "");
  const on = job.groups.length > 4 ? `${job.groups.slice(0, 4).join(", ")} and ${job.groups.length - 4} more` : job.groups.join(", ");
  return tr(COLUMNS, [named(job), job.user, badge(job.state), wants(job), on || "–", job.attempt || "–", since(job.submitted),
    h("span", { class: "why" }, lost ? h("span", { class: "tag" }, lost) : null, " ", note)]);
}
