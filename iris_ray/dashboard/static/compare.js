// Two runs beside each other: their facts, and their curves in one picture each, by step or by time.
import { fill, h, jobLink, table, tr } from "./dom.js";
import { amount, badge, duration, percent } from "./format.js";
import { curves } from "./chart.js";
import { rates } from "./curves.js";
import { hours } from "./goodput.js";
import { ask, every } from "./store.js";

const COLUMNS = ["", "First", "Second"];
const LOOKS = ["hue0", "hue1"];
const LEAST = 2; // points; fewer are no curve
const LOOK_MS = 60_000;
const MOST_NAMES = 100;
const AXES = { "by step": "step", "by time": "time" };
const chosen = { axis: "by step" };

// The address of the page for two runs. No id has a comma.
export const compareLink = (...ids) => `#/compare/${ids.map(encodeURIComponent).join(",")}`;

export function comparePage(root, argument) {
  const ids = (argument ?? "").split(",");
  const names = h("datalist", { id: "known-runs" });
  const fields = LOOKS.map((look, at) => h("input", { type: "search", id: `run${at}`, list: "known-runs", placeholder: "Job", value: ids[at] ?? "", onchange: () => choose() }));
  const choices = h("div", { class: "choices", role: "group", "aria-label": "Axis" });
  const trouble = h("p", { class: "callout", hidden: true });
  const facts = table(COLUMNS, "Both runs");
  const charts = h("div", { class: "charts" });
  const none = h("p", { class: "found", role: "status" });
  const found = h("section", { hidden: true }, facts.element, h("h2", {}, "Over time"), choices, none, charts);
  root.append(h("h1", {}, "Compare two runs"), h("p", { class: "lead" }, "Their step rate, and the numbers that each has said of itself, from the history."),
    h("div", { class: "bar" }, fields.map((field, at) => [h("label", { for: field.id }, h("i", { class: `swatch ${LOOKS[at]}`, "aria-hidden": "true" }), `${COLUMNS[at + 1]} run`), field]).flat(), names), trouble, found);

  const choose = () => { location.hash = compareLink(...fields.map((field) => field.value.trim())); };

  let asked = 0, runs = [];
  async function look() {
    if (!ids[0] || !ids[1]) return;
    const number = ++asked;
    const answers = await Promise.all(ids.slice(0, 2).map((id) => ask(`/api/history/jobs/${encodeURIComponent(id)}`)));
    if (number !== asked) return;
    const failed = answers.map(({ value, error }) => error ?? value.error).find(Boolean);
    const missing = failed ? -1 : answers.findIndex(({ value }) => !value.job);
    trouble.hidden = missing < 0 && !failed;
    if (failed) return fill(trouble, failed); // what is shown stays
    found.hidden = missing >= 0;
    if (missing >= 0) return fill(trouble, `The history has no job ${ids[missing]}.`);
    runs = answers.map(({ value }) => value);
    fill(facts.body, rowsOf(runs).map((row) => tr(COLUMNS, row)));
    showCurves();
  }

  function showCurves() {
    fill(choices, Object.keys(AXES).map((name) => h("button", { type: "button", "aria-pressed": String(name === chosen.axis), onclick: () => { chosen.axis = name; showCurves(); } }, name)));
    const pictures = curvesOf(runs, AXES[chosen.axis]);
    fill(charts, pictures.map(({ name, parts }) => curves(name, parts, chosen.axis === "by step" ? (at) => `step ${amount(at)}` : duration)));
    fill(none, pictures.length ? "" : "Neither has called iris_ray.heartbeat(step), or report_status with numbers, for long enough.");
  }

  async function offer() {
    const { value } = await ask("/api/history/jobs?hours=2160");
    if (value) fill(names, value.rows.slice(0, MOST_NAMES).map((one) => h("option", { value: one.job_id })));
  }

  offer();
  const end = every(LOOK_MS, look);
  return { update: () => {}, end: () => { end(); asked = -1; } };
}

function rowsOf(runs) {
  const goodput = ({ time }) => {
    const all = time.reduce((sum, one) => sum + one.chip_seconds, 0);
    const of = time.find((one) => one.kind === "productive")?.chip_seconds ?? 0;
    return all ? percent(of / all) : "–";
  };
  const lost = ({ losses }) => hours(losses.reduce((sum, one) => sum + one.chip_seconds, 0));
  const held = ({ job, attempts }) => hours(attempts.reduce((sum, one) => sum + (one.assigned_at === null ? 0 : one.chips * ((one.ended_at ?? job.seen_at) - one.assigned_at)), 0));
  const facts = {
    Job: ({ job }) => jobLink(job.job_id),
    State: ({ job }) => badge(job.state),
    User: ({ job }) => job.user,
    Slices: ({ job }) => job.type ? `${job.slices} × ${job.type}` : "no TPU",
    Submitted: ({ job }) => new Date(job.submitted_at * 1000).toLocaleString([], { hour12: false }),
    Waited: ({ job }) => job.started_at === null ? "–" : duration(job.started_at - job.submitted_at),
    Ran: ({ job }) => job.started_at === null ? "–" : duration((job.ended_at ?? job.seen_at) - job.started_at),
    "Last step": ({ job }) => job.step === null ? "–" : job.step.toLocaleString(),
    "Last said": ({ job }) => job.says ?? "–",
    "Productive share of its chips' time": goodput,
    "Chip-hours": held,
    "Chip-hours lost to failures": lost,
    Attempts: ({ job }) => `${job.attempts} (${job.preemptions} preempted, ${job.failures} failed, ${job.evictions} evicted)`,
    End: ({ job }) => job.error?.trim().split("\n")[0] ?? "–",
  };
  return Object.entries(facts).map(([name, of]) => [name, ...runs.map(of)]);
}

// The curves that at least one run has: of each its name, and the points of both runs.
function curvesOf(runs, axis) {
  const all = runs.map((run) => pointsOf(run, axis));
  const names = [...new Set(all.flatMap((points) => [...points.keys()]))];
  return names
    .map((name) => ({ name, parts: all.map((points, at) => ({ name: runs[at].job.job_id, look: LOOKS[at], points: points.get(name) ?? [] })).filter(({ points }) => points.length >= LEAST) }))
    .filter(({ parts }) => parts.length > 0);
}

// Each curve of a run as pairs of a place on the axis and a value. After a restart the axis of steps goes back.
function pointsOf({ job, curves: rows }, axis) {
  const begin = job.started_at ?? job.submitted_at;
  const found = new Map();
  const add = (name, at, step, value) => {
    const place = axis === "step" ? step : at - begin;
    if (place !== null && place !== undefined) found.set(name, [...(found.get(name) ?? []), [place, value]]);
  };
  const steps = rows.filter(({ name }) => name === "step").map(({ at, value }) => [at, value]);
  const stepAt = new Map(steps);
  for (const [at, rate] of rates(steps)) add("steps per second", at, stepAt.get(at), rate);
  for (const { name, at, step, value } of rows) if (name !== "step") add(name, at, step, value);
  return found;
}
