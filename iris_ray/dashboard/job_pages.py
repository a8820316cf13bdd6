"""Answers the pages' questions about jobs, and passes others on to services. Equal questions share an answer."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.overview import as_json
from iris_ray.actors.protocol.services import Page, imported, module_of
from iris_ray.actors.protocol.status import TaskStatus
from iris_ray.errors import ServiceUnavailableError
from iris_ray.fair_limits import Turns
from iris_ray.model.options import WHOLE_JOB

SHARED_S = 0.5
"""How long the server reuses an answer. Pages that ask before it has arrived share it."""
MOST_ANSWERS = 200
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
        self._turns = Turns(THREADS)

    async def job(self, job_id: str) -> dict[str, Any]:
        """Return a job in full, and its first tasks.

        Raises:
            UnknownNameError: there is no such job.
        """
        return await self._shared(("job", job_id), job_id, lambda source: _job(source, job_id))

    async def of_service(self, page: Page, names: Mapping[str, str], query: Mapping[str, str]) -> Any:
        """Return what a service answers to a page; raise the service's own errors."""
        question = page.path, *sorted(names.items()), *sorted(query.items())
        about = names.get("job", page.path)
        return await self._shared(
            question, about, lambda source: imported(page.place)(source, names, query), page.shared_s
        )

    async def _shared(
        self,
        question: tuple[object, ...],
        about: str,
        ask: Callable[[ControllerConnection], T],
        shared_s: float = SHARED_S,
    ) -> T:
        """Return an answer. Questions about one job, whose hosts may be silent, leave threads for others."""
        now = time.monotonic()
        good_until, answer = self._answers.get(question, (0.0, None))
        if answer is None or (answer.done() and now > good_until):
            answer = asyncio.ensure_future(self._ask_in_turn(about, ask))
            self._answers[question] = now + shared_s, answer
            if len(self._answers) > MOST_ANSWERS:
                self._answers = {q: a for q, a in self._answers.items() if now < a[0] or not a[1].done()}
        found: T = await asyncio.shield(answer)
        return found

    async def _ask_in_turn(self, about: str, ask: Callable[[ControllerConnection], T]) -> T:
        async with self._turns.turn(about):
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, ask)

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
        "goodput": _goodput(source, job_id) if measured else None,
    }


def _task(task: TaskStatus) -> dict[str, Any]:
    attempts = [as_json(attempt) | {"state": attempt.state.value} for attempt in task.attempts]
    return {**as_json(task), "state": task.state.value, "attempts": attempts}


def _goodput(source: ControllerConnection, job_id: str) -> Any:
    try:
        return as_json(source.ask(module_of("goodput", "calls").GoodputCalls.job_goodput, job_id))
    except ServiceUnavailableError:
        return None
