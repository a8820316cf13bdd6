"""The controller's state, and the one function that changes it.

``ControllerState.handle_event(event)`` is the only way anything changes. It knows no clock, no network and no Ray: the
events bring the time, and what is to be done outside comes back as `Effects`.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from iris_ray.errors import IllegalTransitionError
from iris_ray.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TaskUnschedulableEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.fleet import Fleet
from iris_ray.invariants import check_state
from iris_ray.jobs import Gang, Job, Lease, LeaseKey, Task
from iris_ray.lifecycle import ACTIVE, TRANSITIONS, TaskState
from iris_ray.records import JobRecord
from iris_ray.retry import SUSPICION_S, dispatch_backoff_s
from iris_ray.workers import Worker, index_of, job_of

logger = logging.getLogger(__name__)

FINISHED_JOBS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """End every task of this attempt; the reason is for people. ``task_index`` is any task of the gang."""

    job_id: str
    attempt: int
    reason: str
    task_index: int = 0


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
        fleet: all live workers, and who holds what of them.
        usage: what each user's gangs hold, by Ray's resource names.
        queue_version: counts the changes to what waits.
        unrecorded: ids of jobs that have changed, or are forgotten, since somebody last cleared this.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.fleet = Fleet()
        self.usage: dict[str, Counter[str]] = {}
        self.queue_version = 0
        self.unrecorded: set[str] = set()
        self._submitted = 0
        self._now = 0.0
        self._pending: dict[str, Job] = {}
        self._finished: dict[str, None] = {}  # job ids, the first to finish first
        # job id → (position of its gang, attempt) → what it holds until its end is confirmed.
        self._leases: dict[str, dict[LeaseKey, Lease]] = {}

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Live workers by id."""
        return self.fleet.workers

    @property
    def holders(self) -> Mapping[str, str]:
        """Slice name → owner that keeps actors on it, busy or warm."""
        return self.fleet.holders

    def handle_event(self, event: Event) -> Effects:
        """Apply one event.

        Raises:
            IllegalTransitionError: the event asks for a move that the transition table does not hold.
        """
        effects = Effects()
        self._now = max(self._now, getattr(event, "now", 0.0))
        match event:
            case JobSubmittedEvent():
                self._on_job_submitted(event)
            case JobRestoredEvent():
                self._on_job_restored(event.record, effects)
            case JobCancelledEvent():
                self._on_job_cancelled(event, effects)
            case TaskUnschedulableEvent():
                self._on_unschedulable(event, effects)
            case WorkerRegisteredEvent():
                self._on_worker_registered(event)
            case WorkerDrainedEvent():
                if worker := self.workers.get(event.worker_id):
                    self.fleet.put(replace(worker, draining=event.reason))
            case TaintedEvent():
                self.fleet.taint(event.target, event.taint, event.reason)
            case TaintLiftedEvent():
                self.fleet.lift_taint(event.target, event.taint)
            case WorkerSuspectedEvent():
                if worker := self.workers.get(event.worker_id):
                    until = max(worker.suspected_until, event.now + SUSPICION_S)
                    self.fleet.put(replace(worker, suspected=event.reason, suspected_until=until))
            case WorkerFailedEvent():
                self._on_worker_failed(event, effects)
            case GangAssignedEvent():
                self._on_gang_assigned(event, effects)
            case TaskAssignedEvent():
                self._on_task_assigned(event, effects)
            case TaskDispatchFailedEvent():
                self._on_dispatch_failed(event)
            case TaskStateChangedEvent():
                self._on_task_state_changed(event, effects)
            case AttemptEndConfirmedEvent():
                self._on_end_confirmed(event)
            case SliceHeldEvent():
                if event.slice_name not in self.holders:
                    self.fleet.hold(event.slice_name, event.owner)
            case SliceReleasedEvent():
                self._on_slice_released(event)
        for job_id in effects.finished:
            self.unrecorded.add(job_id)
            self._finished[job_id] = None
            self._pending.pop(job_id, None)
            self.queue_version += 1
        if effects.finished:
            self._forget_old_jobs()
        return effects

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _on_job_submitted(self, event: JobSubmittedEvent) -> None:
        spec = event.spec
        if spec.job_id in self.jobs:
            return  # the same submission, delivered twice
        if spec.coscheduling:
            count = spec.replicas * max(spec.coscheduling.counts)
            gangs = [Gang(_new_tasks(spec.job_id, count), waiting_since=event.now)]
        else:
            gangs = [Gang([task], waiting_since=event.now) for task in _new_tasks(spec.job_id, spec.replicas)]
        self._submitted += 1
        self.jobs[spec.job_id] = self._pending[spec.job_id] = Job(
            spec=spec,
            number=self._submitted,
            submitted_at=event.now,
            requirement=spec.requirement,
            gangs=gangs,
            counts=Counter({TaskState.PENDING: sum(len(gang.tasks) for gang in gangs)}),
            pending=dict.fromkeys(range(len(gangs))),
        )
        self.queue_version += 1
        self.unrecorded.add(spec.job_id)

    def record(self, job_id: str) -> JobRecord | None:
        """What must outlive this process about a job; None if the job is forgotten."""
        job = self.jobs.get(job_id)
        return None if job is None else JobRecord(job, self._leases.get(job_id, {}))

    def _on_job_restored(self, record: JobRecord, effects: Effects) -> None:
        job, job_id = record.job, record.job.spec.job_id
        if job_id in self.jobs:
            return
        self.jobs[job_id] = job
        self._submitted = max(self._submitted, job.number)
        if job.state.finished:
            self._finished[job_id] = None
        elif job.pending:
            self._pending[job_id] = job
        for (position, attempt), lease in record.leases.items():
            self._restore_lease(job, position, attempt, lease, effects)
        self.unrecorded.add(job_id)

    def _restore_lease(self, job: Job, position: int, attempt: int, lease: Lease, effects: Effects) -> None:
        """Take up what an attempt holds. One that is over is stopped again: nobody may have heard that it is."""
        gang = job.gangs[position]
        current = gang.placed and gang.attempt == attempt
        there = tuple(place for place in lease if place[0] in self.workers)
        self._leases.setdefault(job.spec.job_id, {})[position, attempt] = there
        for worker_id, task_id, demand in there:
            self.fleet.occupy(worker_id, (task_id, attempt), demand)
            self.usage.setdefault(job.spec.user, Counter()).update(demand)
            if not current:
                self.fleet.mark_ending(worker_id, (task_id, attempt))
        if not current:
            reason = gang.error or "the job is over"
            effects.stop.append(StopAttempt(job.spec.job_id, attempt, reason, job.first_index(position)))
            return
        self._take_slices(job, tuple(worker_id for worker_id, _, _ in there), effects)
        lost = next((task for task in gang.tasks if task.worker_id not in self.workers), None)
        if lost is not None:
            reason = f"{lost.worker_id} was lost while no Controller was there to see it"
            started = any(task.state is not TaskState.ASSIGNED for task in gang.tasks)
            self._on_member_ended(job, position, lost, TaskState.WORKER_FAILED, reason, effects, started)

    def _on_job_cancelled(self, event: JobCancelledEvent, effects: Effects) -> None:
        job = self.jobs.get(event.job_id)
        if job is not None and not job.state.finished:
            self._end_other_gangs(job, None, event.reason, effects)
            job.error = event.reason
            effects.finished.append(event.job_id)

    def _on_unschedulable(self, event: TaskUnschedulableEvent, effects: Effects) -> None:
        job = self.jobs.get(event.job_id)
        if job is None or job.state.finished:
            return
        gang = job.gangs[self._position(job, event.task_index)]
        if not gang.pending or gang.started:
            return  # it got to run after all
        for task in gang.tasks:
            _move(job, gang, task, TaskState.UNSCHEDULABLE, event.reason)
        self._end_other_gangs(job, gang, f"{gang.tasks[0].task_id} is unschedulable: {event.reason}", effects)
        job.error = event.reason
        effects.finished.append(event.job_id)

    def _end_other_gangs(self, job: Job, cause: Gang | None, reason: str, effects: Effects) -> None:
        """End all that is not over; attempts that have hosts are to be stopped."""
        for position, gang in enumerate(job.gangs):
            if gang is cause or not (gang.placed or gang.pending):
                continue
            if gang.placed:
                self._end_attempt(job, position, reason, effects)
            for task in gang.tasks:
                _move(job, gang, task, TaskState.KILLED, reason)
        job.pending.clear()

    def _on_gang_assigned(self, event: GangAssignedEvent, effects: Effects) -> None:
        job = self._known(event.job_id)
        config = job.spec.coscheduling
        sizes = {len(group) for group in event.groups}
        equal = len(sizes) == 1 if job.spec.whole_groups else sizes == {job.spec.replicas}
        if config is None or not equal or len(event.groups) not in config.counts:
            raise IllegalTransitionError(f"job {event.job_id}: {event.groups} is no place for its gang")
        worker_ids = tuple(worker_id for group in event.groups for worker_id in group)
        self._require_room(job, 0, worker_ids)
        gang = job.gang
        if len(gang.tasks) != len(worker_ids):  # another count of slices: another set of tasks
            gang.tasks = _new_tasks(event.job_id, len(worker_ids))
            job.counts = Counter({TaskState.PENDING: len(worker_ids)})
        self._assign(job, 0, event.group_names, worker_ids)
        self._take_slices(job, worker_ids, effects)

    def _on_task_assigned(self, event: TaskAssignedEvent, effects: Effects) -> None:
        job = self._known(event.job_id)
        if job.spec.coscheduling is not None:
            raise IllegalTransitionError(f"job {event.job_id} is a gang; its tasks are not assigned one by one")
        position = self._position(job, event.task_index)
        self._require_room(job, position, (event.worker_id,))
        slice_name = self.workers[event.worker_id].slice_name
        self._assign(job, position, (slice_name or event.worker_id,), (event.worker_id,))
        self._take_slices(job, (event.worker_id,), effects)

    def _require_room(self, job: Job, position: int, worker_ids: tuple[str, ...]) -> None:
        """The last line of defence against two tasks on one host."""
        gang, who = job.gangs[position], job.spec.job_id
        if job.state.finished or not gang.pending:
            state = gang.tasks[0].state.name
            raise IllegalTransitionError(f"{gang.tasks[0].task_id} is {state}; only what is PENDING is assigned")
        if len(set(worker_ids)) != len(worker_ids):
            raise IllegalTransitionError(f"job {who}: {worker_ids} names a worker twice")
        for worker_id in worker_ids:
            worker = self.workers.get(worker_id)
            if worker is None or not job.requirement.has_room(worker):
                raise IllegalTransitionError(f"job {who}: worker {worker_id} is gone or full")

    def _assign(self, job: Job, position: int, groups: tuple[str, ...], worker_ids: tuple[str, ...]) -> None:
        gang = job.gangs[position]
        gang.attempt += 1
        gang.groups = groups
        usage = self.usage.setdefault(job.spec.user, Counter())
        lease = []
        for task, worker_id in zip(gang.tasks, worker_ids, strict=True):
            demand = job.requirement.demand(self.workers[worker_id])
            self.fleet.occupy(worker_id, (task.task_id, gang.attempt), demand)
            usage.update(demand)
            lease.append((worker_id, task.task_id, demand))
            _move(job, gang, task, TaskState.ASSIGNED)
            task.worker_id = worker_id
        self._leases.setdefault(job.spec.job_id, {})[position, gang.attempt] = tuple(lease)
        self.unrecorded.add(job.spec.job_id)
        job.pending.pop(position, None)
        if not job.pending:
            self._pending.pop(job.spec.job_id, None)

    def _take_slices(self, job: Job, worker_ids: tuple[str, ...], effects: Effects) -> None:
        """The job's owner keeps actors on the slices from now on, unless somebody else must let go first."""
        if not job.requirement.chips:
            return
        slices = dict.fromkeys(self.workers[worker_id].slice_name for worker_id in worker_ids)
        for name in filter(None, slices):
            holder = self.holders.get(name)
            if holder is None:
                self.fleet.hold(name, job.spec.owner)
            elif holder != job.spec.owner:  # it stays theirs until they have released it
                effects.reclaim.append(ReclaimSlice(name, holder))

    def _on_dispatch_failed(self, event: TaskDispatchFailedEvent) -> None:
        found = self._gang_in_attempt(event.job_id, event.task_index, event.attempt)
        if found is None:
            return
        job, position, gang = found
        gang.dispatch_failures += 1
        gang.not_before = event.now + dispatch_backoff_s(gang.dispatch_failures)
        self._requeue(job, position, event.error)

    def _on_task_state_changed(self, event: TaskStateChangedEvent, effects: Effects) -> None:
        found = self._gang_in_attempt(event.job_id, event.task_index, event.attempt)
        if found is None:
            return
        job, position, gang = found
        task = gang.tasks[event.task_index if job.spec.coscheduling else 0]
        if task.state is event.new_state:
            return  # delivered twice
        match event.new_state:
            case TaskState.FAILED | TaskState.WORKER_FAILED:
                if task.state is TaskState.SUCCEEDED and event.new_state is TaskState.FAILED:
                    raise IllegalTransitionError(f"{task.task_id}: SUCCEEDED → FAILED")
                error = event.error or "unknown cause"
                self._on_member_ended(job, position, task, event.new_state, error, effects, started=True)
            case TaskState.SUCCEEDED:
                if task.state is TaskState.ASSIGNED:  # the RUNNING report may be late or lost
                    _move(job, gang, task, TaskState.RUNNING)
                _move(job, gang, task, TaskState.SUCCEEDED)
                gang.started = True
                self.unrecorded.add(event.job_id)
                if gang.succeeded == len(gang.tasks):
                    self._mark_ending(job, position)
                if job.state.finished:
                    effects.finished.append(job.spec.job_id)
            case TaskState.RUNNING:
                if task.state is not TaskState.SUCCEEDED:  # else a late report
                    _move(job, gang, task, TaskState.RUNNING)
                    gang.dispatch_failures = 0
                    gang.started = True
                    self.unrecorded.add(event.job_id)
            case _:
                raise IllegalTransitionError(f"{task.task_id}: a task does not report {event.new_state.name}")

    def _on_member_ended(
        self, job: Job, position: int, cause: Task, state: TaskState, error: str, effects: Effects, started: bool
    ) -> None:
        """One member's end is the gang's: charge one budget once, then requeue everybody or end the gang."""
        spec, gang = job.spec, job.gangs[position]
        self.unrecorded.add(spec.job_id)
        gang.started = gang.started or started
        if state is TaskState.FAILED:
            gang.failures += 1
            job.failures += 1
            limit = spec.max_task_failures
            exhausted = gang.failures > spec.max_retries_failure or (limit is not None and job.failures > limit)
        else:
            gang.preemptions += started  # a host lost before any task ran there charges nothing
            job.preemptions += started
            exhausted = gang.preemptions > spec.max_retries_preemption
        if not exhausted:
            effects.stop.append(StopAttempt(spec.job_id, gang.attempt, error, gang.tasks[0].index))
            if started:  # else it is as if it had not left the queue
                gang.waiting_since = self._now
            self._requeue(job, position, error)
            return
        self._end_attempt(job, position, error, effects)
        job.error = gang.error = error
        _move(job, gang, cause, state, error)
        for sibling in gang.tasks:
            if sibling is not cause:
                reason = f"{cause.task_id} ended the gang: {error}"
                _move(job, gang, sibling, TaskState.COSCHED_FAILED, reason)
        if job.state.finished:
            self._end_other_gangs(job, gang, f"{cause.task_id} ended the job: {error}", effects)
            effects.finished.append(spec.job_id)

    def _end_attempt(self, job: Job, position: int, reason: str, effects: Effects) -> None:
        gang = job.gangs[position]
        effects.stop.append(StopAttempt(job.spec.job_id, gang.attempt, reason, gang.tasks[0].index))
        self._mark_ending(job, position)

    def _requeue(self, job: Job, position: int, error: str) -> None:
        self._mark_ending(job, position)
        gang = job.gangs[position]
        job.error = gang.error = error
        for task in gang.tasks:
            _move(job, gang, task, TaskState.PENDING, error)
            task.worker_id = None
        job.pending[position] = None
        self._pending[job.spec.job_id] = job
        self.queue_version += 1
        self.unrecorded.add(job.spec.job_id)

    def _known(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise IllegalTransitionError(f"there is no job {job_id}")
        return self.jobs[job_id]

    def _position(self, job: Job, task_index: int) -> int:
        position = job.position_of(task_index)
        if not 0 <= position < len(job.gangs):
            raise IllegalTransitionError(f"job {job.spec.job_id} has no task {task_index}")
        return position

    def _gang_in_attempt(self, job_id: str, task_index: int, attempt: int) -> tuple[Job, int, Gang] | None:
        """The task's gang, if that attempt is its live one; reports about any other change nothing."""
        job = self.jobs.get(job_id)
        if job is None or job.state.finished:
            return None
        position = self._position(job, task_index)
        gang = job.gangs[position]
        if gang.attempt != attempt or not gang.placed:
            return None
        if job.spec.coscheduling and not 0 <= task_index < len(gang.tasks):
            raise IllegalTransitionError(f"job {job_id} has no task {task_index} in attempt {attempt}")
        return job, position, gang

    def _on_end_confirmed(self, event: AttemptEndConfirmedEvent) -> None:
        job = self.jobs.get(event.job_id)
        if job is None:
            return
        position = self._position(job, event.task_index)
        gang = job.gangs[position]
        if gang.attempt == event.attempt and any(task.state in ACTIVE for task in gang.tasks):
            raise IllegalTransitionError(
                f"attempt {event.attempt} of {event.job_id} still has active tasks; it can't be free"
            )
        leases = self._leases.get(event.job_id, {})
        lease = leases.pop((position, event.attempt), None)
        if lease is None:
            return
        self.unrecorded.add(event.job_id)
        for worker_id, task_id, demand in lease:
            self.fleet.vacate(worker_id, (task_id, event.attempt))
            self._give_back(job.spec.user, demand)
        if not leases:
            del self._leases[event.job_id]

    def _let_go(self, worker_id: str, task_id: str, attempt: int) -> None:
        """What an attempt held of a lost worker is gone with it."""
        job = self.jobs[job_of(task_id)]
        leases, key = self._leases[job.spec.job_id], (job.position_of(index_of(task_id)), attempt)
        self._give_back(job.spec.user, next(demand for place, _, demand in leases[key] if place == worker_id))
        leases[key] = tuple(held for held in leases[key] if held[0] != worker_id)
        self.unrecorded.add(job.spec.job_id)

    def _give_back(self, user: str, demand: Mapping[str, float]) -> None:
        usage = self.usage.get(user, Counter())  # whose tasks ask for nothing has none
        usage.subtract(demand)
        if not any(amount > 1e-9 for amount in usage.values()):
            self.usage.pop(user, None)  # and with it what fractions have left behind

    def _mark_ending(self, job: Job, position: int) -> None:
        gang = job.gangs[position]
        lease = self._leases.get(job.spec.job_id, {}).get((position, gang.attempt))
        for worker_id, task_id, _ in lease or ():
            self.fleet.mark_ending(worker_id, (task_id, gang.attempt))

    def _forget_old_jobs(self) -> None:
        excess = len(self._finished) - FINISHED_JOBS_KEPT
        if excess > 0:
            for job_id in list(islice(self._finished, excess)):
                if job_id not in self._leases:
                    del self._finished[job_id], self.jobs[job_id]
                    self.unrecorded.add(job_id)

    def _on_slice_released(self, event: SliceReleasedEvent) -> None:
        if self.holders.get(event.slice_name) != event.owner:
            return
        # A job may have been given the slice in the meantime.
        next_owner = None
        for worker in self.fleet.slice_workers(event.slice_name):
            for task_id, attempt in worker.occupants:
                job = self.jobs[job_of(task_id)]
                gang = job.gangs[job.position_of(index_of(task_id))]
                if gang.attempt == attempt and gang.placed and job.requirement.chips:
                    next_owner = job.spec.owner
        self.fleet.hold(event.slice_name, next_owner)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _on_worker_registered(self, event: WorkerRegisteredEvent) -> None:
        self.fleet.register(
            Worker(
                event.worker_id,
                event.address,
                event.attributes,
                event.resources,
                event.draining,
                event.foreign,
                reported=event.attributes,
            )
        )

    def _on_worker_failed(self, event: WorkerFailedEvent, effects: Effects) -> None:
        worker = self.workers.get(event.worker_id)
        if worker is None:
            return
        self.fleet.remove(event.worker_id)
        for task_id, attempt in worker.occupants:
            self._let_go(event.worker_id, task_id, attempt)
            found = self._gang_in_attempt(job_of(task_id), index_of(task_id), attempt)
            if found is not None:
                job, position, gang = found
                task = next(task for task in gang.tasks if task.task_id == task_id)
                started = any(t.state in (TaskState.RUNNING, TaskState.SUCCEEDED) for t in gang.tasks)
                self._on_member_ended(job, position, task, TaskState.WORKER_FAILED, event.reason, effects, started)

    # -- views -----------------------------------------------------------------------------------------------------

    def pending(self) -> list[Job]:
        """Jobs of which some or all gangs wait for workers."""
        return list(self._pending.values())

    def jobs_of(self, owner: str) -> list[Job]:
        """Unfinished jobs of one owner."""
        return [job for job in self.jobs.values() if job.spec.owner == owner and not job.state.finished]

    def attempts_of(self, owner: str) -> list[AttemptEndConfirmedEvent]:
        """What is still to be confirmed of one owner's attempts, as the events that would do it."""
        return [
            AttemptEndConfirmedEvent(job_id, attempt, self.jobs[job_id].gangs[position].tasks[0].index)
            for job_id, leases in self._leases.items()
            if self.jobs[job_id].spec.owner == owner
            for position, attempt in leases
        ]

    def holds_capacity(self, job_id: str, attempt: int, task_index: int = 0) -> bool:
        """Whether the attempt's end is still to be confirmed."""
        job = self.jobs.get(job_id)
        return job is not None and (job.position_of(task_index), attempt) in self._leases.get(job_id, {})

    def knows(self, worker: WorkerRegisteredEvent) -> bool:
        """Whether this registration would change nothing."""
        known = self.workers.get(worker.worker_id)
        if known is not None and worker.draining is None:
            worker = replace(worker, draining=known.draining)
        return known is not None and (
            known.address, known.reported, known.resources, known.draining, known.foreign
        ) == (worker.address, worker.attributes, worker.resources, worker.draining, worker.foreign)  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken. For tests; every test that touches state ends with it."""
        check_state(self.jobs, self.fleet, self.usage, self._leases, self._pending, self._finished)


def _new_tasks(job_id: str, count: int) -> list[Task]:
    return [Task(f"{job_id}/task-{i}", i) for i in range(count)]


def _move(job: Job, gang: Gang, task: Task, new: TaskState, error: str | None = None) -> None:
    if new not in TRANSITIONS[task.state]:
        raise IllegalTransitionError(f"{task.task_id} (attempt {gang.attempt}): {task.state.name} → {new.name}")
    job.counts[task.state] -= 1
    if not job.counts[task.state]:
        del job.counts[task.state]
    job.counts[new] += 1
    gang.succeeded += (new is TaskState.SUCCEEDED) - (task.state is TaskState.SUCCEEDED)
    task.state, task.error = new, error


def apply_all(state: ControllerState, events: Iterable[Event], total: Effects | None = None) -> Effects:
    """Apply several events in order and gather their effects. One that is refused does not stop the others."""
    total = Effects() if total is None else total
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
