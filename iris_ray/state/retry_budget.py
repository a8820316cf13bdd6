"""What the end of an attempt costs its gang, and when and how urgently the gang comes back to the queue.

`retry` judges why an attempt ended; this is what follows from it. `ControllerState` calls it, once for each attempt.
"""

from iris_ray.model.jobs import Gang, Job, Task
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import Worker

QUICK_S = 10.0
"""An attempt that was over sooner has got nowhere."""
QUICK_ENDS_ARE_FAILURES = 5
"""After so many of them in a row, a task that is lost on a host that is still there counts as a failure."""
RETURNING_S = 30.0
"""How long a gang that has just lost its hosts comes before all that wait; others may have its slices afterwards."""


def quick_end_backoff_s(quick_ends: int) -> float:
    """Seconds to wait before the next attempt after so many that were over at once: 0, 1, 2, 4, 8, 10, …"""
    return 0.0 if quick_ends < 2 else min(10.0, 2.0 ** min(quick_ends - 2, 10))


def dispatch_backoff_s(failures: int) -> float:
    """Seconds to wait before the next launch after so many failed ones in a row: 0.5, 1, 2, … 30."""
    return float(min(30.0, 0.5 * 2 ** min(failures - 1, 10)))


def count_quick_end(gang: Gang, now: float) -> None:
    """An attempt that had started is over: is it one more in a row that got nowhere?"""
    gang.quick_ends = gang.quick_ends + 1 if now < gang.running_since + QUICK_S else 0


def is_its_own_doing(gang: Gang, lost: Task, worker: Worker | None) -> bool:
    """Whether a task that is lost counts as failed, because nothing is wrong but the task, again and again.

    Args:
        gang: whose attempt it was; this end is counted.
        lost: the task.
        worker: the host that it was on, if that is still there.
    """
    sound = worker is not None and not worker.draining
    return gang.quick_ends > QUICK_ENDS_ARE_FAILURES and sound and lost.state is not TaskState.SUCCEEDED


def charge(job: Job, gang: Gang, end: TaskState, started: bool) -> bool:
    """Charge one budget for an attempt.

    Args:
        job, gang: whose attempt it was.
        end: FAILED or WORKER_FAILED; it names the budget.
        started: whether any task ran; a host lost before that charges nothing.

    Returns:
        Whether the budget is used up.
    """
    spec = job.spec
    if end is TaskState.FAILED:
        gang.failures += 1
        job.failures += 1
        limit = spec.max_task_failures
        return gang.failures > spec.max_retries_failure or (limit is not None and job.failures > limit)
    gang.preemptions += started
    job.preemptions += started
    return gang.preemptions > spec.max_retries_preemption


def returns_after_end(job: Job, gang: Gang, end: TaskState, started: bool, now: float) -> None:
    """It is tried again. If it had not started, it is as if it had not left the queue."""
    if started:
        gang.waiting_since = now
        gang.not_before = now + quick_end_backoff_s(gang.quick_ends)
        _comes_first(job, gang, gang.not_before)
    if end is TaskState.WORKER_FAILED:
        gang.groups_wanted = max(gang.groups_wanted, len(gang.groups))


def returns_after_failed_launch(gang: Gang, now: float) -> None:
    """It is tried again after a pause, uncharged."""
    gang.dispatch_failures += 1
    gang.not_before = now + dispatch_backoff_s(gang.dispatch_failures)


def returns_to_move(job: Job, gang: Gang, now: float) -> None:
    """It moves to more slices, free of charge."""
    gang.waiting_since = now
    gang.quick_ends = 0  # it has got somewhere
    _comes_first(job, gang, now)


def _comes_first(job: Job, gang: Gang, since: float) -> None:
    """A gang that ran a moment ago goes before all that wait. Not a spare: a replacement is urgent as it is."""
    if job.spec.spare_for is None:
        gang.returning_until = since + RETURNING_S
