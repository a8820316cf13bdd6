"""Takes stacks, profiles, traces and the use of chips of tasks from their hosts."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
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
"""The limit for the start of a process on a host; seconds."""
AT_ONCE = 64
"""The limit for questions side by side."""
TOGETHER_S = 2.0
"""The time after which traces of several tasks begin together, since most hosts need a second; seconds."""


@dataclass(frozen=True, slots=True)
class SameStacks:
    """Tasks with equal stacks.

    Attributes:
        tasks: their indexes.
        stacks: the stacks of the first of them, as text; None if no stacks could be taken.
        error: why no stacks could be taken, or None.
    """

    tasks: tuple[int, ...]
    stacks: str | None
    error: str | None = None


def stacks(tasks: Iterable[TaskStatus], process: int | None = None) -> list[SameStacks]:
    """Return the stacks of running tasks, grouped, the largest group first.

    Args:
        tasks: tasks that don't run are left out.
        process: the number of a process on each host; None: all of them.
    """
    groups: dict[tuple[str, bool], list[int]] = {}
    texts: dict[tuple[str, bool], str] = {}
    for _, index, answer in _asked(tasks, stacks_of, DUMP_S + START_S, process=process):
        is_error = isinstance(answer, InspectionFailedError)
        key = (str(answer) if is_error else _comparable(answer)), is_error
        groups.setdefault(key, []).append(index)
        texts.setdefault(key, str(answer))
    found = [
        SameStacks(tuple(indexes), None if key[1] else texts[key], texts[key] if key[1] else None)
        for key, indexes in groups.items()
    ]
    return sorted(found, key=lambda one: (-len(one.tasks), one.tasks))


def place_of(task: TaskStatus, process: int = 0) -> tuple[str, str]:
    """Return the node id and the address of a task's host.

    Args:
        task: the task.
        process: the number of the process on the host, for the message.

    Raises:
        InvalidRequestError: the task does not run.
    """
    if task.state is not TaskState.RUNNING or task.node_id is None or task.address is None:
        raise InvalidRequestError(
            f"task {task.indices[process]} is {task.state.value}: only a running one can be looked into"
        )
    return task.node_id, task.address


def profile(task: TaskStatus, seconds: int, layout: str, idle: bool, process: int = 0) -> Profile:
    """Return a profile of a process of a task, by its number on the host; see `profile_of`.

    Raises:
        InvalidRequestError: the task does not run.
        InspectionFailedError: no profile can be taken; the message says why.
    """
    call = ask_host(profile_of, *place_of(task, process), _inspected(task, process), seconds, layout, idle)
    answer: Profile = _answer(call, 2 * (seconds + WRITING_S) + START_S)
    return answer


def traces(
    tasks: Iterable[TaskStatus], seconds: float, process: int | None = None
) -> Iterator[tuple[int, bytes | InspectionFailedError]]:
    """Have JAX's profilers watch running tasks, all at the same time, or `AT_ONCE` of them if there are more.

    Args:
        tasks: tasks that don't run are left out.
        seconds: how long to watch.
        process: the number of a process on each host; None: all of them.

    Yields:
        The index of a process, and its trace, or the error in place of it.
    """

    def when(count: int) -> tuple[float, float]:
        return seconds, time.time() + (TOGETHER_S if count > 1 else 0.0)

    for _, index, answer in _asked(tasks, trace_of, START_S + STARTS_S + seconds + STOPS_S, when, process):
        yield index, answer


def chips(tasks: Iterable[TaskStatus]) -> Iterator[tuple[TaskStatus, list[ChipUse] | InspectionFailedError]]:
    """Yield running tasks, and the use of the chips of their hosts, or the error in place of it."""
    for task, _, answer in _asked(tasks, chips_of, 3 * ANSWER_S + START_S, process=0):
        yield task, answer


def running(tasks: Iterable[TaskStatus]) -> list[TaskStatus]:
    """Return the tasks that can be looked into."""
    return [task for task in tasks if task.state is TaskState.RUNNING and task.node_id and task.address]


def variables(task: TaskStatus) -> list[str]:
    """Return the names of the environment variables with which a task began, sorted. Raise like `profile`."""
    names: list[str] = _answer(ask_host(variables_of, *place_of(task), _inspected(task)), START_S)
    return names


def _asked(
    tasks: Iterable[TaskStatus],
    function: Callable[..., object],
    timeout_s: float,
    arguments: Callable[[int], tuple[object, ...]] = lambda _: (),
    process: int | None = None,
) -> Iterator[tuple[TaskStatus, int, Any]]:
    """Call a function on the hosts of running tasks, `AT_ONCE` of them side by side.

    Args:
        tasks: tasks that don't run are left out.
        function: of `iris_ray.inspection.host`.
        timeout_s: the time in which all that were asked side by side must answer.
        arguments: returns the arguments after the task, given the number that are asked side by side.
        process: the number of a process on each host; None: all of them.

    Yields:
        The task and the index of the process, and its answer, or the `InspectionFailedError` in place of it.
    """
    asked = [
        (task, _inspected(task, number))
        for task in running(tasks)
        for number in (range(task.processes) if process is None else (process,))
    ]
    for first in range(0, len(asked), AT_ONCE):
        some = asked[first : first + AT_ONCE]
        more = arguments(len(some))
        calls = [ask_host(function, *place_of(task), wanted, *more) for task, wanted in some]
        deadline = time.monotonic() + timeout_s
        for (task, wanted), call in zip(some, calls, strict=True):
            try:
                yield task, wanted.task_index, _answer(call, timeout_s, deadline)
            except InspectionFailedError as error:
                yield task, wanted.task_index, error


def _answer(call: ray.ObjectRef, timeout_s: float, deadline: float | None = None) -> Any:
    """Return the answer of a host; without a deadline, wait for this number of seconds."""
    try:
        return ray.get(call, timeout=timeout_s if deadline is None else max(0.0, deadline - time.monotonic()))
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
            f"its host is gone ({error}); see iris-ray job events: the job may continue elsewhere"
        ) from None


def _inspected(task: TaskStatus, process: int = 0) -> InspectedTask:
    return InspectedTask(job_of(task.task_id), task.indices[process], task.attempt)


def _comparable(text: str) -> str:
    """Return stacks without the numbers and paths of processes and threads."""
    threads = (line for line in text.splitlines() if not line.startswith(("Process ", "Python v")))
    return "\n".join(re.sub(r"^Thread \S+", "Thread", line) for line in threads)
