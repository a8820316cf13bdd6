"""How the Controller describes its jobs, tasks and hosts to people."""

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_diff import UnusableHost
from iris_ray.actors.controller.progress_board import Heard
from iris_ray.actors.wire.status import JobStatus, LimitStatus, TaskAttempt, TaskStatus, WorkerStatus
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.jobs import Job, PastAttempt
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.limits import EVERYBODY, Limits
from iris_ray.model.workers import TPU_TOPOLOGY, Worker, string_attribute
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.state import ControllerState


def job_status(
    job: Job, state: ControllerState, clock: Clock, waiting: PendingReason | None, said: Heard | None = None
) -> JobStatus:
    spec = job.spec
    return JobStatus(
        number=job.number,
        job_id=spec.job_id,
        name=spec.name or spec.job_id,
        user=spec.user,
        priority=spec.priority,
        device=spec.device,
        state=job.state,
        submitted_at=clock.wall(job.submitted_at),
        attempt=job.attempt,
        failures=job.failures,
        preemptions=job.preemptions,
        max_retries_failure=spec.max_retries_failure,
        max_retries_preemption=spec.max_retries_preemption,
        tasks=dict(job.counts),
        groups=tuple(dict.fromkeys(name for gang in state.placed_gangs(job) for name in gang.groups)),
        error=job.error,
        waiting=waiting,
        evictions=job.evictions,
        gives_way=_gives_way(job, state, clock),
        step=said.step if said else None,
        status=said.status if said else None,
        stragglers=said.stragglers if said and job.state is JobState.RUNNING else (),
        heartbeat_at=clock.wall_or_none(said.beat_at) if said else None,
        num_groups=spec.coscheduling.num_groups if spec.coscheduling else (),
        spare_for=spec.spare_for.job_id if spec.spare_for else None,
        yields=job.yields,
    )


def _gives_way(job: Job, state: ControllerState, clock: Clock) -> tuple[str, float] | None:
    """Return to whom the first gang that is evicted gives its hosts, and until when."""
    evictions = (gang.eviction for gang in state.placed_gangs(job))
    return next(((one.reason, clock.wall(one.deadline)) for one in evictions if one is not None), None)


def task_status(job: Job, index: int, state: ControllerState, clock: Clock) -> TaskStatus:
    gang, task = job.gang_of(index), job.task(index)
    worker = state.workers.get(task.node_id or "")
    group = _group(gang.groups, index - gang.position, len(gang.tasks)) if task.node_id else None
    times = clock.wall_or_none(task.started_at), clock.wall_or_none(task.ended_at), task.exit_code
    earlier = [past for past in gang.past if past.number < gang.attempt or not gang.succeeded]
    attempts = [_past(past, job, index, clock) for past in earlier]
    if gang.attempt and not (earlier and earlier[-1].number == gang.attempt):
        attempts.append(TaskAttempt(gang.attempt, task.state, group, *times, task.error))
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
        attempts=tuple(attempts),
        node_id=task.node_id,
        address=worker.address if worker else None,
        group=group,
        host=worker.name if worker else None,
        error=task.error,
        evictions=gang.evictions,
    )


def _past(past: PastAttempt, job: Job, index: int, clock: Clock) -> TaskAttempt:
    """Return an earlier attempt of a gang, as it was for one of its tasks."""
    was_cause = past.cause == index
    together = past.state if was_cause or past.state is TaskState.KILLED else TaskState.COSCHED_FAILED
    number, size = (index, job.spec.replicas * len(past.groups)) if job.spec.coscheduling else (0, 1)
    return TaskAttempt(
        attempt=past.number,
        state=together,
        group=_group(past.groups, number, size),
        started_at=clock.wall_or_none(past.started_at),
        ended_at=clock.wall_or_none(past.ended_at),
        exit_code=past.exit_code if was_cause else None,
        error=past.error,
    )


def _group(groups: tuple[str, ...], number: int, tasks: int) -> str | None:
    """Return the group that a task of a gang is on, by its number among so many tasks."""
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
        holder=state.holders.get(worker.slice_name or ""),
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
    )


def limit_statuses(state: ControllerState) -> list[LimitStatus]:
    """Return the limits of everybody in each band, then those of each user who has limits or jobs."""
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
