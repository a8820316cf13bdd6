"""Answers questions of pages about jobs, logs and the history. Pages that ask at the same time share an answer."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.overview import as_json
from iris_ray.actors.protocol.status import JobGoodput, TaskStatus
from iris_ray.errors import HistoryUnavailableError, InvalidRequestError
from iris_ray.history.calls import MOST_ROWS_EVER, HistoryCalls, HistoryRows
from iris_ray.history.questions import (
    Question,
    Wanted,
    fleet_question,
    job_questions,
    jobs_question,
    step_for,
    users_question,
)
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LogPosition
from iris_ray.model.goodput import Totals, productive_share
from iris_ray.model.options import WHOLE_JOB
from iris_ray.terminal import printable

SHARED_S = 0.5
"""How long the server reuses an answer. Pages that ask before it has arrived share it."""
GOODPUT_S = 10.0
HISTORY_S = 20.0
STEPS = 120
"""A chart has about so many steps."""
MOST_HOURS = 400 * 24
JOBS_SHOWN = 100
MOST_ANSWERS = 200
PIECE_BYTES = 256 << 10
TAIL_LINES = 500
THREADS = 16
"""The threads that ask. A silent host holds one for 20 s; they are not used for anything else."""

T = TypeVar("T")


class JobPages:
    """Answers for single jobs; ``connect`` as for `Follower`."""

    def __init__(self, connect: Callable[[], ControllerConnection]) -> None:
        self._connect = connect
        self._source: ControllerConnection | None = None
        self._answers: dict[tuple[object, ...], tuple[float, asyncio.Future[Any]]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="job pages")

    async def job(self, job_id: str) -> dict[str, Any]:
        """Return a job in full, and its first tasks.

        Raises:
            UnknownNameError: there is no such job.
        """
        return await self._shared(("job", job_id), lambda source: _job(source, job_id))

    async def goodput(self) -> dict[str, Any]:
        """Return how each user's jobs spent their time, asked at most once in `GOODPUT_S`."""
        return await self._shared(("goodput",), _goodput, GOODPUT_S)

    async def history(self, what: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the utilisation of the past hours, or the latest jobs of that time, asked at most once in `HISTORY_S`.

        Args:
            what: "utilisation" or "jobs".
            query: ``hours``, and ``type`` and ``text``: only chips and jobs of this type; only jobs with this text in
                their names, or of this user.

        Raises:
            InvalidRequestError: the hours are no number.
            HistoryUnavailableError: the cluster keeps no history.
        """
        hours = min(max(1, _number("hours", query.get("hours", "24"))), MOST_HOURS)
        asked = hours, query.get("type") or None, query.get("text") or None
        ask = _utilisation if what == "utilisation" else _past_jobs
        return await self._shared(("history", what, *asked), lambda source: ask(source, *asked), HISTORY_S)

    async def past_job(self, job_id: str) -> dict[str, Any]:
        """Return all that the history has of a job; ``job`` is None if it has none, or there is no history."""
        return await self._shared(("past job", job_id), lambda source: _past_job(source, job_id))

    async def logs(self, job_id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a piece of a task's output, and where the next piece begins.

        Args:
            job_id: the job.
            query: ``task``, ``attempt`` (the latest if left out), and ``offset``, or else ``tail``.

        Raises:
            UnknownNameError: there is no such job, task or attempt.
            InvalidRequestError: a value is no number.
        """
        numbers = {name: _number(name, query[name]) for name in ("task", "attempt", "offset", "tail") if name in query}
        tail = None if "offset" in numbers else numbers.get("tail", TAIL_LINES)
        at = LogPosition(numbers.get("attempt"), numbers.get("offset", 0), tail)
        task = numbers.get("task", 0)
        return await self._shared(("logs", job_id, task, at), lambda source: _logs(source, job_id, task, at))

    async def _shared(
        self, question: tuple[object, ...], ask: Callable[[ControllerConnection], T], shared_s: float = SHARED_S
    ) -> T:
        now = time.monotonic()
        good_until, answer = self._answers.get(question, (0.0, None))
        if answer is None or (answer.done() and now > good_until):
            answer = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, ask)
            self._answers[question] = now + shared_s, answer
            if len(self._answers) > MOST_ANSWERS:
                self._answers = {q: a for q, a in self._answers.items() if now < a[0] or not a[1].done()}
        found: T = await asyncio.shield(answer)
        return found

    def _ask(self, ask: Callable[[ControllerConnection], T]) -> T:
        if self._source is None:
            self._source = self._connect()
        return ask(self._source)


def _job(source: ControllerConnection, job_id: str) -> dict[str, Any]:
    status = source.ask(ControllerInterface.job_status, job_id)
    measured = status.num_groups and not status.spare_for and status.failure_domain == WHOLE_JOB
    found: dict[str, Any] = as_json(status)
    return found | {
        "explanation": status.explanation,
        "priority": status.priority.name.lower(),
        "state": "starting" if status.starting else status.state.value,
        "over": status.state.finished,
        "tasks": [_task(task) for task in source.ask(ControllerInterface.list_tasks, job_id)],
        "size": sum(status.tasks.values()),
        "events": as_json(source.ask(ControllerInterface.job_events, job_id)),
        "goodput": as_json(source.ask(ControllerInterface.job_goodput, job_id)) if measured else None,
    }


def goodput_by_user(jobs: Iterable[JobGoodput]) -> dict[str, Any]:
    """Return each user's number of jobs, their chip-seconds by use, and the productive share."""
    totals: dict[str, Totals] = {}
    counts: Counter[str] = Counter()
    for job in jobs:
        counts[job.user] += 1
        totals.setdefault(job.user, Totals()).add(job.seconds, job.chip_seconds)
    return {
        user: {
            "jobs": counts[user],
            "chip_seconds": total.chip_seconds,
            "goodput": productive_share(total.chip_seconds),
        }
        for user, total in totals.items()
    }


def _task(task: TaskStatus) -> dict[str, Any]:
    attempts = [as_json(attempt) | {"state": attempt.state.value} for attempt in task.attempts]
    return {**as_json(task), "state": task.state.value, "attempts": attempts}


def _goodput(source: ControllerConnection) -> dict[str, Any]:
    return goodput_by_user(source.ask_all(ControllerInterface.list_goodput))


def _ask_history(source: ControllerConnection, question: Question, most_rows: int = MOST_ROWS_EVER) -> HistoryRows:
    return source.ask(HistoryCalls.ask_history, question.sql, dict(question.parameters), most_rows)


def _utilisation(source: ControllerConnection, hours: int, tpu_type: str | None, _: str | None) -> dict[str, Any]:
    step = step_for(hours * 3600.0, STEPS)
    until = (int(time.time()) // step + 1) * step
    since = until - (hours * 3600 // step) * step
    of_time = since, until, step
    types = Question("SELECT DISTINCT type FROM fleet_samples WHERE at >= :since ORDER BY 1", {"since": since})
    found: dict[str, Any] = {"since": since, "until": until, "step_s": step}
    found["types"] = [row["type"] for row in _ask_history(source, types).as_dicts()]
    found["chips"] = _ask_history(source, fleet_question(*of_time, tpu_type)).as_dicts()
    for by in ("band", "user"):
        found[f"by_{by}"] = _ask_history(source, users_question(*of_time, by, tpu_type)).as_dicts()
    return found


def _past_jobs(source: ControllerConnection, hours: int, tpu_type: str | None, text: str | None) -> dict[str, Any]:
    now = time.time()
    wanted = Wanted(type=tpu_type, text=text, since=now - hours * 3600.0)
    found = _ask_history(source, jobs_question(wanted, now, JOBS_SHOWN), JOBS_SHOWN)
    return {"rows": found.as_dicts(), "cut": found.cut}


def _past_job(source: ControllerConnection, job_id: str) -> dict[str, Any]:
    try:
        found = {name: _ask_history(source, asked).as_dicts() for name, asked in job_questions(job_id).items()}
    except HistoryUnavailableError:
        return {"job": None, "curves": []}
    return {**found, "job": next(iter(found["job"]), None)}


def _logs(source: ControllerConnection, job_id: str, task: int, at: LogPosition) -> dict[str, Any]:
    log = source.ask(LogCalls.fetch_task_logs, job_id, task, at, PIECE_BYTES).without_half_character
    names = "attempt", "latest_attempt", "finished", "job_finished", "from_host", "note", "offset", "next_offset", "end"
    lines = (printable(line) for line in log.data.split(b"\n"))
    return {name: getattr(log, name) for name in names} | {"text": "\n".join(lines)}


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 15:
        raise InvalidRequestError(f"{name} is {value!r}; give a number of 0 or more")
    return int(value)
