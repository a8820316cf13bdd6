// The fleet: every slice with its hosts.
import { fill, h, keyed, setText, table, tr } from "./dom.js";
import { amount, CONDITIONS, counted, percent, since } from "./format.js";
import { cluster, tables } from "./store.js";

const OUT_OF_SERVICE = ["draining", "suspected", "quarantined", "closed", "unusable", "lost"];
const COMPACT_FROM = 240; // slices: from then on tiles show cells and names only
const CAPACITY = ["Type", "From", "Paid as", "Slices", "Chips", "Since", "An hour", "Note"];
const collator = new Intl.Collator(undefined, { numeric: true });

export const filters = { text: "", type: "", conditions: new Set() };

export function fleetPage(root) {
  const stats = h("dl", { class: "stats" });
  const search = h("input", {
    type: "search", id: "fleet-search", placeholder: "Slice, job or user", value: filters.text,
    oninput: () => { filters.text = search.value.trim().toLowerCase(); show(); },
  });
  const types = h("select", { id: "fleet-type", onchange: () => { filters.type = types.value; show(); } });
  const legend = h("div", { class: "legend", role: "group", "aria-label": "Show only slices with hosts that are" });
  const found = h("p", { class: "found", role: "status" });
  const groups = h("div", { class: "groups" });
  const capacity = table(CAPACITY, "What provisioners have asked for and hold");
  const provisioned = h("section", { hidden: true }, h("h2", {}, "Provisioned"), capacity.element);
  root.append(
    h("h1", {}, "Fleet"), stats,
    h("div", { class: "bar" },
      h("label", { for: "fleet-search", class: "unseen" }, "Search slices"), search,
      h("label", { for: "fleet-type", class: "unseen" }, "Type"), types, legend),
    h("details", { class: "meanings" }, h("summary", {}, "What the marks mean"), h("dl", { class: "terms" }, Object.entries(CONDITIONS).flatMap(meaning))),
    provisioned, found, groups,
  );

  function show() {
    const all = Object.values(tables.slices);
    showStats(stats);
    showTypes(types, all);
    showLegend(legend, show);
    const wanted = all.filter(isWanted);
    const filtered = filters.text || filters.type || filters.conditions.size;
    setText(found, filtered ? `${counted(wanted.length, "slice")} of ${all.length.toLocaleString()}` : "");
    showGroups(groups, wanted, all.length);
    const batches = Object.values(tables.capacity).sort((a, b) => collator.compare(keyOfBatch(a), keyOfBatch(b)));
    provisioned.hidden = batches.length === 0;
    keyed(capacity.body, batches, keyOfBatch, capacityRow);
  }
  return { update: (changed) => { if (["slices", "jobs", "cluster", "capacity"].some((name) => changed.has(name))) show(); } };
}

const keyOfBatch = ({ provisioner, type, source, market, joined }) => [type, provisioner, source, market, joined].join("/");

function capacityRow({ type, source, market, joined, slices, chips, since: asked, hourly, currency, note }) {
  const state = slices ? `${slices.toLocaleString()} ${joined ? "held" : "asked for"}` : "none asked for";
  const price = hourly === null ? "" : `${hourly.toLocaleString(undefined, { maximumFractionDigits: 2 })} ${currency}`;
  return tr(CAPACITY, [type, source, market, state, chips ? amount(chips) : "", asked ? since(asked) : "", price, h("span", { class: "why" }, note)]);
}

const meaning = ([name, [word, means]]) => [h("dt", {}, h("i", { class: `cell ${name}`, "aria-hidden": "true" }), " ", word), h("dd", {}, means)];

function showStats(stats) {
  const { chips = 0, chips_in_use = 0, slices = {}, hosts = {}, jobs = {}, waiting = 0 } = cluster();
  const total = Object.values(slices).reduce((sum, count) => sum + count, 0);
  const free = (slices.free ?? 0) + (slices.warm ?? 0);
  const out = OUT_OF_SERVICE.reduce((sum, name) => sum + (hosts[name] ?? 0), 0);
  const share = chips ? chips_in_use / chips : 0;
  const warm = slices.warm ? `${slices.warm} of them warm` : `of ${total.toLocaleString()}`;
  fill(stats,
    stat("Chips in use", amount(chips_in_use), `of ${amount(chips)} · ${percent(share)}`, share),
    stat("Slices free", free.toLocaleString(), warm),
    stat("Jobs running", ((jobs.running ?? 0) + (jobs.starting ?? 0)).toLocaleString(), jobs.starting ? `${jobs.starting} starting` : ""),
    stat("Jobs waiting", waiting.toLocaleString(), waiting ? h("a", { href: "#/queue" }, "why?") : "nobody waits"),
    stat("Hosts out of service", out.toLocaleString(), out ? inWords(hosts) : "all are fine", null, out ? "warn" : ""));
}

function stat(name, value, note, share = null, look = "") {
  const meter = share === null ? null : h("span", { class: "meter", "aria-hidden": "true" }, h("span"));
  if (meter) meter.firstChild.style.width = `${100 * share}%`;
  return h("div", { class: `stat ${look}` }, h("dt", {}, name), h("dd", {}, h("strong", {}, value), h("span", {}, note), meter));
}

const inWords = (hosts) =>
  OUT_OF_SERVICE.filter((name) => hosts[name]).map((name) => `${hosts[name]} ${CONDITIONS[name][0]}`).join(", ");

function showTypes(select, all) {
  const names = [...new Set(all.map((one) => one.type))].sort(collator.compare);
  if (select.dataset.names === names.join()) return;
  select.dataset.names = names.join();
  fill(select, h("option", { value: "" }, "All types"), names.map((name) => h("option", { value: name }, name)));
  select.value = filters.type;
}

function showLegend(legend, show) {
  const { hosts = {} } = cluster();
  const names = Object.keys(CONDITIONS).filter((name) => hosts[name] || filters.conditions.has(name));
  const toggle = (name) => {
    if (!filters.conditions.delete(name)) filters.conditions.add(name);
    show();
  };
  const items = names.map((name) => `${name} ${hosts[name] ?? 0} ${filters.conditions.has(name)}`);
  keyed(legend, items, (item) => item.split(" ")[0], (item) => {
    const [name, count, pressed] = item.split(" ");
    return h("button", { type: "button", class: "key", "aria-pressed": pressed, title: CONDITIONS[name][1], onclick: () => toggle(name) },
      h("i", { class: `cell ${name}`, "aria-hidden": "true" }), CONDITIONS[name][0], " ", h("b", {}, Number(count).toLocaleString()));
  });
}

function isWanted(one) {
  if (filters.type && one.type !== filters.type) return false;
  if (filters.conditions.size && !one.hosts.some((host) => filters.conditions.has(host[1]))) return false;
  if (!filters.text) return true;
  const users = one.jobs.map((job) => tables.jobs[job]?.user ?? "");
  return [one.name, one.type, ...one.jobs, ...users].some((text) => text.toLowerCase().includes(filters.text));
}

function showGroups(parent, wanted, total) {
  const byType = new Map();
  for (const one of wanted) {
    const key = one.tpu ? one.type : "Hosts without TPU";
    if (!byType.has(key)) byType.set(key, []);
    byType.get(key).push(one);
  }
  const names = [...byType.keys()].sort((a, b) => (a.startsWith("Hosts") - b.startsWith("Hosts")) || collator.compare(a, b));
  const known = parent.sections ?? new Map();
  parent.sections = new Map(names.map((name) => [name, known.get(name) ?? section(name)]));
  const empty = { name: "", element: h("p", { class: "empty" }, total ? "No slice is like that." : "No hosts yet.") };
  keyed(parent, names.length ? [...parent.sections.values()] : [empty], (one) => one.name, (one) => one.element);
  for (const [name, { tiles, summary }] of parent.sections) {
    const slices = byType.get(name).sort((a, b) => collator.compare(a.name, b.name));
    const free = slices.filter((one) => one.state === "free" || one.state === "warm").length;
    setText(summary, `${counted(slices.length, name.startsWith("Hosts") ? "host" : "slice")}, ${free} free`);
    tiles.classList.toggle("compact", total >= COMPACT_FROM);
    keyed(tiles, slices, (one) => one.name, tile);
  }
}

function section(name) {
  const summary = h("span", { class: "summary" });
  const tiles = h("ul", { class: "tiles" });
  return { name, element: h("section", {}, h("h2", {}, name, " ", summary), tiles), tiles, summary };
}

function tile(one) {
  const job = one.jobs[0];
  const user = tables.jobs[job]?.user;
  const more = one.jobs.length > 1 ? ` and ${one.jobs.length - 1} more` : "";
  const note = job ? `${job}${more}` : one.state === "free" ? "free" : one.state === "warm" ? "warm" : one.why ?? one.state;
  const title = [one.name, one.state, job && `job ${job}${more}`, user && `of ${user}`, one.why].filter(Boolean).join(", ");
  return h("li", {}, h("a", { class: `tile ${one.state}`, href: `#/slices/${encodeURIComponent(one.name)}`, title },
    h("span", { class: "tile-name" }, one.name),
    h("span", { class: `cells${one.hosts.length > 16 ? " many" : ""}`, "aria-hidden": "true" },
      one.hosts.map((host) => h("i", { class: `cell ${host[1]}` }))),
    h("span", { class: "unseen" }, ` ${job ? `${one.state}: ` : ""}`),
    h("span", { class: "tile-note" }, note), user ? h("span", { class: "tile-user" }, h("span", { class: "unseen" }, " of "), user) : null));
}
