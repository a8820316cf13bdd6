// One slice: its hosts, the jobs that use them, and why hosts take nothing new.
import { fill, h, jobLink, link, setText, table, tr } from "./dom.js";
import { CONDITIONS, counted } from "./format.js";
import { tables } from "./store.js";

const COLUMNS = ["Host", "Condition", "Job", "Address", "Note", "Node"];

export function slicePage(root, name) {
  const facts = h("p", { class: "facts" });
  const why = h("p", { class: "callout", hidden: true });
  const { element, body } = table(COLUMNS, `Hosts of ${name}`);
  root.append(h("p", { class: "crumbs" }, link("fleet", "Fleet")), h("h1", {}, name), facts, why, element);

  function update(changed) {
    if (!changed.has("slices")) return;
    const one = tables.slices[name];
    why.hidden = Boolean(one) && !one.why;
    setText(why, one ? one.why ?? "" : "This slice is not there (any more).");
    setText(facts, one ? `${one.type} · ${counted(one.hosts.length, "host")} · ${counted(one.chips, "chip")} · ${one.state}` : "");
    fill(body, (one?.hosts ?? []).map(([number, condition, job, note, address, node]) =>
      tr(COLUMNS, [number ?? "–", conditionBadge(condition), job ? jobLink(job) : "–", address ?? "–", note ?? "",
        node ? h("code", { title: node }, node.slice(0, 12)) : "–"])));
  }
  return { update };
}

const conditionBadge = (name) =>
  h("span", { class: "condition", title: CONDITIONS[name][1] }, h("i", { class: `cell ${name}`, "aria-hidden": "true" }), CONDITIONS[name][0]);
