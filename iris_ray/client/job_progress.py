"""Waits for a job, and meanwhile shows its status in a live line of the terminal."""

import concurrent.futures
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.errors import ControllerUnavailableError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import TaskState
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.terminal import PATIENCE_S, LiveLine, live_line, print_line

LOOK_S = 0.2
ASK_S = 1.0
"""Seconds between questions to the Controller."""
REPEAT_S = 30.0
"""Seconds after which it is printed again why a job waits, without a terminal."""

Wait = Callable[[float | None], bool]
"""Waits some seconds, or for ever with None, for the end of a job; returns whether it has come."""


def results_of(job_id: str, ref: "ray.ObjectRef[list[Any]]") -> list[Any]:
    """Wait for a job's results, and show its status in a terminal. Raises like ``ray.get``."""
    wait_visibly(job_id, lambda seconds: bool(ray.wait([ref], timeout=seconds)[0]))
    results: list[Any] = ray.get(ref)
    return results


def wait_visibly(job_id: str, wait: Wait, says_why: bool = False) -> None:
    """Wait for a job's end. If it takes longer than a moment, a terminal shows its status.

    Args:
        job_id: the job.
        wait: waits for its end.
        says_why: whether to print now and then why the job waits in the queue, without a terminal.
    """
    began = time.monotonic()
    if wait(PATIENCE_S):
        return
    with live_line(job_id, began=began) as line:
        if line.live:
            _wait_in_line(job_id, wait, line)
            return
    _wait_in_words(job_id, wait, says_why)


def _wait_in_line(job_id: str, wait: Wait, line: LiveLine) -> None:
    line.show("asking the Controller how it stands")
    watch = _StatusWatch(job_id)
    while not wait(LOOK_S):
        with contextlib.suppress(Exception):  # an error in the display must not end the run
            if (status := watch.latest()) is not None:
                line.show(job_in_words(status))


def _wait_in_words(job_id: str, wait: Wait, says_why: bool) -> None:
    while True:
        why = _pending_reason(job_id) if says_why else None
        if why is not None:
            print_line(f"{job_id}: {why}", sys.stderr)
        if wait(REPEAT_S if why is not None else PATIENCE_S if says_why else None):
            return


def _pending_reason(job_id: str) -> PendingReason | None:
    """Return why the job waits; None if it does not wait, or if no Controller answers now."""
    try:
        return ControllerConnection().ask(ControllerInterface.job_status, job_id).waiting
    except ControllerUnavailableError:
        return None


class _StatusWatch:
    """Asks the Controller for a job's status without waiting for its answer, or for a Controller that is gone."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._controller: Actor[ControllerInterface] | None = None
        self._answer: concurrent.futures.Future[JobStatus] | None = None
        self._ask_at = 0.0
        self._latest: JobStatus | None = None

    def latest(self) -> JobStatus | None:
        """Return the newest answer, which may be a moment old; None if there is none yet."""
        if self._answer is not None and self._answer.done():
            if self._answer.exception() is None:
                self._latest = self._answer.result()
            else:
                self._controller = None  # another Controller may run by now
            self._answer = None
        now = time.monotonic()
        if self._answer is None and now >= self._ask_at:
            self._ask_at = now + ASK_S
            with contextlib.suppress(RayError, AttributeError):  # AttributeError: a Controller of another version
                if self._controller is None and (handle := find_controller()) is not None:
                    self._controller = Actor(handle)
                if self._controller is not None:
                    asked = self._controller.call(ControllerInterface.job_status, self._job_id)
                    self._answer = asked.future()
        return self._latest


def job_in_words(status: JobStatus) -> str:
    """Return a job's status in words, the most important first: a terminal cuts off the rest."""
    after = f" (attempt {status.attempt}, after: {status.error})" if status.attempt > 1 and status.error else ""
    if status.state.finished:
        return f"has ended: {status.state.value}"
    if status.waiting is not None:
        return f"{status.waiting}{f'; it restarts after: {status.error}' if status.error else ''}"
    total, where = sum(status.tasks.values()), ", ".join(status.groups)
    started = total - sum(status.tasks.get(state, 0) for state in (TaskState.PENDING, TaskState.ASSIGNED))
    if started < total:
        return f"starting: {started} of {total} tasks run{f' on {where}' if where else ''}{after}"
    if status.gives_way is not None:
        return f"its hosts are to go: {status.gives_way[0]}"
    done = status.tasks.get(TaskState.SUCCEEDED, 0)
    parts = [
        status.how_far or "running",
        f"{done} of {total} tasks have returned" if done else f"{total} task{'s' * (total > 1)}",
        where,
        f"attempt {status.attempt}" if status.attempt > 1 else "",
        f"behind the others: {'; '.join(status.stragglers)}" if status.stragglers else "",
    ]
    return " · ".join(filter(None, parts))


def say_if_it_runs_once(spec: JobSpec) -> None:
    """Tell the user of a job that is submitted that it has no further attempt after lost hosts."""
    if spec.runs_once:
        how = ". It is not moved to more slices" if len(spec.groups_per_gang) > 1 else ""
        print(
            f"iris_ray: {spec.job_id} ends as preempted if it loses a host or is evicted, as max_retries_preemption is"
            f" 0{how}",
            file=sys.stderr,
        )
