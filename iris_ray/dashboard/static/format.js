// Numbers, durations and states in words.
import { h } from "./dom.js";

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  if (whole >= 86400) return `${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
  if (whole >= 3600) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  if (whole >= 60) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  return `${whole}s`;
}

// A duration that counts in tenths of seconds while it is short.
export const short = (seconds) => (seconds < 60 ? `${seconds.toFixed(1)}s` : duration(seconds));

// A duration that goes on; `tick` keeps it true.
export function since(time) {
  const at = new Date(time * 1000);
  return h("time", { "data-since": time, datetime: at.toISOString(), title: at.toLocaleString() }, duration(now() - time));
}

export const now = () => Date.now() / 1000;

export function tick() {
  for (const element of document.querySelectorAll("time[data-since]")) {
    const text = duration(now() - Number(element.dataset.since));
    if (element.textContent !== text) element.textContent = text;
  }
}

export function clock(time) {
  const at = new Date(time * 1000);
  return h("time", { datetime: at.toISOString(), title: at.toLocaleString() }, at.toLocaleTimeString([], { hour12: false }));
}

export const counted = (number, noun) => `${number.toLocaleString()} ${noun}${number === 1 ? "" : "s"}`;
export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
export const amount = (number) => Number(number).toLocaleString(undefined, { maximumFractionDigits: 1 });

const STATES = {
  pending: ["waits", "waiting"], starting: ["starting", "busy"], running: ["running", "busy"],
  succeeded: ["succeeded", "good"], failed: ["failed", "bad"], killed: ["cancelled", "over"],
  worker_failed: ["preempted", "bad"], unschedulable: ["unschedulable", "bad"], assigned: ["starting", "busy"],
  waits: ["waits", "waiting"], sent: ["sent", "good"], "given up": ["given up", "bad"], dropped: ["dropped", "bad"],
  cosched_failed: ["ended with its gang", "over"], lost: ["lost with its cluster", "bad"],
};
const MARKS = { waiting: "◷", busy: "▶", good: "✓", bad: "✕", over: "■" };

export const stateInWords = (state) => (STATES[state] ?? [state])[0];

export function badge(state) {
  const [text, look] = STATES[state] ?? [state, "over"];
  return h("span", { class: `badge ${look}` }, h("span", { "aria-hidden": "true" }, MARKS[look]), " ", text);
}

// Conditions of hosts, in the order of the legend: what they are called, and what they mean.
export const CONDITIONS = {
  busy: ["in use", "a job runs on it"],
  free: ["free", "no job uses it"],
  warm: ["warm", "kept ready for the next job of one process, and given up when another job needs it"],
  spare: ["spare", "held ready to replace a slice of a running job, or for it to grow"],
  draining: ["draining", "it is about to go, and takes nothing new"],
  suspected: ["suspected", "it may be lost"],
  quarantined: ["quarantined", "closed to all jobs after failures"],
  closed: ["closed", "drained or tainted by an operator"],
  elsewhere: ["used elsewhere", "work outside iris_ray uses its chips"],
  unusable: ["unusable", "its labels or chips are wrong"],
  lost: ["missing", "it belongs to the slice and is not there"],
};

// What a job last said of itself: its words, and its step.
export const howFar = ({ step = null, says = null }) => [step !== null && `step ${step.toLocaleString()}`, says].filter(Boolean).join(" · ");

export const wants = (job) => {
  const groups = job.wants.length ? `${job.wants.join(" or ")} × ` : "";
  return job.type ? `${groups}${job.type}` : groups ? `${groups}hosts` : "no TPU";
};
