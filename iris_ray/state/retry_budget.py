"""Retry budgets: what the end of an attempt costs its gang, and when and how urgently the gang is requeued.

`iris_ray.model.verdict` judges why an attempt ended; these are the consequences, once for each attempt.
"""

from iris_ray.model.jobs import Gang, Job, Task
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import Worker

QUICK_S = 10.0
"""An attempt that ended sooner after its start is a quick end."""
QUICK_ENDS_ARE_FAILURES = 5
"""After so many quick ends in a row, a task that is lost on a sound host counts as a failure."""
MOST_FAILED_LAUNCHES = 10
"""After so many failed launches of a gang in a row its job ends."""
YIELDED_S = 5.0
"""So long a job that yields waits after it has given its hosts to others."""
RETURNING_S = 30.0
"""How long a gang that has just lost its hosts goes before the others of its band."""


def quick_end_backoff_s(quick_ends: int) -> float:
    """Return the seconds to wait before the next attempt after so many quick ends in a row: 0, 0, 1, 2, 4, 8, 10, …"""
    return 0.0 if quick_ends < 2 else min(10.0, 2.0 ** min(quick_ends - 2, 10))


def dispatch_backoff_s(failures: int) -> float:
    """Return the seconds to wait before the next launch after so many failed launches in a row: 0.5, 1, 2, … 30."""
    return float(min(30.0, 0.5 * 2 ** min(failures - 1, 10)))


def count_quick_end(gang: Gang, now: float) -> None:
    """Count the quick ends in a row, as an attempt that had started ends now."""
    gang.quick_ends = gang.quick_ends + 1 if now < gang.running_since + QUICK_S else 0


def is_its_own_doing(gang: Gang, lost: Task, worker: Worker | None) -> bool:
    """Return whether a lost task counts as failed: it was lost on a sound host, after several quick ends in a row.

    Args:
        gang: the task's gang; this end is already counted.
        lost: the lost task.
        worker: its host, or None if the host is lost.
    """
    sound = worker is not None and not worker.draining
    return gang.quick_ends > QUICK_ENDS_ARE_FAILURES and sound and lost.state is not TaskState.SUCCEEDED


def charge(job: Job, gang: Gang, end: TaskState, started: bool) -> bool:
    """Charge one retry budget for the end of an attempt.

    Args:
        job, gang: the gang whose attempt ended, and its job.
        end: FAILED or WORKER_FAILED; selects the budget.
        started: whether any task ran. A host that is lost before costs nothing.

    Returns:
        Whether the budget is exhausted.
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
    """Set when a gang is tried again after an attempt's end. If no task had run, it keeps its place in the queue."""
    if started:
        gang.waiting_since = now
        gang.not_before = now + quick_end_backoff_s(gang.quick_ends)
        _comes_first(job, gang, gang.not_before)
    if end is TaskState.WORKER_FAILED:
        gang.groups_wanted = max(gang.groups_wanted, len(gang.groups))


def returns_after_failed_launch(gang: Gang, now: float, counts: bool) -> None:
    """Set when a gang is tried again after a failed launch: after a pause, not charged.

    Its wait for the backfill bound begins anew: it has had its turn.
    """
    gang.dispatch_failures += counts
    gang.not_before = now + dispatch_backoff_s(max(1, gang.dispatch_failures))
    gang.waiting_since = now


def can_not_be_launched(job: Job, gang: Gang) -> bool:
    """Return whether so many launches of a gang have failed in a row that its job ends. Spares never end so."""
    return gang.dispatch_failures >= MOST_FAILED_LAUNCHES and job.spec.spare_for is None


def returns_to_move(job: Job, gang: Gang, now: float) -> None:
    """Set when a gang that moves is tried again: at once, not charged."""
    gang.waiting_since = now
    gang.quick_ends = 0  # it has saved its state
    _comes_first(job, gang, now)


def returns_after_eviction(job: Job, gang: Gang, now: float) -> None:
    """Set when a gang is tried again that gave its hosts to others: at once, unless it yields; not charged."""
    gang.waiting_since = now
    gang.quick_ends = 0
    gang.groups_wanted = max(gang.groups_wanted, len(gang.groups))
    if job.yields:
        gang.not_before = now + YIELDED_S
    _comes_first(job, gang, now)


def _comes_first(job: Job, gang: Gang, since: float) -> None:
    """Let a gang that ran a moment ago go before the others of its band. Spares don't: replacements are urgent."""
    if job.spec.spare_for is None:
        gang.returning_until = since + RETURNING_S
