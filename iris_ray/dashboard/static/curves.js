// A job's step rate and the numbers of its status as curves, from the history.
import { fill, h } from "./dom.js";
import { curve } from "./chart.js";
import { ask, every } from "./store.js";

const LEAST = 3; // points; fewer are no curve
const LOOK_MS = 60_000;

export function curvesView(id) {
  const element = h("section", { hidden: true });
  async function look() {
    const { value } = await ask(`/api/history/jobs/${encodeURIComponent(id)}`);
    if (value) show(element, value.curves);
  }
  return { element, end: every(LOOK_MS, look) };
}

function show(element, rows) {
  const points = new Map();
  for (const { name, at, value } of rows) points.set(name, [...(points.get(name) ?? []), [at, value]]);
  const steps = points.get("step") ?? [];
  points.delete("step");
  const curves = [["steps per second", rates(steps)], ...points].filter(([, known]) => known.length >= LEAST);
  element.hidden = curves.length === 0;
  fill(element, h("h2", {}, "Over time"), h("div", { class: "charts" }, curves.map(([name, known]) => curve(name, known))));
}

// Steps per second between two looks. After a restart, steps that are done again are a new beginning.
export function rates(steps) {
  return steps.slice(1).flatMap(([at, step], place) => {
    const [before, done] = steps[place];
    return step >= done && at > before ? [[at, (step - done) / (at - before)]] : [];
  });
}
