// One job: why it waits, how its attempts went, its tasks and what they print.
import { fill, h, jobLink, link, setText, sliceLink, table, tr } from "./dom.js";
import { badge, clock, counted, duration, howFar, now, short, since } from "./format.js";
import { attemptsOf, timeline } from "./timeline.js";
import { compareLink } from "./compare.js";
import { curvesView } from "./curves.js";
import { goodputView, hours } from "./goodput.js";
import { logView } from "./logs.js";
import { ask, cluster, tables } from "./store.js";

const COLUMNS = ["Task", "State", "Attempt", "Ran", "Exit", "Where", "Error"];
const ATTEMPTS = ["Attempt", "End", "Ran", "On", "Cause"];
const LOOK_MS = 2000;

export function jobPage(root, id) {
  const parts = {
    head: h("div", { class: "job-head" }), why: h("section", { hidden: true }), line: h("section", {}),
    facts: h("dl", { class: "fact-grid" }), goodput: h("section", { hidden: true }), events: h("section", { hidden: true }),
  };
  const tasks = table(COLUMNS, "Tasks");
  const taskSection = h("section", { hidden: true }, h("h2", {}, "Tasks"), tasks.element);
  const taskNote = h("p", { class: "found" });
  const logs = logView(id);
  const curves = curvesView(id);
  const logSection = h("section", {}, h("h2", {}, "Logs"), logs.element);
  root.append(h("p", { class: "crumbs" }, link("jobs", "Jobs"), " · ", h("a", { href: compareLink(id, "") }, "compare with another run"),
    (cluster().services ?? []).includes("notify") ? [" · ", link(`notifications/${encodeURIComponent(id)}`, "notifications")] : ""), h("h1", {}, id), parts.head, parts.why, parts.facts, parts.line, parts.goodput, curves.element,
    logSection, taskSection, parts.events);
  taskSection.append(taskNote);

  let asked = 0;
  async function look() {
    const number = ++asked;
    const { status, value: job, error } = await ask(`/api/jobs/${encodeURIComponent(id)}`);
    if (number !== asked || status === 0) return;
    if (error) {
      logSection.hidden = status === 404 && (await showPast(parts, id));
      return logSection.hidden ? ends() : fill(parts.head, h("p", { class: "callout" }, error));
    }
    showHead(parts, job);
    showAttempts(parts.line, job);
    showGoodput(parts.goodput, job);
    showEvents(parts.events, job);
    taskSection.hidden = job.attempt === 0;
    fill(tasks.body, job.tasks.map(taskRow));
    setText(taskNote, job.size > job.tasks.length ? `the first ${job.tasks.length} of ${counted(job.size, "task")}` : "");
    logs.about(job);
  }

  const timer = setInterval(() => { if (!tables.jobs[id]?.over && !document.hidden) look(); }, LOOK_MS);
  let known = null;
  function update() {
    if (known === null || tables.jobs[id] !== known) look();
    known = tables.jobs[id] ?? {};
  }
  function ends() {
    clearInterval(timer);
    logs.end();
    curves.end();
    asked = -1;
  }
  return { update, end: ends };
}

const PAST = ["Attempt", "End", "Why", "Ran", "On", "First to end", "Cost", "Cause"];

// Shows a job that the Controller has forgotten, as the history has it; returns whether it has.
async function showPast({ head, facts, line }, id) {
  const { job, attempts } = (await ask(`/api/history/jobs/${encodeURIComponent(id)}`)).value ?? {};
  if (!job) return false;
  fill(head, badge(job.state), h("span", {}, `by ${job.user}`), h("span", {}, `${job.band} priority`), h("span", {}, job.type ?? "no TPU"),
    h("span", {}, "submitted ", since(job.submitted_at), " ago"), h("span", {}, "from the history: the Controller has forgotten it"));
  fill(facts, fact("Ran", job.started_at === null ? "never" : duration((job.ended_at ?? job.seen_at) - job.started_at)), fact("Attempts", String(job.attempts)),
    fact("Tasks", String(job.tasks)), job.says || job.step !== null ? fact("Said", howFar({ step: job.step, says: job.says }), "wide") : null,
    fact("Preemptions", String(job.preemptions)), fact("Failures", String(job.failures)),
    job.error ? fact("End", h("span", { class: "error" }, job.error.trim().split("\n")[0]), "wide") : null);
  const rows = table(PAST, "Attempts, the latest first");
  fill(rows.body, attempts.reverse().map((one) => tr(PAST, [one.number, badge(one.state), one.cause ?? "–",
    one.started_at === null ? "–" : duration((one.ended_at ?? job.seen_at) - one.started_at), one.slices || "–", one.host ?? "–",
    one.lost_chip_s === null ? "–" : `${hours(one.lost_chip_s)} chip-hours`, one.error ? h("span", { class: "why" }, one.error.trim().split("\n")[0]) : ""])));
  fill(line, attempts.length ? [h("h2", {}, "Attempts"), rows.element] : null);
  return true;
}

function showHead({ head, why, facts }, job) {
  fill(head, badge(job.state), h("span", {}, `by ${job.user}`), job.team ? h("span", {}, `for ${job.team}`) : null, job.group ? h("span", {}, `in group ${job.group}`) : null, h("span", {}, `${job.priority} priority${job.priority_reason ? `: ${job.priority_reason}` : ""}`),
    h("span", {}, job.device ?? "no TPU"), h("span", {}, "submitted ", since(job.submitted_at), " ago"));
  const place = placeOf(job.job_id);
  why.hidden = job.waiting === null;
  if (job.waiting) {
    const closest = job.waiting.shortage?.closest ?? [];
    fill(why, h("h2", {}, "Why it waits"), h("p", { class: "callout" }, job.waiting.summary),
      closest.length ? [h("p", { class: "small" }, "What comes closest:"), h("ul", { class: "closest" }, closest.map(obstacle))] : null,
      job.waiting.shortage ? h("p", { class: "small" }, `In full, as iris-ray why says it: ${job.explanation}.`) : null,
      h("p", { class: "small" }, place ? `Place ${place} in the queue. ` : "", link("queue", "The whole queue")));
  }
  fill(facts,
    fact("Slices", job.groups.length ? job.groups.flatMap((name, at) => [at ? ", " : "", sliceLink(name)]) : "none now"),
    fact("Attempt", job.attempt || "none yet"),
    fact("Tasks", String(job.size)),
    job.status || job.step !== null ? fact("Says", howFar({ step: job.step, says: job.status }), "wide") : null,
    job.heartbeat_at ? fact("Heartbeat", [since(job.heartbeat_at), " ago"]) : null,
    job.stall_limit ? fact("Hangs after", job.stall_limit) : null,
    fact("Preemptions", ofAllowed(job.preemptions, job.max_retries_preemption)),
    fact("Failures", ofAllowed(job.failures, job.max_retries_failure)),
    job.evictions ? fact("Evictions", `${job.evictions}, free of charge`) : null,
    job.gives_way ? fact("Gives way", `${job.gives_way[0]}, within ${duration(job.gives_way[1] - now())}`) : null,
    job.about_team ? fact("Quota", job.about_team, "wide") : null,
    job.error ? fact("Last end", h("span", { class: "error" }, job.error.trim().split("\n")[0]), "wide") : null);
}

const ofAllowed = (number, most) => (most ? `${number} of ${most.toLocaleString()} allowed` : `${number}, none allowed`);

// What is in the way on one slice; the jobs that it names are links.
function obstacle({ group, why, used_by: users }) {
  const parts = users.reduce((found, id) => found.flatMap((part) => typeof part === "string" ? splitAt(part, id) : [part]), [why]);
  return h("li", {}, sliceLink(group), ": ", parts);
}

function splitAt(text, id) {
  const at = text.indexOf(id);
  return at < 0 ? [text] : [text.slice(0, at), jobLink(id), text.slice(at + id.length)];
}

const fact = (name, value, look = "") => h("div", { class: look }, h("dt", {}, name), h("dd", {}, value));

function placeOf(id) {
  const at = (tables.cluster.now?.order ?? []).indexOf(id);
  return at < 0 ? null : at + 1;
}

function showAttempts(section, job) {
  const attempts = attemptsOf(job);
  if (!attempts.length) return fill(section);
  const rows = table(ATTEMPTS, "Attempts, the latest first");
  fill(rows.body, [...attempts].reverse().map((one) => tr(ATTEMPTS, [
    one.number, badge(one.state), one.start ? duration((one.end ?? now()) - one.start) : "–", one.groups.join(", ") || "–",
    one.cause ? h("span", { class: "why" }, one.cause) : "",
  ])));
  fill(section, h("h2", {}, "Attempts"), timeline(job, attempts), lastFailure(job), rows.element);
}

const FAILURES = {
  PREEMPTED: "preemption", LOST: "loss of a host", CRASHED: "crash", HUNG: "hang", EVICTED: "eviction", GROWN: "move to more slices",
};

// What the latest end of an attempt cost from which the job went on, until its next new step.
function lastFailure({ goodput }) {
  const last = goodput?.last_failure;
  if (!last) return null;
  const what = `The last ${FAILURES[last.cause]}, which ended attempt ${last.attempt},`;
  const parts = [
    last.again_s > 0 && `${short(last.again_s)} of steps that were done again`,
    `${short(last.away_s)} until its code ran again`,
    last.start_s > 0 && `${short(last.start_s)} until its first step`,
  ];
  return h("p", { class: "headline last-cost" }, `${what} ${last.is_over ? "cost" : "has cost so far"} `,
    h("b", {}, short(last.again_s + last.away_s + last.start_s)), " and ", h("b", {}, `${hours(last.chip_seconds)} chip-hours`),
    `: ${parts.filter(Boolean).join(", ")}.`);
}

// The numbers of a task's processes, by which logs and commands know them.
function indices({ task_index, processes = 1 }) {
  const first = task_index * processes;
  return processes > 1 ? `${first}–${first + processes - 1}` : first;
}

function taskRow(task) {
  const ran = task.started_at === null ? "–" : duration((task.ended_at ?? now()) - task.started_at);
  const where = task.group ? `${task.group}, ${task.host}` : task.address ?? "–";
  return tr(COLUMNS, [indices(task), badge(task.state), task.attempt || "–", ran, task.exit_code ?? "–", where,
    task.error ? h("span", { class: "why", title: task.error }, task.error.trim().split("\n")[0]) : ""]);
}

// What the reader has opened stays open.
function showGoodput(section, { goodput }) {
  const view = goodput && goodputView(goodput);
  section.hidden = !view;
  if (!view) return;
  const isOpen = section.querySelector("details")?.open ?? false;
  fill(section, h("h2", {}, "Where its time went"), view);
  section.querySelector("details").open = isOpen;
}

function showEvents(section, { events }) {
  section.hidden = events.length === 0;
  const line = (event) => h("li", { class: "plain" }, clock(event.at), h("span", { class: "mark", "aria-hidden": "true" }, "•"),
    h("span", { class: "text" }, event.task_index === null ? "" : `task ${event.task_index}: `, event.what));
  fill(section, h("h2", {}, "Events"), h("ol", { class: "events", reversed: true }, [...events].reverse().slice(0, 50).map(line)));
}
