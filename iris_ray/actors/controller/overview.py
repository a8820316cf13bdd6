"""What has changed, for those who watch the whole cluster. It costs what has changed, not what there is."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_diff import NodeDiff
from iris_ray.actors.controller.progress_board import ProgressBoard
from iris_ray.actors.controller.status_views import job_status, limit_statuses, unusable_status, worker_status
from iris_ray.actors.wire.overview import QUEUE_SHOWN, Changes, Position, UserShare, Waiting
from iris_ray.actors.wire.status import PAGE, JobStatus
from iris_ray.model.jobs import Job
from iris_ray.model.workers import accelerators
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState

T = TypeVar("T")

USERS_SHOWN = 300


class Overview:
    """Answers watchers.

    Args:
        state, planner, nodes, progress: what is shown; read only.
        clock: the Controller's.
    """

    def __init__(
        self, state: ControllerState, planner: Planner, nodes: NodeDiff, progress: ProgressBoard, clock: Clock
    ) -> None:
        self._state = state
        self._planner = planner
        self._nodes = nodes
        self._progress = progress
        self._clock = clock

    def since(self, position: Position, epoch: int) -> Changes:
        """Return what has changed since a position of the Controller with this epoch."""
        state = self._state
        hosts = state.fleet.changes_since(position.fleet)
        jobs = state.job_changes.since(position.jobs)
        if position.epoch != epoch or hosts is None or jobs is None:
            return Changes(Position(epoch, state.fleet.version, state.job_changes.version), begin_anew=True)
        node_ids, read_hosts = _first([worker.node_id for worker in hosts])
        job_ids, read_jobs = _first(jobs)
        now, known = self._clock.now(), state.workers
        unusable = [unusable_status(host) for host in islice(self._nodes.unusable.values(), PAGE)]
        waiting = self._waiting()
        return Changes(
            Position(epoch, position.fleet + read_hosts, position.jobs + read_jobs),
            more=read_hosts < len(hosts) or read_jobs < len(jobs),
            workers=(*(worker_status(known[i], state, now) for i in node_ids if i in known), *unusable),
            lost=tuple(i for i in node_ids if i not in known and i not in self._nodes.unusable),
            jobs=tuple(self._job(state.jobs[i]) for i in job_ids if i in state.jobs),
            forgotten=tuple(i for i in job_ids if i not in state.jobs),
            queue=tuple(self._queued(reason) for reason in waiting[:QUEUE_SHOWN]),
            waiting=len(waiting),
            limits=tuple(islice(limit_statuses(state), USERS_SHOWN)),
            shares=tuple(islice(user_shares(state, now), USERS_SHOWN)),
        )

    def _job(self, job: Job) -> JobStatus:
        return job_status(job, self._state, self._clock, None, self._progress.of(job.spec.job_id))

    def _waiting(self) -> list[PendingReason]:
        """Return why each job waits that is no spare, in the order of the latest plan."""
        jobs, reasons = self._state.jobs, self._planner.pending_reasons
        return [why for i, why in reasons.items() if i in jobs and jobs[i].pending and not jobs[i].spec.spare_for]

    def _queued(self, reason: PendingReason) -> Waiting:
        job = self._state.jobs[reason.job_id]
        since = self._clock.wall(min(job.gangs[position].waiting_since for position in islice(job.pending, PAGE)))
        return Waiting(reason.job_id, str(reason), reason.kind.name, since)


def user_shares(state: ControllerState, now: float) -> Iterator[UserShare]:
    """Yield what each user has of the cluster, those who hold something now first."""
    totals = state.fleet.totals
    for user in dict.fromkeys([*state.usage, *state.past_usage.snapshot()]):
        held, past = state.usage.get(user, {}), state.past_usage.hours(user, now)
        both = {resource: held.get(resource, 0.0) + past.get(resource, 0.0) for resource in {*held, *past}}
        yield UserShare(user, _share(held, totals), _share(both, totals), round(accelerators(past), 3))


def _share(amounts: Mapping[str, float], totals: Mapping[str, float]) -> float:
    """Return the largest part of any resource."""
    parts = [amount / totals[resource] for resource, amount in amounts.items() if totals.get(resource)]
    return round(max(parts, default=0.0), 4)


def _first(changed: Sequence[T]) -> tuple[list[T], int]:
    """Return a page of different things that have changed, and how many of the changes these are."""
    found: dict[T, None] = {}
    for number, one in enumerate(changed):
        if len(found) == PAGE and one not in found:
            return list(found), number
        found[one] = None
    return list(found), len(changed)
