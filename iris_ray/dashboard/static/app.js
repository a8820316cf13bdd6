// Chooses the page by the address and keeps it up to date.
import { fill, h, setText } from "./dom.js";
import { tick } from "./format.js";
import { beginTheme } from "./theme.js";
import { cluster, follow, tables } from "./store.js";
import { comparePage } from "./compare.js";
import { eventsPage } from "./events.js";
import { fleetPage } from "./fleet.js";
import { historyPage } from "./history.js";
import { jobPage } from "./job.js";
import { jobsPage } from "./jobs.js";
import { notificationsPage } from "./notifications.js";
import { queuePage } from "./queue.js";
import { slicePage } from "./slice.js";
import { usersPage } from "./users.js";

const PAGES = {
  fleet: fleetPage, queue: queuePage, jobs: jobsPage, users: usersPage, events: eventsPage, history: historyPage, compare: comparePage,
  notifications: notificationsPage, "compare/": comparePage, "jobs/": jobPage, "notifications/": notificationsPage, "slices/": slicePage,
};

const main = document.getElementById("main");
let page = null; // { update(changed), end?() }
let loaded = false;

function route() {
  page?.end?.();
  const [name, ...rest] = location.hash.replace(/^#\//, "").split("/");
  const argument = rest.length ? decoded(rest.join("/")) : null;
  const make = PAGES[argument === null ? name : `${name}/`] ?? PAGES.fleet;
  const root = h("div", { class: "page" });
  page = make(root, argument);
  fill(main, root);
  page.update(new Set(Object.keys(tables)));
  const heading = root.querySelector("h1");
  document.title = `${heading?.textContent ?? "iris_ray"} · iris_ray`;
  markCurrent({ slices: "fleet", compare: "history" }[name] ?? (name || "fleet"));
  window.scrollTo(0, 0);
}

// A name that somebody has typed may have a "%" of its own.
function decoded(text) {
  return text.replace(/(?:%[0-9a-f]{2})+/gi, (escaped) => {
    try {
      return decodeURIComponent(escaped);
    } catch {
      return escaped;
    }
  });
}

function markCurrent(name) {
  for (const link of document.querySelectorAll("nav a")) {
    const isCurrent = link.getAttribute("href") === `#/${name}`;
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (isCurrent) link.scrollIntoView({ block: "nearest", inline: "nearest" }); // a phone shows a part of them
  }
}

function showTop() {
  const { waiting = 0, trouble = null, services = [], failing = [] } = cluster();
  for (const link of document.querySelectorAll("nav [data-service]")) link.hidden = !services.includes(link.dataset.service);
  const count = document.getElementById("waiting");
  count.hidden = waiting === 0;
  setText(count, String(waiting));
  const alert = document.getElementById("trouble");
  alert.hidden = !trouble && failing.length === 0;
  setText(alert, trouble ? `The Controller does not answer, so what you see may be out of date: ${trouble}`
    : failing.length ? `Jobs are not affected, but these services are failing: ${failing.join("; ")}` : "");
}

function showLive(isLive) {
  const live = document.getElementById("live");
  live.classList.toggle("off", !isLive);
  setText(live, isLive ? "live" : "reconnecting");
}

beginTheme(document.getElementById("theme"));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which page is shown
  main.focus();
});
window.addEventListener("hashchange", () => {
  if (loaded) {
    route();
    main.focus({ preventScroll: true });
  }
});
setInterval(tick, 1000);
follow((changed) => {
  showTop();
  if (!loaded) {
    loaded = true;
    route();
  } else page.update(changed);
}, showLive);
