"""When attempts of tasks began and ended, and how: what is remembered of them for people."""

from iris_ray.model.jobs import ATTEMPT_ERROR_CHARACTERS, ATTEMPTS_KEPT, Gang, PastAttempt, Task
from iris_ray.model.lifecycle import TaskState


def note_end(gang: Gang, now: float) -> None:
    """Note that a gang's attempt is over: its tasks that have not ended do so now."""
    for task in gang.tasks:
        if task.ended_at is None:
            task.ended_at = now


def note_success(task: Task, now: float) -> None:
    """Note that a task has succeeded."""
    if task.started_at is None:
        task.started_at = now  # the report that it runs was lost
    task.ended_at, task.exit_code = now, 0


def note_past(gang: Gang, state: TaskState, error: str, now: float, cause: Task | None) -> None:
    """Remember a gang's attempt as a past one, before the gang is requeued.

    Args:
        gang: whose attempt is over.
        state: FAILED or WORKER_FAILED, as it was charged; KILLED if it was free of charge.
        error: why it ended, in words.
        now: seconds on the clock of the events.
        cause: the task that ended first; None if none did.
    """
    began = [task.started_at for task in gang.tasks if task.started_at is not None]
    past = PastAttempt(
        number=gang.attempt,
        state=state,
        groups=gang.groups,
        started_at=min(began, default=None),
        ended_at=now,
        cause=cause.index if cause else None,
        exit_code=cause.exit_code if cause else None,
        error=error[:ATTEMPT_ERROR_CHARACTERS],
    )
    others = (one for one in gang.past if one.number != gang.attempt)  # it may have been taken back, and returned since
    gang.past = (*others, past)[-ATTEMPTS_KEPT:]
    for task in gang.tasks:
        task.started_at = task.ended_at = task.exit_code = None
