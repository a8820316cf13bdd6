// A chart over time: stacked parts, each step a bar, and a line above them. Where nobody looked there is a gap.
import { h, setText } from "./dom.js";
import { amount } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000, HEIGHT = 200; // of the drawing, which is stretched to its place; words are beside it

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// layers: [{ name, look, values: Map(time → value) }], the lowest first; line: { name, values } or null; times: those with samples.
export function chart({ title, unit, since, until, step, times, layers, line = null, about = null }) {
  const sums = times.map((at) => layers.reduce((all, { values }) => all + (values.get(at) ?? 0), 0));
  const top = nice(Math.max(1, ...sums, ...times.map((at) => line?.values.get(at) ?? 0)));
  const x = (at) => (WIDTH * (Math.min(Math.max(at, since), until) - since)) / (until - since);
  const y = (value) => HEIGHT - (HEIGHT * value) / top;
  const drawing = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const part of [0.25, 0.5, 0.75]) drawing.append(shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(part * top), y2: y(part * top) }));
  const heights = new Map(times.map((at) => [at, 0]));
  for (const { look, values } of layers) {
    const bars = times.filter((at) => values.get(at) > 0).map((at) => {
      const from = heights.get(at);
      heights.set(at, from + values.get(at));
      return `M${x(at)} ${y(from)}V${y(heights.get(at))}H${x(at + step)}V${y(from)}Z`;
    });
    drawing.append(shape("path", { class: look, d: bars.join("") }));
  }
  if (line) {
    const steps = times.map((at, place) => `${place && at - times[place - 1] === step ? "V" : `M${x(at)} `}${y(line.values.get(at) ?? 0)}H${x(at + step)}`);
    drawing.append(shape("path", { class: "line", d: steps.join("") }));
  }
  const marker = h("span", { class: "marker", hidden: true });
  const plot = h("div", { class: "plot", role: "img", "aria-label": summary(title, unit, times, sums, line) }, drawing, marker,
    h("span", { class: "top-label" }, amount(top)), h("span", { class: "half-label" }, amount(top / 2)));
  const said = h("p", { class: "found small" }, summary(title, unit, times, sums, line));
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const wanted = since + ((until - since) * (event.clientX - box.left)) / box.width;
    const place = times.findLastIndex((at) => at <= wanted);
    const at = times[place];
    marker.hidden = place < 0 || wanted >= at + step;
    if (marker.hidden) return;
    marker.style.left = `${(100 * x(at)) / WIDTH}%`;
    marker.style.width = `${(100 * (x(at + step) - x(at))) / WIDTH}%`;
    const parts = layers.filter(({ values }) => values.get(at) > 0).map(({ name, values }) => `${name} ${amount(values.get(at))}`);
    const whole = line ? ` of ${amount(line.values.get(at) ?? 0)}` : "";
    setText(said, `${stamp(at)}: ${amount(sums[place])}${whole} ${unit}${parts.length ? ` (${parts.join(", ")})` : ""}${about ? about(at) : ""}`);
  });
  plot.addEventListener("pointerleave", () => { marker.hidden = true; setText(said, summary(title, unit, times, sums, line)); });
  return h("figure", { class: "chart" }, h("figcaption", {}, h("h2", {}, title)), plot,
    h("div", { class: "axis", "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", {}, stamp(since + part * (until - since), until - since)))),
    said, legend(layers, line));
}

// A curve of [time, value] pairs, from its least to its largest value.
export function curve(title, points) {
  const [times, values] = [points.map(([at]) => at), points.map(([, value]) => value)];
  const [since, until, low, high] = [times[0], times.at(-1), Math.min(...values), Math.max(...values)];
  const x = (at) => (WIDTH * (at - since)) / Math.max(until - since, 1);
  const y = (value) => HEIGHT - HEIGHT * (0.06 + (0.88 * (value - low)) / (high - low || 1));
  const drawing = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  drawing.append(shape("polyline", { class: "line", points: points.map(([at, value]) => `${x(at)},${y(value)}`).join(" ") }));
  const words = `${exact(values[0])} at first, now ${exact(values.at(-1))}; from ${exact(low)} to ${exact(high)}.`;
  return h("figure", { class: "chart small-chart" }, h("figcaption", {}, h("h3", {}, title)),
    h("div", { class: "plot smooth", role: "img", "aria-label": `${title}: ${words}` }, drawing, h("span", { class: "top-label" }, exact(high)), h("span", { class: "low-label" }, exact(low))),
    h("div", { class: "axis", "aria-hidden": "true" }, [since, until].map((at) => h("span", {}, stamp(at)))), h("p", { class: "found small" }, words));
}

// Curves of several runs in one picture: parts are [{ name, look, points: [place, value] pairs }], said: a place in words.
export function curves(title, parts, said) {
  const all = parts.flatMap(({ points }) => points);
  const [places, values] = [all.map(([at]) => at), all.map(([, value]) => value)];
  const [since, until, low, high] = [Math.min(...places), Math.max(...places), Math.min(...values), Math.max(...values)];
  const x = (at) => (WIDTH * (at - since)) / (until - since || 1);
  const y = (value) => HEIGHT - HEIGHT * (0.06 + (0.88 * (value - low)) / (high - low || 1));
  const drawing = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const { look, points } of parts) drawing.append(shape("polyline", { class: `drawn ${look}`, points: points.map(([at, value]) => `${x(at)},${y(value)}`).join(" ") }));
  const words = parts.map(({ name, points }) => `${name}: ${exact(points[0][1])} at ${said(points[0][0])}, ${exact(points.at(-1)[1])} at ${said(points.at(-1)[0])}`).join("; ");
  return h("figure", { class: "chart" }, h("figcaption", {}, h("h3", {}, title)),
    h("div", { class: "plot smooth", role: "img", "aria-label": `${title}: ${words}.` }, drawing, h("span", { class: "top-label" }, exact(high)), h("span", { class: "low-label" }, exact(low))),
    h("div", { class: "axis", "aria-hidden": "true" }, [since, until].map((at) => h("span", {}, said(at)))), h("p", { class: "found small" }, `${words}.`), legend(parts, null));
}

const exact = (number) => Number(number.toPrecision(4)).toLocaleString(undefined, { maximumSignificantDigits: 4 });

function legend(layers, line) {
  const items = layers.map(({ name, look }) => h("li", {}, h("i", { class: `swatch ${look}`, "aria-hidden": "true" }), name));
  return h("ul", { class: "stack-legend" }, items, line ? h("li", {}, h("i", { class: "swatch lined", "aria-hidden": "true" }), line.name) : null);
}

function summary(title, unit, times, sums, line) {
  if (!times.length) return `${title}: no samples in that time.`;
  const mean = (values) => values.reduce((all, one) => all + one, 0) / values.length;
  const whole = line ? mean(times.map((at) => line.values.get(at) ?? 0)) : 0;
  const share = whole ? `, ${Math.round((100 * mean(sums)) / whole)} % of ${amount(whole)}` : "";
  return `On average ${amount(mean(sums))} ${unit}${share}; at most ${amount(Math.max(...sums))}.`;
}

// The next number above that is easy to read.
function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((part) => part * unit).find((one) => one >= value);
}

function stamp(at, span = 0) {
  const time = new Date(at * 1000);
  const day = { month: "short", day: "numeric" };
  const hour = { hour: "2-digit", minute: "2-digit", hour12: false };
  return time.toLocaleString([], span > 3 * 86400 ? day : span ? hour : { ...day, ...hour });
}

