"""What people get to see of jobs, tasks and workers: plain data, made from the controller's state on request."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from iris_ray.constraints import TAINT_PREFIX
from iris_ray.jobs import Gang, Job, PriorityBand, Task
from iris_ray.lifecycle import JobState, TaskState
from iris_ray.state import ControllerState
from iris_ray.waiting import Waiting
from iris_ray.workers import TPU_TOPOLOGY, Worker, string_attribute


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stands.

    Attributes:
        job_id, name, user, priority, device: as submitted.
        state: derived from its tasks.
        submitted_at: seconds since the epoch.
        attempt: of its gang, or the highest of its gangs.
        failures, preemptions: charged so far.
        max_retries_failure, max_retries_preemption: how many each gang may have.
        tasks: how many are in each state.
        groups: the slices, or other groups, that it runs on.
        error: why its latest attempt, or the job, ended.
        waiting: why it waits; None if nothing of it does.
    """

    job_id: str
    name: str
    user: str
    priority: PriorityBand
    device: str | None
    state: JobState
    submitted_at: float
    attempt: int
    failures: int
    preemptions: int
    max_retries_failure: int
    max_retries_preemption: int
    tasks: Mapping[TaskState, int]
    groups: tuple[str, ...]
    error: str | None
    waiting: Waiting | None

    @property
    def starting(self) -> bool:
        """Whether it has its slices and no task of it runs yet."""
        there = {state for state, count in self.tasks.items() if count}
        return TaskState.ASSIGNED in there and not there & {TaskState.RUNNING, TaskState.PENDING}

    @property
    def explanation(self) -> str:
        """The answer to "why does it wait?", whether it does or not."""
        where = f" on {', '.join(self.groups)}" if self.groups else ""
        if self.state.finished:
            because = f": {self.error}" if self.error and self.state is not JobState.SUCCEEDED else ""
            return f"it does not wait, it has ended: {self.state.value}{because}"
        if self.waiting is not None:
            return str(self.waiting)
        if self.starting:
            return f"it does not wait: attempt {self.attempt} is being started{where}"
        if self.state is JobState.RUNNING:
            return f"it does not wait: attempt {self.attempt} is running{where}"
        return "it will be looked at in a moment"


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """How a task stands.

    Attributes:
        task_id, task_index: which.
        state, attempt: now, or when its job ended.
        worker_id, address, group, host: where: Ray's node id, IP address, slice (or other group), and what people call
            the host; None while it waits.
        error: why its latest attempt ended.
    """

    task_id: str
    task_index: int
    state: TaskState
    attempt: int
    worker_id: str | None
    address: str | None
    group: str | None
    host: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """How a host stands.

    Attributes:
        worker_id, address: Ray's node id and the IP address.
        slice_name, host_number, device: its place in its slice and the slice's type; None if it is of none.
        resources, free: by Ray's resource names.
        attributes: everything that constraints can ask about, taints included.
        tasks: ids of the tasks that hold something of it.
        unavailable: why it takes nothing new, or None.
        holder: the pool that keeps its slice, busy or warm, or None.
    """

    worker_id: str
    address: str
    slice_name: str | None
    host_number: int | None
    device: str | None
    resources: Mapping[str, float]
    free: Mapping[str, float]
    attributes: Mapping[str, str | int | float | bool]
    tasks: tuple[str, ...]
    unavailable: str | None
    holder: str | None


def job_status(job: Job, waiting: Waiting | None) -> JobStatus:
    spec = job.spec
    return JobStatus(
        job_id=spec.job_id,
        name=spec.name or spec.job_id,
        user=spec.user,
        priority=spec.priority,
        device=spec.device,
        state=job.state,
        submitted_at=job.submitted_at,
        attempt=max(gang.attempt for gang in job.gangs),
        failures=job.failures,
        preemptions=job.preemptions,
        max_retries_failure=spec.max_retries_failure,
        max_retries_preemption=spec.max_retries_preemption,
        tasks=dict(job.counts),
        groups=tuple(dict.fromkeys(name for gang in job.gangs if gang.placed for name in gang.groups)),
        error=job.error,
        waiting=waiting,
    )


def task_statuses(job: Job, state: ControllerState) -> Iterator[TaskStatus]:
    """Of all tasks, by index."""
    for gang in job.gangs:
        for number, task in enumerate(gang.tasks):
            yield _task_status(gang, number, task, state.workers.get(task.worker_id or ""))


def _task_status(gang: Gang, number: int, task: Task, worker: Worker | None) -> TaskStatus:
    per_group = len(gang.tasks) // len(gang.groups) if gang.groups else 0
    return TaskStatus(
        task_id=task.task_id,
        task_index=task.index,
        state=task.state,
        attempt=gang.attempt,
        worker_id=task.worker_id,
        address=worker.address if worker else None,
        group=gang.groups[number // per_group] if task.worker_id and per_group else None,
        host=worker.name if worker else None,
        error=task.error,
    )


def worker_status(worker: Worker, state: ControllerState, now: float) -> WorkerStatus:
    taints = [f"{name} ({value})" for name, value in worker.attributes.items() if name.startswith(TAINT_PREFIX)]
    suspicion = worker.suspected if now < worker.suspected_until else None
    return WorkerStatus(
        worker_id=worker.worker_id,
        address=worker.address,
        slice_name=worker.slice_name,
        host_number=worker.host_number,
        device=string_attribute(worker.attributes, TPU_TOPOLOGY),
        resources=dict(worker.resources),
        free=dict(worker.free),
        attributes={name: value.value for name, value in worker.attributes.items()},
        tasks=tuple(task_id for task_id, _ in worker.occupants),
        unavailable="; ".join(filter(None, [worker.draining, worker.foreign, suspicion, *taints])) or None,
        holder=state.holders.get(worker.slice_name or ""),
    )
