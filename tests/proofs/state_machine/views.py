"""The controller's state at one moment, as values that can be compared."""

from copy import deepcopy
from typing import NamedTuple

from iris_ray.model.jobs import Gang
from iris_ray.model.lifecycle import TRANSITIONS, JobState, TaskState
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.state import ControllerState

S = TaskState
LIVE = {S.ASSIGNED, S.RUNNING, S.SUCCEEDED}
TERMINAL = {state for state, targets in TRANSITIONS.items() if not targets}


class GangView(NamedTuple):
    """All that is kept of one gang, at one moment."""

    states: tuple[TaskState, ...]
    node_ids: tuple[str | None, ...]
    attempt: int
    failures: int
    preemptions: int
    dispatch_failures: int
    not_before: float
    groups: tuple[str, ...]
    error: str | None

    @property
    def live(self) -> bool:
        """Whether its attempt has hosts and is not over."""
        return set(self.states) <= LIVE and set(self.states) != {S.SUCCEEDED}

    @property
    def over(self) -> bool:
        """Whether it will not run again, if nothing happens to it."""
        return self.states[0] in TERMINAL or set(self.states) == {S.SUCCEEDED}


class JobView(NamedTuple):
    """All that is kept of one job, at one moment."""

    state: JobState
    failures: int
    preemptions: int
    started: bool
    error: str | None
    gangs: tuple[GangView, ...]


def view(gang: Gang) -> GangView:
    return GangView(
        tuple(task.state for task in gang.tasks),
        tuple(task.node_id for task in gang.tasks),
        gang.attempt,
        gang.failures,
        gang.preemptions,
        gang.dispatch_failures,
        gang.not_before,
        gang.groups,
        gang.error,
    )


def view_jobs(state: ControllerState) -> dict[str, JobView]:
    return {
        job_id: JobView(job.state, job.failures, job.preemptions, job.started, job.error, tuple(map(view, job.gangs)))
        for job_id, job in state.jobs.items()
    }


def when(notice: Notice | None) -> tuple[NoticeKind, float] | None:
    """Return a notice without its words: they name the host as it was called then."""
    return (notice.kind, notice.deadline) if notice else None


def view_all(state: ControllerState) -> tuple[dict[str, JobView], object]:
    """The whole state, to see that nothing has changed."""
    workers = {
        w.node_id: (
            w.attributes,
            (w.draining, when(w.notice), w.final and (w.final[0], when(w.final[1]))),
            w.foreign,
            w.suspected_until,
            sorted(w.occupants),
            sorted(w.ending),
        )
        for w in state.workers.values()
    }
    usage = {user: {r: round(n, 4) for r, n in held.items() if round(n, 4)} for user, held in state.usage.items()}
    usage = {user: held for user, held in usage.items() if held}
    memory = {
        (job_id, position): (
            gang.notice,
            gang.eviction,
            gang.evictions,
            gang.waiting_since,
            gang.returning_until,
            gang.running_since,
            gang.quick_ends,
            gang.groups_wanted,
            gang.past,
            [(task.started_at, task.ended_at, task.exit_code) for task in gang.tasks],
        )
        for job_id, job in state.jobs.items()
        for position, gang in enumerate(job.gangs)
    }
    yields = {job_id for job_id, job in state.jobs.items() if job.yields}
    queue = sorted((job.number, list(job.pending)) for job in state.pending())
    return view_jobs(state), (workers, dict(state.holders), usage, queue, yields, memory, deepcopy(state.fleet.taints))
