"""The Controller's descriptions of jobs, tasks and hosts for people: status, events, changes."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_table import NodeDiff, UnusableHost
from iris_ray.actors.controller.progress_board import ProgressBoard
from iris_ray.actors.controller.services import ServiceBoard
from iris_ray.actors.protocol.overview import QUEUE_SHOWN, Changes, Position, UserShare, WaitingJob
from iris_ray.actors.protocol.status import (
    PAGE,
    HostCondition,
    JobEvent,
    JobFacts,
    JobStatus,
    LimitStatus,
    TaskAttempt,
    TaskStatus,
    WorkerStatus,
    job_status,
)
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.jobs import Gang, Job, PastAttempt
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.limits import EVERYBODY, Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_TOPOLOGY, Worker, accelerators, string_attribute
from iris_ray.scheduler.explanation import held_back
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState
from iris_ray.state.quarantine import QUARANTINE


def task_status(job: Job, index: int, state: ControllerState, clock: Clock) -> TaskStatus:
    gang, task = job.gang_of(index), job.task(index)
    worker = state.workers.get(task.node_id or "")
    group = _group(gang.groups, index - gang.tasks[0].index, len(gang.tasks)) if task.node_id else None
    times = clock.wall_or_none(task.started_at), clock.wall_or_none(task.ended_at), task.exit_code
    latest = TaskAttempt(gang.attempt, task.state, group, *times, task.error)
    attempts = tuple(_past(past, job, gang, index, clock) if past else latest for past in gang.attempts)
    return TaskStatus(
        task_id=task.task_id,
        task_index=task.index,
        state=task.state,
        attempt=gang.attempt,
        started_at=times[0],
        ended_at=times[1],
        exit_code=task.exit_code,
        failures=gang.failures,
        preemptions=gang.preemptions,
        attempts=attempts,
        node_id=task.node_id,
        address=worker.address if worker else None,
        group=group,
        host=worker.name if worker else None,
        error=task.error,
        evictions=gang.evictions,
        processes=job.spec.processes_per_host,
    )


def _past(past: PastAttempt, job: Job, gang: Gang, index: int, clock: Clock) -> TaskAttempt:
    """Return an earlier attempt of a gang, from the view of one of its tasks."""
    was_cause = past.cause == index
    together = past.state if was_cause or past.state is TaskState.KILLED else TaskState.COSCHED_FAILED
    size = job.spec.replicas * len(past.groups) if job.spec.coscheduling else 1
    return TaskAttempt(
        attempt=past.number,
        state=together,
        group=_group(past.groups, index - gang.tasks[0].index, size),
        started_at=clock.wall_or_none(past.started_at),
        ended_at=clock.wall_or_none(past.ended_at),
        exit_code=past.exit_code if was_cause else None,
        error=past.error,
    )


def _group(groups: tuple[str, ...], number: int, tasks: int) -> str | None:
    """Return the group of the task with this number among ``tasks`` tasks."""
    return groups[number * len(groups) // tasks] if number < tasks and groups else None


def worker_status(worker: Worker, state: ControllerState, now: float) -> WorkerStatus:
    taints = [f"{name} ({value})" for name, value in worker.attributes.items() if name.startswith(TAINT_PREFIX)]
    suspicion = worker.suspected if now < worker.suspected_until else None
    return WorkerStatus(
        node_id=worker.node_id,
        address=worker.address,
        slice_name=worker.slice_name,
        host_index=worker.host_index,
        device=string_attribute(worker.attributes, TPU_TOPOLOGY),
        resources=dict(worker.resources),
        free=dict(worker.free),
        attributes={name: value.value for name, value in worker.attributes.items()},
        tasks=tuple(task_id for task_id, _ in worker.occupants),
        unavailable="; ".join(filter(None, [worker.draining, worker.foreign, suspicion, *taints])) or None,
        holder=state.fleet.holder_of(worker),
        condition=next(conditions_of(worker, state, now)),
        draining=worker.draining,
        suspected=suspicion,
        foreign=worker.foreign,
    )


def unusable_status(host: UnusableHost) -> WorkerStatus:
    return WorkerStatus(
        node_id=host.node_id,
        address=host.address,
        slice_name=host.slice_name,
        host_index=None,
        device=None,
        resources=host.resources,
        free=host.resources,
        attributes={},
        tasks=(),
        unavailable=host.why,
        holder=None,
        condition=HostCondition.UNUSABLE,
    )


def conditions_of(worker: Worker, state: ControllerState, now: float) -> Iterator[HostCondition]:
    """Yield all conditions of a live host that hold, in the order of `HostCondition`; at least FREE."""
    jobs = [state.jobs.get(job_id) for job_id in worker.tasks_of]
    holds = {
        HostCondition.SUSPECTED: worker.suspected and now < worker.suspected_until,
        HostCondition.DRAINING: worker.draining,
        HostCondition.SPARE: jobs and all(job is not None and job.spec.spare_for is not None for job in jobs),
        HostCondition.BUSY: jobs,
        HostCondition.QUARANTINED: TAINT_PREFIX + QUARANTINE in worker.taints,
        HostCondition.CLOSED: worker.taints,
        HostCondition.ELSEWHERE: worker.foreign,
        HostCondition.WARM: state.fleet.holder_of(worker) is not None,
        HostCondition.FREE: True,
    }
    return (condition for condition, held in holds.items() if held)


def limit_statuses(state: ControllerState) -> list[LimitStatus]:
    """Return the limits of `EVERYBODY` in each band, and then of each user with limits or jobs."""
    everybody = [(EVERYBODY, band) for band in PriorityBand]
    users = sorted(account for account in state.limits.accounts if account[0] != EVERYBODY)
    return [_limit_status(user, band, state) for user, band in (*everybody, *users)]


def _limit_status(user: str, band: PriorityBand, state: ControllerState) -> LimitStatus:
    held = state.limits.held(user, band)
    return LimitStatus(
        user=user,
        band=band,
        set_here=state.limits.table.get((user, band), Limits()),
        limits=state.limits.of(user, band),
        chips=held.chips,
        running_jobs=len(held.running),
        queued_jobs=len(held.queued),
        tasks=held.tasks,
    )


# -- job events: from the job's record, so a restart of the Controller loses none --------------------------------------

CHARGED = {
    TaskState.FAILED: "charged as a failure",
    TaskState.WORKER_FAILED: "charged as a preemption",
    TaskState.KILLED: "free of charge",
}


def job_events(job: Job, clock: Clock) -> list[JobEvent]:
    """Return the latest events of a job, at most `PAGE`, the oldest first."""
    events = [event for gang in job.gangs for event in _of_gang(job, gang)]
    band = job.spec.priority.name.lower()
    events.append(JobEvent(job.submitted_at, None, None, f"submitted by {job.spec.user}, {band}"))
    if job.over is not None and job.times.ended_at is not None:
        because = f": {job.error}" if job.error and job.over is not JobState.SUCCEEDED else ""
        events.append(JobEvent(job.times.ended_at, None, None, f"the job ended: {job.over.value}{because}"))
    latest = heapq.nlargest(PAGE, enumerate(events), key=lambda event: (event[1].at, event[0]))
    in_order = (event for _, event in sorted(latest, key=lambda event: (event[1].at, event[0])))
    return [JobEvent(clock.wall(event.at), event.task_index, event.attempt, event.what) for event in in_order]


def _of_gang(job: Job, gang: Gang) -> Iterator[JobEvent]:
    task = None if job.spec.is_one_gang else gang.tasks[0].index * job.spec.processes_per_host
    for past in gang.past:
        yield from _past_event(past, task)
    assigned = {attempt.number: attempt.assigned_at for attempt in job.times.attempts}
    where = ", ".join(gang.groups)
    is_over = any(past.number == gang.attempt for past in gang.past)
    if job.spec.is_one_gang and not is_over and gang.attempt in assigned:
        yield JobEvent(assigned[gang.attempt], task, gang.attempt, f"got {where}")
    began = min((one.started_at for one in gang.tasks if one.started_at is not None), default=None)
    if began is not None:
        yield JobEvent(began, task, gang.attempt, f"runs on {where}")
    if gang.notice is not None:
        yield JobEvent(gang.notice.deadline, task, gang.attempt, f"is to move at the latest: {gang.notice.reason}")


def _past_event(past: PastAttempt, task: int | None) -> Iterator[JobEvent]:
    where = ", ".join(past.groups)
    if past.started_at is not None:
        yield JobEvent(past.started_at, task, past.number, f"runs on {where}")
    ended = "ended" if past.started_at is not None else f"did not start on {where}"
    yield JobEvent(past.ended_at, task, past.number, f"{ended} ({CHARGED[past.state]}): {past.error}")


# -- overview ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")

USERS_SHOWN = 300


class Overview:
    """Answers programs that watch the whole cluster. The cost grows with the changes, not with the cluster.

    Args:
        state, planner, nodes, progress, board: are shown; read only.
        clock: the Controller's.
    """

    def __init__(
        self,
        state: ControllerState,
        planner: Planner,
        nodes: NodeDiff,
        progress: ProgressBoard,
        board: ServiceBoard,
        clock: Clock,
    ) -> None:
        self._state = state
        self._planner = planner
        self._nodes = nodes
        self._progress = progress
        self._board = board
        self._clock = clock

    def since(self, position: Position, epoch: int) -> Changes:
        """Return the changes since a position. ``epoch`` is this Controller's."""
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
            tables=self._board.tables(),
        )

    def _job(self, job: Job) -> JobStatus:
        heard = self._progress.of(job.spec.job_id)
        return job_status(JobFacts(job, self._state, self._clock.wall, heard, held_back(job)))

    def _waiting(self) -> list[PendingReason]:
        """Return the reasons of waiting jobs without spares, in the order of the latest plan."""
        jobs, reasons = self._state.jobs, self._planner.pending_reasons
        return [why for i, why in reasons.items() if i in jobs and jobs[i].pending and not jobs[i].spec.spare_for]

    def _queued(self, reason: PendingReason) -> WaitingJob:
        job = self._state.jobs[reason.job_id]
        since = self._clock.wall(min(job.gangs[position].waiting_since for position in islice(job.pending, PAGE)))
        return WaitingJob(reason.job_id, str(reason), reason.kind.name, since)


def user_shares(state: ControllerState, now: float) -> Iterator[UserShare]:
    """Yield each user's share of the cluster. Users who hold resources now come first."""
    totals = state.fleet.totals
    for user in dict.fromkeys([*state.usage, *state.past_usage.snapshot()]):
        held, past = state.usage.get(user, {}), state.past_usage.hours(user, now)
        both = {resource: held.get(resource, 0.0) + past.get(resource, 0.0) for resource in {*held, *past}}
        shares = largest_share(held, totals), largest_share(both, totals)
        yield UserShare(user, *shares, round(accelerators(past), 3))


def largest_share(amounts: Mapping[str, float], totals: Mapping[str, float]) -> float:
    """Return the largest share of any resource, by Ray's names."""
    parts = [amount / totals[resource] for resource, amount in amounts.items() if totals.get(resource)]
    return round(max(parts, default=0.0), 4)


def _first(changed: Sequence[T]) -> tuple[list[T], int]:
    """Return a page of distinct changed items, and the number of changes that it covers."""
    found: dict[T, None] = {}
    for number, one in enumerate(changed):
        if len(found) == PAGE and one not in found:
            return list(found), number
        found[one] = None
    return list(found), len(changed)
