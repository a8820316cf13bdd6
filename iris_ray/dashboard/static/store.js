// The cluster as this page knows it: all tables once, and then what changes.

export const tables = { cluster: {}, slices: {}, jobs: {}, queue: {}, users: {}, teams: {}, capacity: {}, events: {} };
export const cluster = () => tables.cluster.now ?? {};

const AGAIN_MS = 2000;
let listener = () => {};
let live = () => {};
let stream = null;
let changed = new Set();

export function follow(onChange, onLive) {
  listener = onChange;
  live = onLive;
  load();
}

async function load() {
  stream?.close();
  try {
    const answer = await fetch("/api/snapshot");
    if (answer.redirected || answer.status === 401) return location.assign("/login");
    const { version, tables: all } = await answer.json();
    for (const name of Object.keys(tables)) tables[name] = all[name] ?? {};
    Object.keys(tables).forEach((name) => changed.add(name));
    report();
    listen(version);
  } catch {
    live(false);
    setTimeout(load, AGAIN_MS);
  }
}

function listen(version) {
  stream = new EventSource(`/api/changes?since=${version}`);
  stream.onopen = () => live(true);
  stream.onerror = () => {
    live(false);
    if (stream.readyState === EventSource.CLOSED) setTimeout(load, AGAIN_MS);
  };
  stream.addEventListener("reload", load);
  stream.addEventListener("diff", (event) => take(JSON.parse(event.data)));
}

function take({ put, drop }) {
  for (const [name, rows] of Object.entries(put)) {
    Object.assign(tables[name], rows);
    changed.add(name);
  }
  for (const [name, keys] of Object.entries(drop)) {
    for (const key of keys) delete tables[name][key];
    changed.add(name);
  }
  report();
}

// Many changes share one update of the page; a page that nobody sees waits until it is seen.
let planned = false;
function report() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    const names = changed;
    changed = new Set();
    listener(names);
  });
}
