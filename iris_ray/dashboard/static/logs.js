// What a task prints, as it comes.
import { fill, h, setText } from "./dom.js";
import { ask } from "./store.js";

const LOOK_MS = 1000;
const MOST_CHARACTERS = 1_000_000;
const COLOURS = /\x1b\[[0-9;]*[A-Za-z]/g;

export function logView(id) {
  const text = h("pre", { class: "log", tabindex: "0", role: "log", "aria-label": "Output of the task" });
  const note = h("p", { class: "found", role: "status" });
  const task = h("input", { id: "log-task", type: "number", min: "0", value: "0", onchange: () => restart() });
  const attempt = h("select", { id: "log-attempt", onchange: () => restart() });
  const follow = h("input", { id: "log-follow", type: "checkbox", checked: true });
  let position = null; // { attempt, offset }
  let ended = false;
  let reading = 0; // counts restarts: an answer to an earlier question is dropped
  let asked = null; // the restart whose question has no answer yet: two answers to one question would both be shown

  async function read() {
    if (ended || document.hidden || asked === reading) return;
    const mine = asked = reading;
    const piece = await next().finally(() => { if (asked === mine) asked = null; });
    if (!piece || mine !== reading || ended) return;
    if (piece.error) return setText(note, piece.error);
    take(piece);
  }

  async function next() {
    const query = new URLSearchParams({ task: task.value || "0" });
    if (position) Object.entries(position).forEach(([name, value]) => query.set(name, value));
    else if (attempt.value) query.set("attempt", attempt.value);
    const { status, value, error } = await ask(`/api/jobs/${encodeURIComponent(id)}/logs?${query}`);
    return value ?? (status ? { error } : null);
  }

  function take(piece) {
    setText(note, piece.note ?? (piece.end ? "" : "It has printed nothing yet."));
    if (piece.attempt === 0) return;
    if (position === null && piece.offset > 0) text.append("… earlier lines are in `iris-ray logs`\n");
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    if (piece.text) text.append(piece.text.replace(COLOURS, ""));
    if (text.textContent.length > MOST_CHARACTERS) text.textContent = text.textContent.slice(-MOST_CHARACTERS / 2);
    position = { attempt: piece.attempt, offset: piece.next_offset };
    const goesOn = piece.finished && piece.attempt < piece.latest_attempt && !attempt.value && piece.next_offset >= piece.end;
    if (goesOn) {
      text.append(`\n── attempt ${piece.attempt + 1} ──\n`);
      position = { attempt: piece.attempt + 1, offset: 0 };
    }
    if (follow.checked && atEnd) text.scrollTop = text.scrollHeight;
    if (piece.next_offset < piece.end || goesOn) setTimeout(read, 50);
  }

  function restart() {
    reading += 1;
    position = null;
    text.textContent = "";
    read();
  }

  const timer = setInterval(read, LOOK_MS);
  const element = h("div", { class: "logs" }, h("div", { class: "bar" },
    h("label", {}, "Task ", task), h("label", {}, "Attempt ", attempt), h("label", {}, follow, " follow")), note, text);
  restart();

  function about(job) {
    task.max = String(job.size * (job.processes_per_host ?? 1) - 1);
    const numbers = Array.from({ length: job.attempt }, (_, at) => String(job.attempt - at)).slice(0, 20);
    if (attempt.dataset.numbers === numbers.join()) return;
    attempt.dataset.numbers = numbers.join();
    const chosen = attempt.value;
    fill(attempt, h("option", { value: "" }, "latest"), numbers.map((number) => h("option", { value: number }, number)));
    attempt.value = chosen;
  }
  return { element, about, end: () => { ended = true; clearInterval(timer); } };
}
