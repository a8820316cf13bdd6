// The users of the chips: what each holds now, has held lately, and may have. The quotas of teams, and their use.
import { h, fill, keyed, setText, table, tr } from "./dom.js";
import { amount, counted, percent } from "./format.js";
import { DISRUPTIONS, hours, sum } from "./goodput.js";
import { ask, cluster, every, tables } from "./store.js";

const COLUMNS = ["User", "Chips now", "Share now", "Chip-hours lately", "Counted share", "Running", "Waiting", "Goodput", "Lost to disruptions", "Limits"];
const TEAM_COLUMNS = ["Team", "Type", "Quota", "Used", "Borrowed", "Lent", "Share now", "Counted share", "Running", "Waiting"];
const TEAM_TERMS = [
  ["Borrowed, lent", "Borrowed is what a team uses beyond its quota. Lent is what it leaves unused and others use, until it needs it."],
  ["A team", "Its chips and shares include those of its parts. Running and waiting are its own jobs only."],
];
const TERMS = [
  ["Chip-hours lately", "What the user held four hours ago counts half, and what was before that still less."],
  ["Counted share", "What the user holds now and held lately, as a share of the cluster. The queue serves the smallest one first."],
  ["Goodput", "The share of the user's chip-hours that went into steps whose result was kept."],
  ["Lost to disruptions", "Chip-hours of steps that were done again, and of the time until code ran again after a preemption or a failure."],
];
const LOOK_MS = 10_000;
const HUES = 8;

export function usersPage(root) {
  const bar = h("div", { class: "stack", role: "img" });
  const holds = h("p", { class: "lead" });
  const legend = h("ul", { class: "stack-legend" });
  const { element, body } = table(COLUMNS, "Users, who holds most first");
  const empty = h("p", { class: "empty" }, "Nobody has used the cluster lately.");
  const teams = table(TEAM_COLUMNS, "Teams");
  const teamSection = h("section", { hidden: true }, h("h2", {}, "Teams"), teams.element,
    h("dl", { class: "terms" }, TEAM_TERMS.flatMap(([term, meaning]) => [h("dt", {}, term), h("dd", {}, meaning)])));
  root.append(h("h1", {}, "Users"), holds, bar, legend, element, empty, teamSection,
    h("dl", { class: "terms" }, TERMS.flatMap(([term, meaning]) => [h("dt", {}, term), h("dd", {}, meaning)])));

  let goodput = {};
  async function look() {
    const { value } = await ask("/api/goodput");
    if (!value) return;
    goodput = value;
    update(new Set(["users"]));
  }
  const end = every(LOOK_MS, look);

  function update(changed) {
    if (changed.has("teams")) {
      const shown = Object.entries(tables.teams).sort(([a, one], [b, other]) => one.order - other.order || (a < b ? -1 : 1));
      teamSection.hidden = shown.length === 0;
      keyed(teams.body, shown.map(([, one]) => one), (one) => `${one.team}:${one.type}`, teamRow);
    }
    if (!changed.has("users") && !changed.has("cluster")) return;
    const users = Object.values(tables.users).sort((a, b) => b.chips - a.chips || b.counted - a.counted || (a.user < b.user ? -1 : 1));
    const { chips = 0 } = cluster();
    setText(holds, `Who holds the ${counted(chips, "chip")} of the cluster now.`);
    showStack(bar, legend, users.filter((user) => user.chips > 0), chips);
    element.hidden = users.length === 0;
    empty.hidden = users.length > 0;
    keyed(body, users.map((user) => entry(user, goodput[user.user])), (one) => one.user.user, row);
  }

  // The same object as long as nothing about the user has changed.
  const entries = new Map();
  function entry(user, spent) {
    const known = entries.get(user.user);
    if (known && known.user === user && JSON.stringify(known.spent) === JSON.stringify(spent)) return known;
    entries.set(user.user, { user, spent });
    return entries.get(user.user);
  }
  return { update, end };
}

function showStack(bar, legend, users, total) {
  const parts = users.slice(0, HUES - 1).map((user) => [user.user, user.chips]);
  const rest = users.slice(HUES - 1).reduce((sum, user) => sum + user.chips, 0);
  if (rest) parts.push(["others", rest]);
  const free = total - parts.reduce((sum, [, chips]) => sum + chips, 0);
  const words = parts.map(([name, chips]) => `${name}: ${counted(chips, "chip")}`);
  bar.setAttribute("aria-label", `Chips in use by user. ${words.join(", ") || "none"}; ${amount(Math.max(0, free))} held by nobody.`);
  fill(bar, parts.map(([name, chips], at) => part(name, chips, total, `hue${at}`)));
  fill(legend, parts.map(([name, chips], at) => h("li", {}, h("i", { class: `swatch hue${at}`, "aria-hidden": "true" }), `${name} `, h("b", {}, percent(chips / total)))),
    total ? h("li", {}, h("i", { class: "swatch", "aria-hidden": "true" }), "nobody ", h("b", {}, percent(Math.max(0, free) / total))) : null);
}

function part(name, chips, total, hue) {
  const element = h("span", { class: hue, title: `${name}: ${counted(chips, "chip")}` }, chips / total > 0.08 ? name : "");
  element.style.width = `${(100 * chips) / total}%`;
  return element;
}

function teamRow(team) {
  const chips = (number) => (number ? amount(number) : "–");
  return tr(TEAM_COLUMNS, [team.team ? h("b", {}, team.team) : "no team", team.type ?? "–", chips(team.quota), chips(team.used),
    chips(team.borrowed), chips(team.lent), percent(team.share), percent(team.counted), team.running || "–", team.waiting || "–"]);
}

function row({ user, spent }) {
  const lost = spent ? sum(spent.chip_seconds, DISRUPTIONS) : 0;
  const limits = user.bands.flatMap(({ band, limits: set }) =>
    Object.entries(set).map(([what, most]) => `${band}: ${amount(most)} ${what.replace("_", " ")}`));
  return tr(COLUMNS, [h("b", {}, user.user), amount(user.chips), percent(user.share), amount(user.chip_hours), percent(user.counted),
    user.running || "–", user.queued || "–",
    spent?.goodput === null || !spent ? "–" : percent(spent.goodput), lost ? `${hours(lost)} chip-hours` : "–", limits.join("; ") || "–"]);
}
