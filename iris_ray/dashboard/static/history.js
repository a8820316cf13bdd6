// The cluster over hours and weeks, and the jobs that ended then: from the history, which outlives the Controller.
import { fill, h, jobLink, link, table, tr } from "./dom.js";
import { amount, badge, duration } from "./format.js";
import { chart } from "./chart.js";
import { ask, every } from "./store.js";

const RANGES = { "6 h": 6, "24 h": 24, "7 days": 168, "30 days": 720, "90 days": 2160 };
const BANDS = { system: "hue3", production: "hue1", interactive: "hue0", batch: "hue2" };
const COLUMNS = ["Job", "User", "State", "Type", "Ended", "Ran", "Attempts", "Chip-hours", "Note"];
const HUES = 7;
const LOOK_MS = 60_000;
const chosen = { range: "24 h", type: "", text: "" };

export function historyPage(root) {
  const choices = h("div", { class: "choices", role: "group", "aria-label": "How far back" });
  const types = h("select", { id: "history-type", onchange: () => { chosen.type = types.value; look(); } });
  const search = h("input", {
    type: "search", id: "history-search", placeholder: "Job or user", value: chosen.text,
    onchange: () => { chosen.text = search.value.trim(); look(); },
  });
  const charts = h("div", { class: "charts" }, h("p", { class: "empty" }, "Reading the history…"));
  const { element, body } = table(COLUMNS, "Jobs of that time, the latest first");
  const none = h("p", { class: "found", role: "status" });
  const trouble = h("p", { class: "callout", hidden: true });
  root.append(h("h1", {}, "History"), h("p", { class: "lead" }, "What the cluster did over hours and weeks, also before this dashboard and this Controller began. ", link("compare", "Compare two runs")),
    h("div", { class: "bar" }, choices, h("label", { for: "history-type", class: "unseen" }, "Type"), types), trouble, charts,
    h("section", {}, h("h2", {}, "Jobs of that time"), h("div", { class: "bar" }, h("label", { for: "history-search", class: "unseen" }, "Search jobs"), search), none, element));

  let asked = 0;
  async function look() {
    const number = ++asked;
    showChoices();
    const query = new URLSearchParams({ hours: RANGES[chosen.range], type: chosen.type, text: chosen.text });
    const answers = await Promise.all(["utilisation", "jobs"].map((what) => ask(`/api/history/${what}?${query}`)));
    if (number !== asked) return;
    const failed = answers.find(({ error }) => error);
    trouble.hidden = !failed;
    if (failed) return fill(trouble, failed.error);
    const [found, jobs] = answers.map(({ value }) => value);
    showTypes(types, found.types);
    fill(charts, chartsOf(found));
    fill(body, jobs.rows.map(row));
    element.hidden = jobs.rows.length === 0;
    fill(none, jobs.rows.length === 0 ? "No such job." : jobs.cut ? `the latest ${jobs.rows.length}; iris-ray history shows all` : "");
  }

  function showChoices() {
    fill(choices, Object.keys(RANGES).map((name) => h("button", { type: "button", "aria-pressed": String(name === chosen.range), onclick: () => { chosen.range = name; look(); } }, name)));
  }

  const end = every(LOOK_MS, look);
  return { update: () => {}, end: () => { end(); asked = -1; } };
}

function showTypes(select, names) {
  fill(select, h("option", { value: "" }, "All types"), names.filter(Boolean).map((name) => h("option", { value: name }, name)));
  select.value = chosen.type;
}

function chartsOf({ since, until, step_s: step, chips, by_band: bands, by_user: users }) {
  const times = chips.map((one) => one.at);
  const there = { name: "chips there", values: new Map(chips.map((one) => [one.at, one.chips])) };
  const waiting = new Map(times.map((at) => [at, 0]));
  for (const one of bands) waiting.set(one.at, (waiting.get(one.at) ?? 0) + one.waiting_chips);
  const same = { since, until, step, times };
  return [
    chart({ ...same, title: "Chips in use, by priority", unit: "chips", layers: byBand(bands, "busy_chips"), line: there }),
    chart({ ...same, title: "Jobs that waited, by priority", unit: "jobs", layers: byBand(bands, "waiting_jobs"), about: (at) => `, for ${amount(waiting.get(at))} chips` }),
    chart({ ...same, title: "Chips in use, by user", unit: "chips", layers: byUser(users), line: there }),
  ];
}

function byBand(rows, name) {
  return Object.entries(BANDS).map(([band, look]) => ({ name: band, look, values: new Map(rows.filter((one) => one.who === band).map((one) => [one.at, one[name]])) }));
}

// The users who held most, each in a colour, and all others together.
function byUser(rows) {
  const totals = new Map();
  for (const one of rows) totals.set(one.who, (totals.get(one.who) ?? 0) + one.busy_chips);
  const most = [...totals].filter(([, chips]) => chips > 0).sort((a, b) => b[1] - a[1]).slice(0, HUES).map(([name]) => name);
  const names = totals.size > most.length ? [...most, "others"] : most;
  const layers = names.map((name, at) => ({ name, look: `hue${at}`, values: new Map() }));
  for (const one of rows) {
    const layer = layers[most.includes(one.who) ? most.indexOf(one.who) : layers.length - 1];
    if (one.busy_chips > 0) layer.values.set(one.at, (layer.values.get(one.at) ?? 0) + one.busy_chips);
  }
  return layers.filter(({ values }) => values.size > 0);
}

function row(job) {
  const ran = job.started_at === null ? "–" : duration((job.ended_at ?? job.seen_at) - job.started_at);
  const ended = job.ended_at === null ? "–" : new Date(job.ended_at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });
  const lost = [job.preemptions && `${job.preemptions} preempted`, job.failures && `${job.failures} failed`, job.evictions && `${job.evictions} evicted`].filter(Boolean).join(", ");
  return tr(COLUMNS, [jobLink(job.job_id), job.user, badge(job.state), job.type ?? "–", ended, ran, job.attempts || "–", job.chip_hours === null ? "–" : amount(job.chip_hours),
    h("span", { class: "why" }, lost ? h("span", { class: "tag" }, lost) : null, " ", job.error?.split("\n")[0] ?? "")]);
}
