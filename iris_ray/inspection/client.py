"""Takes stacks, profiles, traces and the use of chips of tasks from their hosts."""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from iris_ray.actors.protocol.status import TaskStatus
from iris_ray.errors import InspectionFailedError, InvalidRequestError
from iris_ray.inspection.chip_metrics import ANSWER_S, ChipUse
from iris_ray.inspection.host import (
    DUMP_S,
    WRITING_S,
    InspectedTask,
    Profile,
    ask_host,
    chips_of,
    profile_of,
    stacks_of,
    trace_of,
    variables_of,
)
from iris_ray.inspection.jax_traces import STARTS_S, STOPS_S
from iris_ray.model.lifecycle import TaskState, job_of

START_S = 30.0
"""Seconds that a host may take to start a process for the question."""
AT_ONCE = 64
"""Hosts that are asked side by side."""
TOGETHER_S = 2.0
"""Traces of several tasks begin together, so long after they were asked for: most hosts need a second."""


@dataclass(frozen=True, slots=True)
class SameStacks:
    """Tasks whose threads all do the same.

    Attributes:
        tasks: their indexes.
        stacks: the stacks of the first of them, as text; None if no stacks could be taken.
        error: why no stacks could be taken, or None.
    """

    tasks: tuple[int, ...]
    stacks: str | None
    error: str | None = None


def stacks(tasks: Iterable[TaskStatus]) -> list[SameStacks]:
    """Return the stacks of running tasks, grouped, the largest group first."""
    groups: dict[tuple[str, bool], list[int]] = {}
    texts: dict[tuple[str, bool], str] = {}
    for index, text, is_error in _all_stacks(running(tasks)):
        key = (text if is_error else _comparable(text)), is_error
        groups.setdefault(key, []).append(index)
        texts.setdefault(key, text)
    found = [
        SameStacks(tuple(indexes), None if key[1] else texts[key], texts[key] if key[1] else None)
        for key, indexes in groups.items()
    ]
    return sorted(found, key=lambda one: (-len(one.tasks), one.tasks))


def place_of(task: TaskStatus) -> tuple[str, str]:
    """Return the node id and the address of a task's host.

    Raises:
        InvalidRequestError: the task does not run.
    """
    if task.state is not TaskState.RUNNING or task.node_id is None or task.address is None:
        raise InvalidRequestError(
            f"task {task.task_index} is {task.state.value}: only a running one can be looked into"
        )
    return task.node_id, task.address


def profile(task: TaskStatus, seconds: int, layout: str, idle: bool) -> Profile:
    """Return a profile of a task, or of the first of its processes; see `profile_of`.

    Raises:
        InvalidRequestError: the task does not run.
        InspectionFailedError: no profile can be taken; the message says why.
    """
    call = ask_host(profile_of, *place_of(task), _inspected(task), seconds, layout, idle)
    answer: Profile = _answer(call, 2 * (seconds + WRITING_S) + START_S)
    return answer


def traces(tasks: Iterable[TaskStatus], seconds: float) -> Iterator[tuple[int, bytes | InspectionFailedError]]:
    """Have JAX's profilers watch running tasks, all at the same time, or `AT_ONCE` of them if there are more.

    Args:
        tasks: those that do not run are left out.
        seconds: how long to watch.

    Yields:
        The index of a process, and its trace, or why there is none; as they come.
    """
    asked = [(task, _inspected(task, process)) for task in running(tasks) for process in range(task.processes)]
    for first in range(0, len(asked), AT_ONCE):
        some = asked[first : first + AT_ONCE]
        begin_at = time.time() + (TOGETHER_S if len(some) > 1 else 0.0)
        calls = {
            ask_host(trace_of, *place_of(task), wanted, seconds, begin_at): wanted.task_index for task, wanted in some
        }
        deadline = time.monotonic() + START_S + STARTS_S + seconds + STOPS_S
        while calls:
            ready, _ = ray.wait([*calls], timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
            call = ready[0] if ready else next(iter(calls))
            index = calls.pop(call)
            try:
                yield index, _answer(call, max(START_S, deadline - time.monotonic()) if ready else 0.0)
            except InspectionFailedError as error:
                yield index, error


def chips(tasks: Iterable[TaskStatus]) -> Iterator[tuple[TaskStatus, list[ChipUse] | InspectionFailedError]]:
    """Yield running tasks, and how much the chips of their hosts are used, or why that is not known."""
    left = running(tasks)
    for first in range(0, len(left), AT_ONCE):
        some = left[first : first + AT_ONCE]
        calls = [ask_host(chips_of, *place_of(task), _inspected(task)) for task in some]
        for task, call in zip(some, calls, strict=True):
            try:
                yield task, _answer(call, 3 * ANSWER_S + START_S)
            except InspectionFailedError as error:
                yield task, error


def running(tasks: Iterable[TaskStatus]) -> list[TaskStatus]:
    """Return those tasks that can be looked into."""
    return [task for task in tasks if task.state is TaskState.RUNNING and task.node_id and task.address]


def variables(task: TaskStatus) -> list[str]:
    """Return the names of the environment variables with which a task began, sorted. Raise like `profile`."""
    names: list[str] = _answer(ask_host(variables_of, *place_of(task), _inspected(task)), START_S)
    return names


def _all_stacks(tasks: list[TaskStatus]) -> Iterator[tuple[int, str, bool]]:
    """Yield the index of each process, its stacks or an error message, and whether it is an error."""
    for first in range(0, len(tasks), AT_ONCE):
        some = tasks[first : first + AT_ONCE]
        asked = [(task, _inspected(task, process)) for task in some for process in range(task.processes)]
        calls = [ask_host(stacks_of, task.node_id or "", task.address or "", wanted) for task, wanted in asked]
        for (_, wanted), call in zip(asked, calls, strict=True):
            try:
                yield wanted.task_index, str(_answer(call, DUMP_S + START_S)), False
            except InspectionFailedError as error:
                yield wanted.task_index, str(error), True


def _answer(call: ray.ObjectRef, timeout_s: float) -> Any:
    try:
        return ray.get(call, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, InspectionFailedError):
            raise error.cause from None
        raise InspectionFailedError(f"its host failed: {error.cause}") from None
    except GetTimeoutError:
        ray.cancel(call, force=True)
        raise InspectionFailedError(
            f"its host has not answered within {timeout_s:g} s; try again, or see iris-ray host ls"
        ) from None
    except RayError as error:
        raise InspectionFailedError(
            f"its host is gone ({error}); see iris-ray job events: the job may go on elsewhere"
        ) from None


def _inspected(task: TaskStatus, process: int = 0) -> InspectedTask:
    return InspectedTask(job_of(task.task_id), task.task_index * task.processes + process, task.attempt)


def _comparable(text: str) -> str:
    """Return stacks without the numbers and paths of processes and threads."""
    threads = (line for line in text.splitlines() if not line.startswith(("Process ", "Python v")))
    return "\n".join(re.sub(r"^Thread \S+", "Thread", line) for line in threads)
