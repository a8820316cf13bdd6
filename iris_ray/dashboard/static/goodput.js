// What the time of a job went into: one bar, and the kinds of time below it.
import { h, table, tr } from "./dom.js";
import { amount, duration, percent, short } from "./format.js";

// Groups of kinds, in the order of the bar: how each looks, and its kinds.
const GROUPS = [
  ["productive", "productive", ["productive"]],
  ["start-up", "startup", ["launch", "tpu_initialization", "training_prep", "program_startup", "data_loading_sync", "unproductive_checkpoint_restore_time"]],
  ["saving checkpoints", "saving", ["unproductive_checkpoint_save_time"]],
  ["lost to disruptions", "disrupted", ["wasted_progress_from_disruption", "infrastructure_recovery_from_disruption"]],
  ["queueing", "queueing", ["queueing"]],
  ["not measured", "unmeasured", ["unmeasured", "other"]],
];
export const DISRUPTIONS = GROUPS[3][2];
const COLUMNS = ["Time", "How long", "Share", "Chip-hours"];
const NOT_RUN = "Its code has not run yet.";
const NOT_MEASURED = "Its tasks have not called iris_ray.heartbeat(step), so iris_ray does not know what they did.";

export const sum = (amounts, kinds) => kinds.reduce((total, kind) => total + (amounts[kind] ?? 0), 0);
export const hours = (chipSeconds) => amount(chipSeconds / 3600);

export function goodputView(goodput) {
  const { seconds, chip_seconds: chips } = goodput;
  const total = Object.values(seconds).reduce((all, one) => all + one, 0);
  if (!total) return null;
  const groups = GROUPS.map(([name, look, kinds]) => ({ name, look, seconds: sum(seconds, kinds), chips: sum(chips, kinds) }))
    .filter((one) => one.seconds > 0);
  const words = groups.map((one) => `${one.name} ${percent(one.seconds / total)}`).join(", ");
  const rows = table(COLUMNS, "Kinds of time");
  const kinds = Object.entries(seconds).filter(([, time]) => time > 0).sort((a, b) => b[1] - a[1]);
  rows.body.append(...kinds.map(([kind, time]) => tr(COLUMNS, [kind.replaceAll("_", " "), duration(time), percent(time / total), hours(chips[kind] ?? 0)])));
  return h("div", {}, headline(goodput),
    h("div", { class: "stack thin", role: "img", "aria-label": words }, groups.map((one) => part(one, total))),
    h("ul", { class: "stack-legend" }, groups.map((one) => h("li", {}, h("i", { class: `swatch ${one.look}`, "aria-hidden": "true" }), `${one.name} `, h("b", {}, percent(one.seconds / total))))),
    timeLost(goodput),
    h("details", {}, h("summary", {}, "All kinds of time"), rows.element));
}

const LOST = ["Time lost by", "Failures", "Median", "Worst", "In all", "Chip-hours", "Cost"];

// What failures cost until the next new step, by cause.
function timeLost({ time_lost: lost = {}, chip_hour: price }) {
  const causes = Object.entries(lost).sort((a, b) => b[1].seconds - a[1].seconds);
  if (!causes.length) return null;
  const rows = table(LOST, "Time lost per failure, by cause");
  const cost = (chipSeconds) => (price ? `${((chipSeconds / 3600) * price[0]).toFixed(2)} ${price[1]}` : "–");
  rows.body.append(...causes.map(([cause, one]) => tr(LOST, [cause.toLowerCase(), one.count, short(one.median_s),
    short(one.worst_s), short(one.seconds), hours(one.chip_seconds), cost(one.chip_seconds)])));
  return rows.element;
}

function headline({ goodput, measured, seconds, chip_seconds: chips }) {
  const lost = sum(seconds, DISRUPTIONS);
  return h("p", { class: "headline" },
    measured === null ? NOT_RUN : goodput === null || (goodput === 0 && seconds.unmeasured > 0) ? NOT_MEASURED
      : ["Goodput, the productive share since its code first ran: ", h("b", {}, percent(goodput)), ". "],
    lost > 0 ? [" All disruptions together have cost ", h("b", {}, duration(lost)), ", that is ", h("b", {}, `${hours(sum(chips, DISRUPTIONS))} chip-hours`), "."] : null);
}

function part({ name, look, seconds }, total) {
  const element = h("span", { class: look, title: `${name}: ${duration(seconds)}` });
  element.style.width = `${(100 * seconds) / total}%`;
  return element;
}
