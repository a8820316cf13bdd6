"""How a job stands, in the words of a live line."""

from iris_ray.actors.wire.status import JobStatus
from iris_ray.model.lifecycle import TaskState


def job_in_words(status: JobStatus) -> str:
    """Return how a job stands, the most telling first: a terminal cuts off the rest."""
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
