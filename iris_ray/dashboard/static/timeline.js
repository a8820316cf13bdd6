// The attempts of a job on a line of time: when it ran, when it waited, and what ended each attempt.
import { h } from "./dom.js";
import { counted, duration, now, stateInWords } from "./format.js";

const COLLATERAL = new Set(["cosched_failed", "killed", "succeeded"]);

// One entry for each attempt, from what its tasks tell: the first cause is the end that no other task's end explains.
export function attemptsOf(job) {
  const found = new Map();
  for (const task of job.tasks) {
    for (const one of task.attempts) {
      const known = found.get(one.attempt) ?? { number: one.attempt, state: one.state, start: null, end: null, groups: new Set(), cause: null };
      if (one.started_at !== null) known.start = Math.min(known.start ?? Infinity, one.started_at);
      if (one.ended_at !== null) known.end = Math.max(known.end ?? 0, one.ended_at);
      if (one.group) known.groups.add(one.group);
      if (COLLATERAL.has(known.state) && !COLLATERAL.has(one.state)) Object.assign(known, { state: one.state, cause: one.error });
      known.cause ??= one.error;
      found.set(one.attempt, known);
    }
  }
  const attempts = [...found.values()].sort((a, b) => a.number - b.number);
  return attempts.map((one) => ({
    ...one, groups: [...one.groups], cause: firstLine(one.cause), end: ["running", "assigned"].includes(one.state) ? null : one.end,
  }));
}

const firstLine = (text) => text?.trim().split("\n")[0] ?? null;

export function timeline(job, attempts) {
  const begin = job.submitted_at;
  const ends = attempts.map((one) => one.end ?? 0);
  const end = job.over && Math.max(...ends) > 0 ? Math.max(...ends) : now();
  const place = (time) => (100 * (time - begin)) / Math.max(end - begin, 0.001);
  const bars = attempts.filter((one) => one.start !== null).map((one) => {
    const words = `Attempt ${one.number}, ${stateInWords(one.state)} after ${duration((one.end ?? end) - one.start)}${one.cause ? `: ${one.cause}` : ""}`;
    const bar = h("span", { class: `bar-of ${one.state}`, title: words }, String(one.number));
    bar.style.left = `${place(one.start)}%`;
    bar.style.width = `max(0.4rem, ${place(one.end ?? end) - place(one.start)}%)`;
    return bar;
  });
  const ran = attempts.reduce((sum, one) => sum + (one.start === null ? 0 : (one.end ?? end) - one.start), 0);
  const label = `It ran for ${duration(ran)} of ${duration(end - begin)}, in ${counted(attempts.length, "attempt")}.`;
  return h("figure", { class: "timeline" },
    h("div", { class: "track", role: "img", "aria-label": label }, bars),
    h("figcaption", {}, h("span", {}, "submitted"), h("span", {}, label), h("span", {}, job.over ? "ended" : "now")));
}
