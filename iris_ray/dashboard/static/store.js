// The cluster as this page knows it: all tables once, and then what changes.

export const tables = { cluster: {}, slices: {}, jobs: {}, queue: {}, users: {}, teams: {}, capacity: {}, events: {} };
export const cluster = () => tables.cluster.now ?? {};

const AGAIN_MS = 2000;
let listener = () => {};
let live = () => {};
let stream = null;
let changed = new Set();

// What the server answers: { status, value }, and { error } in words if it is not what was asked for. Status 0: no answer.
export async function ask(path) {
  const answer = await fetch(path).catch(() => null);
  if (!answer) return { status: 0, value: null, error: "The dashboard does not answer." };
  if (answer.status === 401) location.assign("/login"); // the session is over
  const value = await answer.json().catch(() => null); // a proxy's own error is no JSON
  if (answer.ok && value !== null) return { status: answer.status, value };
  return { status: answer.status, value: null, error: value?.error ?? `The dashboard answers with ${answer.status}.` };
}

// Looks now and every so often while the page is seen; returns what ends that.
export function every(milliseconds, look) {
  const timer = setInterval(() => document.hidden || look(), milliseconds);
  look();
  return () => clearInterval(timer);
}

export function follow(onChange, onLive) {
  listener = onChange;
  live = onLive;
  load();
}

async function load() {
  stream?.close();
  const { value } = await ask("/api/snapshot");
  if (!value) {
    live(false);
    return setTimeout(load, AGAIN_MS);
  }
  for (const name of Object.keys(tables)) {
    tables[name] = value.tables[name] ?? {};
    changed.add(name);
  }
  report();
  listen(value.version);
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
