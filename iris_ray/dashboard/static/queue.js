// The queue: waiting jobs in the order in which they are served, and what each waits for.
import { h, keyed, named, setText, table, tr } from "./dom.js";
import { counted, since, wants } from "./format.js";
import { cluster, tables } from "./store.js";

const COLUMNS = ["#", "Job", "User", "Priority", "Wants", "Waits", "Why"];
const KINDS = {
  paused: "It pauses after a launch that failed", not_looked_at: "Too many different jobs are before it", held_back: "It awaits other jobs",
  limited: "Its user has reached a limit", no_such_workers: "Nothing in the cluster suits it",
  too_few: "The cluster has too few that suit it", in_use: "Other jobs use what suits it, or come first",
};

// Why a job waits, in a few words; its page and the rest of the reason say more.
export const inShort = ({ kind }) => KINDS[kind] ?? "It waits";

export function queuePage(root) {
  const { element, body } = table(COLUMNS, "Jobs that wait, the next one first");
  const empty = h("p", { class: "empty" }, "Nobody waits: every job has what it asked for.");
  const more = h("p", { class: "found" });
  root.append(h("h1", {}, "Queue"),
    h("p", { class: "lead" }, "By priority, then by fair share: the user with the smallest share of the cluster, now and over the past hours, goes first. A job that does not fit lets smaller ones pass."), element, empty, more);

  function update(changed) {
    if (!["queue", "cluster", "jobs"].some((name) => changed.has(name))) return;
    const { order = [], waiting = 0 } = cluster();
    const rows = order.map((id, at) => `${at + 1} ${id}`).filter((item) => tables.queue[idOf(item)] && tables.jobs[idOf(item)]);
    element.hidden = rows.length === 0;
    empty.hidden = rows.length > 0;
    setText(more, waiting > rows.length ? `and ${counted(waiting - rows.length, "job")} more behind them` : "");
    keyed(body, rows.map((item) => entry(item)), (one) => one.id, row);
  }

  // The same object as long as nothing about the job has changed. It goes with the job.
  const entries = new WeakMap();
  function entry(item) {
    const id = idOf(item);
    const parts = [item, tables.queue[id], tables.jobs[id]];
    const known = entries.get(tables.jobs[id]);
    if (known && known.parts.every((part, at) => part === parts[at])) return known;
    const made = { id, place: Number.parseInt(item), parts };
    entries.set(tables.jobs[id], made);
    return made;
  }
  return { update };
}

const idOf = (item) => item.slice(item.indexOf(" ") + 1);

function row({ id, place, parts: [, queued, job] }) {
  const why = h("span", { class: "why" }, inShort(queued), h("span", { class: "rest" }, queued.why));
  return tr(COLUMNS, [String(place), named(job), job.user, job.band, wants(job), since(queued.since), why]);
}
