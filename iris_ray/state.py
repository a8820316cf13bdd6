"""The controller's state, and the one function that changes it.

``ControllerState.handle_event(event)`` is the only way anything changes. It knows no clock, no network and no Ray: the
events bring the time, and what is to be done outside comes back as `Effects`.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from iris_ray.errors import IllegalTransitionError
from iris_ray.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.jobs import ACTIVE, TRANSITIONS, Job, JobSpec, JobState, Task, TaskState, Worker
from iris_ray.retry import SUSPICION_S, dispatch_backoff_s

logger = logging.getLogger(__name__)

FINISHED_JOBS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """End every task of this attempt; the reason is for people."""

    job_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReclaimSlice:
    """The slice goes to another owner: the one that keeps it warm must let go first."""

    slice_name: str
    holder: str


@dataclass(slots=True)
class Effects:
    """What is to be done outside because of an event."""

    stop: list[StopAttempt] = field(default_factory=list)
    reclaim: list[ReclaimSlice] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class ControllerState:
    """Every job, every worker and every commitment: the single source of truth.

    Attributes:
        jobs: by job id, in the order of submission.
        workers: by worker id; only those that are alive.
        holders: slice name → owner that keeps actors on it, busy or warm.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Worker] = {}
        self.holders: dict[str, str] = {}
        # (job id, attempt) → workers whose capacity it holds until its end is confirmed.
        self._leases: dict[tuple[str, int], tuple[str, ...]] = {}

    def handle_event(self, event: Event) -> Effects:
        """Apply one event.

        Raises:
            IllegalTransitionError: the event asks for a move that the transition table does not hold.
        """
        effects = Effects()
        match event:
            case JobSubmittedEvent():
                self._on_job_submitted(event)
            case JobCancelledEvent():
                self._on_job_cancelled(event, effects)
            case WorkerRegisteredEvent():
                self._on_worker_registered(event)
            case WorkerDrainedEvent():
                if worker := self.workers.get(event.worker_id):
                    worker.draining = event.reason
            case WorkerSuspectedEvent():
                if worker := self.workers.get(event.worker_id):
                    worker.suspected, worker.suspected_until = event.reason, event.now + SUSPICION_S
            case WorkerFailedEvent():
                self._on_worker_failed(event, effects)
            case GangAssignedEvent():
                self._on_gang_assigned(event, effects)
            case TaskDispatchFailedEvent():
                self._on_dispatch_failed(event)
            case TaskStateChangedEvent():
                self._on_task_state_changed(event, effects)
            case AttemptEndConfirmedEvent():
                self._free(event.job_id, event.attempt)
            case SliceReleasedEvent():
                self._on_slice_released(event)
        for job_id in effects.finished:
            self._mark_ending(self.jobs[job_id])
        if effects.finished:
            self._forget_old_jobs()
        return effects

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _on_job_submitted(self, event: JobSubmittedEvent) -> None:
        if event.spec.job_id in self.jobs:
            return  # the same submission, delivered twice
        spec = event.spec
        tasks = _new_tasks(spec.job_id, spec.replicas * max(spec.coscheduling.num_groups))
        self.jobs[spec.job_id] = Job(spec, event.now, tasks, Counter({TaskState.PENDING: len(tasks)}))

    def _on_job_cancelled(self, event: JobCancelledEvent, effects: Effects) -> None:
        job = self.jobs.get(event.job_id)
        if job is None or job.state.finished:
            return
        if job.state is JobState.RUNNING:
            effects.stop.append(StopAttempt(event.job_id, job.attempt, event.reason))
        job.error = event.reason
        for task in job.tasks:
            _move(job, task, TaskState.KILLED, event.reason)
        effects.finished.append(event.job_id)

    def _on_gang_assigned(self, event: GangAssignedEvent, effects: Effects) -> None:
        job = self.jobs[event.job_id]
        if job.state is not JobState.PENDING:
            raise IllegalTransitionError(f"job {event.job_id} is {job.state.name}; only a PENDING one is assigned")
        self._require_fitting(event, job.spec)
        count = sum(map(len, event.groups))
        if len(job.tasks) != count:  # another count of slices: another set of tasks
            job.tasks = _new_tasks(job.spec.job_id, count)
            job.counts = Counter({TaskState.PENDING: count})
        job.attempt += 1
        job.groups = event.group_names
        worker_ids = [worker_id for group in event.groups for worker_id in group]
        for task, worker_id in zip(job.tasks, worker_ids, strict=True):
            task.worker_id, task.error = worker_id, None
            worker = self.workers[worker_id]
            worker.occupants[task.task_id, job.attempt] = job.spec.demand(worker)
            _move(job, task, TaskState.ASSIGNED)
        self._leases[event.job_id, job.attempt] = tuple(worker_ids)
        for name in event.group_names:
            holder = self.holders.setdefault(name, job.spec.owner)
            if holder != job.spec.owner:  # it stays theirs until they have released it
                effects.reclaim.append(ReclaimSlice(name, holder))

    def _require_fitting(self, event: GangAssignedEvent, spec: JobSpec) -> None:
        sizes = {len(group) for group in event.groups}
        equal = len(sizes) == 1 if spec.whole_groups else sizes == {spec.replicas}
        worker_ids = [worker_id for group in event.groups for worker_id in group]
        distinct = len(set(worker_ids)) == len(worker_ids)
        fits = distinct and all(w in self.workers and self.workers[w].has_room_for(spec) for w in worker_ids)
        if not equal or len(event.groups) not in spec.coscheduling.num_groups or not fits:
            raise IllegalTransitionError(f"job {event.job_id}: {event.groups} is no place for its gang")

    def _on_dispatch_failed(self, event: TaskDispatchFailedEvent) -> None:
        job = self._job_in_attempt(event.job_id, event.attempt)
        if job is None:
            return
        job.dispatch_failures += 1
        job.not_before = event.now + dispatch_backoff_s(job.dispatch_failures)
        self._requeue(job, event.error)

    def _on_task_state_changed(self, event: TaskStateChangedEvent, effects: Effects) -> None:
        job = self._job_in_attempt(event.job_id, event.attempt)
        if job is None:
            return
        task = job.tasks[event.task_index]
        if task.state is event.new_state:
            return  # delivered twice
        match event.new_state:
            case TaskState.FAILED | TaskState.WORKER_FAILED:
                if task.state is TaskState.SUCCEEDED and event.new_state is TaskState.FAILED:
                    raise IllegalTransitionError(f"{task.task_id}: SUCCEEDED → FAILED")
                self._end_attempt(job, task, event.new_state, event.error or "unknown cause", effects, started=True)
            case TaskState.SUCCEEDED:
                if task.state is TaskState.ASSIGNED:  # the RUNNING report may be late or lost
                    _move(job, task, TaskState.RUNNING)
                _move(job, task, TaskState.SUCCEEDED)
                if job.state is JobState.SUCCEEDED:
                    effects.finished.append(job.spec.job_id)
            case TaskState.RUNNING:
                if task.state is not TaskState.SUCCEEDED:  # else a late report
                    _move(job, task, TaskState.RUNNING)
                    job.dispatch_failures = 0
            case _:
                raise IllegalTransitionError(f"{task.task_id}: a task does not report {event.new_state.name}")

    def _end_attempt(
        self, job: Job, cause: Task, state: TaskState, error: str, effects: Effects, started: bool
    ) -> None:
        """One member's end is the gang's: charge one budget once, then requeue everybody or end the job."""
        spec = job.spec
        if state is TaskState.FAILED:
            job.failures += 1
            exhausted = job.failures > spec.max_retries_failure
        else:
            job.preemptions += started  # a host lost before any task ran there charges nothing
            exhausted = job.preemptions > spec.max_retries_preemption
        effects.stop.append(StopAttempt(spec.job_id, job.attempt, error))
        if not exhausted:
            self._requeue(job, error)
            return
        job.error = error
        _move(job, cause, state, error)
        for sibling in job.tasks:
            if sibling is not cause:
                _move(job, sibling, TaskState.COSCHED_FAILED, f"{cause.task_id} ended the gang: {error}")
        effects.finished.append(spec.job_id)

    def _requeue(self, job: Job, error: str) -> None:
        self._mark_ending(job)
        job.error = error
        for task in job.tasks:
            _move(job, task, TaskState.PENDING, error)
            task.worker_id = None

    def _job_in_attempt(self, job_id: str, attempt: int) -> Job | None:
        """The job, if that attempt is its live one; reports about any other change nothing."""
        job = self.jobs.get(job_id)
        if job is None or job.attempt != attempt or job.state is not JobState.RUNNING:
            return None
        return job

    def _free(self, job_id: str, attempt: int) -> None:
        job = self.jobs.get(job_id)
        if job and job.attempt == attempt and any(task.state in ACTIVE for task in job.tasks):
            raise IllegalTransitionError(f"attempt {attempt} of {job_id} still has active tasks; it can't be free")
        worker_ids = self._leases.pop((job_id, attempt), ())
        for index, worker_id in enumerate(worker_ids):
            if worker := self.workers.get(worker_id):
                worker.occupants.pop((_task_id(job_id, index), attempt), None)
                worker.ending.discard((_task_id(job_id, index), attempt))

    def _mark_ending(self, job: Job) -> None:
        for index, worker_id in enumerate(self._leases.get((job.spec.job_id, job.attempt), ())):
            if worker := self.workers.get(worker_id):
                worker.ending.add((_task_id(job.spec.job_id, index), job.attempt))

    def _forget_old_jobs(self) -> None:
        finished = [job_id for job_id, job in self.jobs.items() if job.state.finished]
        holding = {job_id for job_id, _ in self._leases}
        for job_id in finished[:-FINISHED_JOBS_KEPT]:
            if job_id not in holding:
                del self.jobs[job_id]

    def _on_slice_released(self, event: SliceReleasedEvent) -> None:
        if self.holders.get(event.slice_name) != event.owner:
            return
        del self.holders[event.slice_name]
        for job in self.jobs.values():  # a job may have been given the slice in the meantime
            if job.state is JobState.RUNNING and event.slice_name in job.groups:
                self.holders[event.slice_name] = job.spec.owner

    # -- workers ---------------------------------------------------------------------------------------------------

    def _on_worker_registered(self, event: WorkerRegisteredEvent) -> None:
        known = self.workers.get(event.worker_id)
        self.workers[event.worker_id] = Worker(
            event.worker_id,
            event.address,
            event.attributes,
            event.resources,
            event.draining or (known.draining if known else None),  # a drain is not taken back
            event.foreign,
            known.suspected if known else None,
            known.suspected_until if known else 0.0,
            known.occupants if known else {},
            known.ending if known else set(),
        )

    def _on_worker_failed(self, event: WorkerFailedEvent, effects: Effects) -> None:
        worker = self.workers.pop(event.worker_id, None)
        if worker is None:
            return
        for task_id, attempt in worker.occupants:
            job = self._job_in_attempt(task_id.rpartition("/")[0], attempt)
            if job is not None:
                task = job.tasks[int(task_id.rpartition("-")[2])]
                started = any(job.counts[s] for s in (TaskState.RUNNING, TaskState.SUCCEEDED))
                self._end_attempt(job, task, TaskState.WORKER_FAILED, event.reason, effects, started)

    # -- views -----------------------------------------------------------------------------------------------------

    def pending(self) -> list[Job]:
        """Jobs that wait for workers, oldest first."""
        return [job for job in self.jobs.values() if job.state is JobState.PENDING]

    def jobs_of(self, owner: str) -> list[Job]:
        """Unfinished jobs of one owner."""
        return [job for job in self.jobs.values() if job.spec.owner == owner and not job.state.finished]

    def attempts_of(self, owner: str) -> list[tuple[str, int]]:
        """Attempts of one owner that still hold capacity."""
        return [key for key in self._leases if key[0] in self.jobs and self.jobs[key[0]].spec.owner == owner]

    def holds_capacity(self, job_id: str, attempt: int) -> bool:
        """Whether the attempt's end is still to be confirmed."""
        return (job_id, attempt) in self._leases

    def knows(self, worker: WorkerRegisteredEvent) -> bool:
        """Whether this registration would change nothing."""
        known = self.workers.get(worker.worker_id)
        if known is not None and worker.draining is None:
            worker = replace(worker, draining=known.draining)
        return known is not None and (
            known.address, known.attributes, known.resources, known.draining, known.foreign
        ) == (worker.address, worker.attributes, worker.resources, worker.draining, worker.foreign)  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken. For tests; every test that touches state ends with it."""
        for job in self.jobs.values():
            assert job.counts == Counter(t.state for t in job.tasks), f"{job.spec.job_id}: counts are off"
            if job.state is JobState.RUNNING:
                self._check_gang_placed(job)
        for worker in self.workers.values():
            for resource in worker.resources:
                assert worker.available(resource) >= 0, f"{worker.worker_id}: {resource} is overcommitted"
            for task_id, attempt in worker.occupants:
                job_id = task_id.rpartition("/")[0]
                assert (job_id, attempt) in self._leases, f"{worker.worker_id}: {task_id} holds it without a lease"

    def _check_gang_placed(self, job: Job) -> None:
        allowed = {TaskState.ASSIGNED, TaskState.RUNNING, TaskState.SUCCEEDED}
        assert {t.state for t in job.tasks} <= allowed, f"{job.spec.job_id}: gang is placed in part"
        per_group, rest = divmod(len(job.tasks), len(job.groups))
        assert rest == 0, f"{job.spec.job_id}: groups of unequal size"
        for task in job.tasks:
            worker = self.workers.get(task.worker_id or "")
            assert worker is not None, f"{task.task_id}: its worker is gone and it does not know"
            assert (task.task_id, job.attempt) in worker.occupants, f"{task.task_id}: holds nothing"
            group = worker.attributes[job.spec.coscheduling.group_by].value
            assert group == job.groups[task.index // per_group], f"{task.task_id}: gang is split"


def _task_id(job_id: str, index: int) -> str:
    return f"{job_id}/task-{index}"


def _new_tasks(job_id: str, count: int) -> list[Task]:
    return [Task(_task_id(job_id, i), i) for i in range(count)]


def _move(job: Job, task: Task, new: TaskState, error: str | None = None) -> None:
    if new not in TRANSITIONS[task.state]:
        raise IllegalTransitionError(f"{task.task_id} (attempt {job.attempt}): {task.state.name} → {new.name}")
    job.counts[task.state] -= 1
    if not job.counts[task.state]:
        del job.counts[task.state]
    job.counts[new] += 1
    task.state, task.error = new, error


def apply_all(state: ControllerState, events: Iterable[Event]) -> Effects:
    """Apply several events in order and gather their effects. One that is refused does not stop the others."""
    total = Effects()
    for event in events:
        try:
            effects = state.handle_event(event)
        except IllegalTransitionError:
            logger.exception("refused %s", event)
            continue
        total.stop += effects.stop
        total.reclaim += effects.reclaim
        total.finished += effects.finished
    return total
