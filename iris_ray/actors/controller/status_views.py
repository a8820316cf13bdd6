"""How the Controller describes its jobs, tasks and hosts to people."""

from iris_ray.actors.wire.status import JobStatus, TaskStatus, WorkerStatus
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.jobs import Job
from iris_ray.model.workers import TPU_TOPOLOGY, Worker, string_attribute
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.state import ControllerState


def job_status(job: Job, state: ControllerState, waiting: PendingReason | None) -> JobStatus:
    spec = job.spec
    return JobStatus(
        number=job.number,
        job_id=spec.job_id,
        name=spec.name or spec.job_id,
        user=spec.user,
        priority=spec.priority,
        device=spec.device,
        state=job.state,
        submitted_at=job.submitted_at,
        attempt=job.attempt,
        failures=job.failures,
        preemptions=job.preemptions,
        max_retries_failure=spec.max_retries_failure,
        max_retries_preemption=spec.max_retries_preemption,
        tasks=dict(job.counts),
        groups=tuple(dict.fromkeys(name for gang in state.placed_gangs(job) for name in gang.groups)),
        error=job.error,
        waiting=waiting,
    )


def task_status(job: Job, index: int, state: ControllerState) -> TaskStatus:
    gang, task = job.gang_of(index), job.task(index)
    worker, number = state.workers.get(task.node_id or ""), index - gang.position
    per_group = len(gang.tasks) // len(gang.groups) if gang.groups else 0
    return TaskStatus(
        task_id=task.task_id,
        task_index=task.index,
        state=task.state,
        attempt=gang.attempt,
        node_id=task.node_id,
        address=worker.address if worker else None,
        group=gang.groups[number // per_group] if task.node_id and per_group else None,
        host=worker.name if worker else None,
        error=task.error,
    )


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
    )
