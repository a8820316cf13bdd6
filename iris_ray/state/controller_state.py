"""The controller's state, and the one function that changes it.

``ControllerState.handle_event(event)`` is the only way anything changes. It knows no clock, no network and no Ray: the
events bring the time, and what is to be done outside comes back as `Instructions`.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Allocation, Gang, Job, SparePurpose, Task
from iris_ray.model.lifecycle import ACTIVE, TRANSITIONS, TaskState
from iris_ray.model.notices import GROWTH_NOTICE_S, NOTICE_S, Notice, NoticeKind, is_as_urgent
from iris_ray.model.workers import Worker, index_of, job_of
from iris_ray.state import retry_budget as charges
from iris_ray.state.allocations import Allocations
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    GangReturnedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    MaintenanceCalledOffEvent,
    PoolRestartedEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskAssignedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TaskUnschedulableEvent,
    TimePassedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S, Fleet, Taint
from iris_ray.state.instructions import DropSpare, Instructions, NotifyGang, ReclaimSlice, StopAttempt
from iris_ray.state.invariants import check_state
from iris_ray.state.quarantine import QUARANTINE, Blame, BlameBook
from iris_ray.state.records import JobRecord
from iris_ray.state.spares import Spares

logger = logging.getLogger(__name__)

FINISHED_JOBS_KEPT = 1000
_TO_SUCCESS = (TaskState.PENDING, TaskState.ASSIGNED, TaskState.RUNNING, TaskState.SUCCEEDED)
_WAY_TO_SUCCESS = {state: _TO_SUCCESS[i + 1 :] for i, state in enumerate(_TO_SUCCESS)}


class ControllerState:
    """Every job, every worker and every commitment: the single source of truth.

    Attributes:
        jobs: by job id, in the order of submission.
        fleet: all live workers, and who holds what of them.
        queue_version: counts the changes to what waits.
        unrecorded: ids of jobs that have changed, or are forgotten, since somebody last cleared this.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.fleet = Fleet()
        self.queue_version = 0
        self.unrecorded: set[str] = set()
        self._submitted = 0
        self._now = 0.0
        self._pending: dict[str, Job] = {}
        self._finished: dict[str, None] = {}  # job ids, the first to finish first
        self._spares = Spares()
        self._blames = BlameBook()
        self._allocations = Allocations(self.fleet)

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Live workers by id."""
        return self.fleet.workers

    @property
    def holders(self) -> Mapping[str, str]:
        """Slice name → owner that keeps actors on it, busy or warm."""
        return self.fleet.holders

    @property
    def usage(self) -> Mapping[str, Mapping[str, float]]:
        """What each user's gangs hold, by Ray's resource names."""
        return self._allocations.usage

    def handle_event(self, event: Event) -> Instructions:
        """Apply one event.

        Raises:
            IllegalTransitionError: the event asks for a move that the transition table does not hold.
        """
        instructions = Instructions()
        self._now = max(self._now, getattr(event, "now", 0.0))
        self._spares.time_passed(self._now)
        match event:
            case JobSubmittedEvent():
                self._on_job_submitted(event)
            case JobRestoredEvent():
                self._on_job_restored(event.record, instructions)
            case JobCancelledEvent():
                self._on_job_cancelled(event, instructions)
            case TaskUnschedulableEvent():
                self._on_unschedulable(event, instructions)
            case WorkerRegisteredEvent():
                self._on_worker_registered(event, instructions)
            case TimePassedEvent():
                self.fleet.time_passed(self._now)
            case WorkerDrainedEvent():
                self._on_worker_drained(event, instructions)
            case MaintenanceCalledOffEvent():
                self._on_maintenance_called_off(event, instructions)
            case WorkerBlamedEvent():
                self._on_worker_blamed(event)
            case TaintedEvent():
                self.fleet.taint(event.target, event.taint, Taint(event.reason, event.until))
            case TaintLiftedEvent():
                self.fleet.lift_taint(event.target, event.taint)
                if event.taint == QUARANTINE:
                    self._blames.forgive(event.target)
            case WorkerSuspectedEvent():
                self.fleet.suspect(event.node_id, event.reason, event.now + SUSPICION_S)
            case WorkerFailedEvent():
                self._on_worker_failed(event, instructions)
            case GangAssignedEvent():
                self._on_gang_assigned(event, instructions)
            case TaskAssignedEvent():
                self._on_task_assigned(event, instructions)
            case TaskDispatchFailedEvent():
                self._on_dispatch_failed(event)
            case GangMovedEvent():
                self._on_gang_moved(event)
            case GangReturnedEvent():
                self._on_gang_returned(event, instructions)
            case TaskStateChangedEvent():
                self._on_task_state_changed(event, instructions)
            case AttemptEndConfirmedEvent():
                self._on_end_confirmed(event)
            case PoolRestartedEvent():
                self._on_pool_restarted(event.owner, instructions)
            case SliceHeldEvent():
                if event.slice_name not in self.holders:
                    self.fleet.hold(event.slice_name, event.owner)
            case SliceReleasedEvent():
                self._on_slice_released(event)
        for job_id in instructions.finished:
            self.unrecorded.add(job_id)
            self._finished[job_id] = None
            self._pending.pop(job_id, None)
            self.queue_version += 1
            self._spares.look_at(self.jobs[job_id])
        if not isinstance(event, JobRestoredEvent):  # a job comes back before its spares do
            self._settle_spares(instructions)
        if instructions.finished:
            self._forget_old_jobs()
        return instructions

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
        return None if job is None else JobRecord(job, self._allocations.of(job_id))

    def _on_job_restored(self, record: JobRecord, instructions: Instructions) -> None:
        job, job_id = record.job, record.job.spec.job_id
        if job_id in self.jobs:
            return
        self.jobs[job_id] = job
        self._submitted = max(self._submitted, job.number)
        if job.spec.spare_for is not None:
            self._spares.restored(job)
        if job.state.finished:
            self._finished[job_id] = None
        elif job.pending:
            self._pending[job_id] = job
        for (position, attempt), allocation in record.allocations.items():
            self._restore_allocation(job, position, attempt, allocation, instructions)
        if job.spec.coscheduling and job.gang.placed:
            self._spares.gang_runs(job)
        self.unrecorded.add(job_id)

    def _restore_allocation(
        self, job: Job, position: int, attempt: int, allocation: Allocation, instructions: Instructions
    ) -> None:
        """Take up what an attempt holds. One that is over is stopped again: nobody may have heard that it is."""
        gang = job.gangs[position]
        current = gang.placed and gang.attempt == attempt
        there = tuple(place for place in allocation if place[0] in self.workers)
        self._allocations.add(job, (position, attempt), there)
        if not current:
            self._allocations.mark_ending(job, (position, attempt))
            reason = gang.error or "the job is over"
            instructions.stop.append(StopAttempt(job.spec.job_id, attempt, reason, job.first_index(position)))
            return
        self._take_slices(job, tuple(node_id for node_id, _, _ in there), instructions)
        lost = next((task for task in gang.tasks if task.node_id not in self.workers), None)
        if lost is not None:
            reason = f"{lost.node_id} was lost while no Controller was there to see it"
            started = any(task.state is not TaskState.ASSIGNED for task in gang.tasks)
            self._on_member_ended(job, position, lost, TaskState.WORKER_FAILED, reason, instructions, started)
            return
        if gang.notice is not None:  # nobody may have heard of it
            instructions.notices.append(NotifyGang(job.spec.job_id, attempt, gang.notice, gang.tasks[0].index))
        self._tell_of_its_hosts(job, gang, instructions)

    def _on_job_cancelled(self, event: JobCancelledEvent, instructions: Instructions) -> None:
        job = self.jobs.get(event.job_id)
        if job is not None and not job.state.finished and job.spec.spare_for is None:  # spares end with their jobs
            self._end_other_gangs(job, None, event.reason, instructions)
            job.error = event.reason
            instructions.finished.append(event.job_id)

    def _on_unschedulable(self, event: TaskUnschedulableEvent, instructions: Instructions) -> None:
        job = self.jobs.get(event.job_id)
        if job is None or job.state.finished:
            return
        gang = job.gangs[self._position(job, event.task_index)]
        if not gang.pending or gang.started:
            return  # it got to run after all
        for task in gang.tasks:
            _move(job, gang, task, TaskState.UNSCHEDULABLE, event.reason)
        self._end_other_gangs(job, gang, f"{gang.tasks[0].task_id} is unschedulable: {event.reason}", instructions)
        job.error = event.reason
        instructions.finished.append(event.job_id)

    def _end_other_gangs(self, job: Job, cause: Gang | None, reason: str, instructions: Instructions) -> None:
        """End all that is not over; attempts that have hosts are to be stopped."""
        for position, gang in enumerate(job.gangs):
            if gang is cause or not (gang.placed or gang.pending):
                continue
            if gang.placed:
                self._end_attempt(job, position, reason, instructions)
            for task in gang.tasks:
                _move(job, gang, task, TaskState.KILLED, reason)
        job.pending.clear()

    def _on_gang_assigned(self, event: GangAssignedEvent, instructions: Instructions) -> None:
        job = self._known(event.job_id)
        config = job.spec.coscheduling
        sizes = {len(group) for group in event.groups}
        equal = len(sizes) == 1 if job.spec.whole_groups else sizes == {job.spec.replicas}
        if config is None or not equal or len(event.groups) not in config.counts:
            raise IllegalTransitionError(f"job {event.job_id}: {event.groups} is no place for its gang")
        node_ids = tuple(node_id for group in event.groups for node_id in group)
        self._require_room(job, 0, node_ids)
        gang = job.gang
        if len(gang.tasks) != len(node_ids):  # another count of slices: another set of tasks
            gang.tasks = _new_tasks(event.job_id, len(node_ids))
            job.counts = Counter({TaskState.PENDING: len(node_ids)})
        self._assign(job, 0, event.group_names, node_ids, instructions)

    def _on_task_assigned(self, event: TaskAssignedEvent, instructions: Instructions) -> None:
        job = self._known(event.job_id)
        if job.spec.coscheduling is not None:
            raise IllegalTransitionError(f"job {event.job_id} is a gang; its tasks are not assigned one by one")
        position = self._position(job, event.task_index)
        self._require_room(job, position, (event.node_id,))
        slice_name = self.workers[event.node_id].slice_name
        self._assign(job, position, (slice_name or event.node_id,), (event.node_id,), instructions)

    def _require_room(self, job: Job, position: int, node_ids: tuple[str, ...]) -> None:
        """The last line of defence against two tasks on one host."""
        gang, who = job.gangs[position], job.spec.job_id
        if job.state.finished or not gang.pending:
            state = gang.tasks[0].state.name
            raise IllegalTransitionError(f"{gang.tasks[0].task_id} is {state}; only what is PENDING is assigned")
        if len(set(node_ids)) != len(node_ids):
            raise IllegalTransitionError(f"job {who}: {node_ids} names a worker twice")
        for node_id in node_ids:
            worker = self.workers.get(node_id)
            if worker is None or not job.requirement.has_room(worker):
                raise IllegalTransitionError(f"job {who}: worker {node_id} is gone or full")

    def _assign(
        self, job: Job, position: int, groups: tuple[str, ...], node_ids: tuple[str, ...], instructions: Instructions
    ) -> None:
        gang = job.gangs[position]
        gang.attempt += 1
        gang.groups = groups
        gang.running_since = math.inf
        allocation = []
        for task, node_id in zip(gang.tasks, node_ids, strict=True):
            allocation.append((node_id, task.task_id, job.requirement.demand(self.workers[node_id])))
            _move(job, gang, task, TaskState.ASSIGNED)
            task.node_id = node_id
        self._allocations.add(job, (position, gang.attempt), tuple(allocation))
        self.unrecorded.add(job.spec.job_id)
        job.pending.pop(position, None)
        if not job.pending:
            self._pending.pop(job.spec.job_id, None)
        self._take_slices(job, node_ids, instructions)
        self._tell_of_its_hosts(job, gang, instructions)
        self._spares.look_at(job)

    def _take_slices(self, job: Job, node_ids: tuple[str, ...], instructions: Instructions) -> None:
        """The job's owner keeps actors on the slices from now on, unless somebody else must let go first."""
        if not job.requirement.chips:
            return
        slices = dict.fromkeys(self.workers[node_id].slice_name for node_id in node_ids)
        for name in filter(None, slices):
            holder = self.holders.get(name)
            if holder is None:
                self.fleet.hold(name, job.spec.owner)
            elif holder != job.spec.owner:  # it stays theirs until they have released it
                instructions.reclaim.append(ReclaimSlice(name, holder))

    def _on_dispatch_failed(self, event: TaskDispatchFailedEvent) -> None:
        found = self._gang_in_attempt(event.job_id, event.task_index, event.attempt)
        if found is None:
            return
        job, position, gang = found
        charges.returns_after_failed_launch(gang, event.now)
        self._requeue(job, position, event.error)

    def _on_gang_moved(self, event: GangMovedEvent) -> None:
        found = self._gang_in_attempt(event.job_id, event.task_index, event.attempt)
        if found is not None:
            job, position, gang = found
            charges.returns_to_move(job, gang, self._now)
            self._requeue(job, position, event.reason)

    def _on_gang_returned(self, event: GangReturnedEvent, instructions: Instructions) -> None:
        """Nothing of it is left to do, wherever it stands by now."""
        job = self.jobs.get(event.job_id)
        if job is None or job.state.finished or job.spec.spare_for is not None:
            return
        position = self._position(job, event.task_index)
        gang = job.gangs[position]
        if event.attempt > gang.attempt or not (gang.placed or gang.pending):
            return
        if gang.placed:
            self._end_attempt(job, position, f"attempt {event.attempt} has returned all results", instructions)
        for task in gang.tasks:
            for state in _WAY_TO_SUCCESS[task.state]:
                _move(job, gang, task, state)
        job.pending.pop(position, None)
        if not job.pending:
            self._pending.pop(event.job_id, None)
        self.queue_version += 1
        self.unrecorded.add(event.job_id)
        self._spares.look_at(job)
        if job.state.finished:
            instructions.finished.append(event.job_id)

    def _on_task_state_changed(self, event: TaskStateChangedEvent, instructions: Instructions) -> None:
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
                self._on_member_ended(job, position, task, event.new_state, error, instructions, started=True)
            case TaskState.SUCCEEDED:
                if job.spec.spare_for is not None:
                    raise IllegalTransitionError(f"{task.task_id} only holds a slice; it has nothing to return")
                if task.state is TaskState.ASSIGNED:  # the RUNNING report may be late or lost
                    _move(job, gang, task, TaskState.RUNNING)
                _move(job, gang, task, TaskState.SUCCEEDED)
                gang.started = True
                gang.running_since = min(gang.running_since, self._now)
                self.unrecorded.add(event.job_id)
                self._spares.look_at(job)
                if gang.succeeded == len(gang.tasks):
                    self._mark_ending(job, position)
                if job.state.finished:
                    instructions.finished.append(job.spec.job_id)
            case TaskState.RUNNING:
                if task.state is not TaskState.SUCCEEDED:  # else a late report
                    _move(job, gang, task, TaskState.RUNNING)
                    gang.dispatch_failures = 0
                    gang.started = True
                    gang.running_since = min(gang.running_since, self._now)
                    self.unrecorded.add(event.job_id)
                    if job.spec.coscheduling and job.counts[TaskState.RUNNING] == len(gang.tasks):
                        self._on_gang_runs(job, gang, instructions)
            case _:
                raise IllegalTransitionError(f"{task.task_id}: a task does not report {event.new_state.name}")

    def _on_member_ended(
        self,
        job: Job,
        position: int,
        cause: Task,
        state: TaskState,
        error: str,
        instructions: Instructions,
        started: bool,
    ) -> None:
        """One member's end is the gang's: charge one budget once, then requeue everybody or end the gang."""
        gang = job.gangs[position]
        self.unrecorded.add(job.spec.job_id)
        gang.started = gang.started or started
        if started:
            charges.count_quick_end(gang, self._now)
            if charges.is_its_own_doing(gang, cause, self.workers.get(cause.node_id or "")):
                state = TaskState.FAILED
        exhausted = charges.charge(job, gang, state, started)
        self._end_attempt(job, position, error, instructions)
        if not exhausted:
            charges.returns_after_end(job, gang, state, started, self._now)
            self._requeue(job, position, error)
            return
        job.error = gang.error = error
        _move(job, gang, cause, state, error)
        for sibling in gang.tasks:
            if sibling is not cause:
                reason = f"{cause.task_id} ended the gang: {error}"
                _move(job, gang, sibling, TaskState.COSCHED_FAILED, reason)
        if job.state.finished:
            self._end_other_gangs(job, gang, f"{cause.task_id} ended the job: {error}", instructions)
            instructions.finished.append(job.spec.job_id)

    def _end_attempt(self, job: Job, position: int, reason: str, instructions: Instructions) -> None:
        gang = job.gangs[position]
        if gang.placed:  # else all has returned, and is lost now
            instructions.stop.append(StopAttempt(job.spec.job_id, gang.attempt, reason, gang.tasks[0].index))
        self._mark_ending(job, position)

    def _requeue(self, job: Job, position: int, error: str) -> None:
        self._mark_ending(job, position)
        gang = job.gangs[position]
        job.error = gang.error = error
        self._spares.look_at(job)
        for task in gang.tasks:
            _move(job, gang, task, TaskState.PENDING, error)
            task.node_id = None
        job.pending[position] = None
        self._pending[job.spec.job_id] = job
        self.queue_version += 1
        self.unrecorded.add(job.spec.job_id)

    def _on_pool_restarted(self, owner: str, instructions: Instructions) -> None:
        """Its gangs start again, those included whose results nobody has had yet.

        Nobody can say what the process died of. It lives beside the driver, not on the gang's hosts, so to a gang that
        is a preemption, also if its results had come: a job whose results don't fit into memory must not be tried for
        ever. A gang to which it happens several times in a row, within seconds after its start, is charged failures,
        like one that loses tasks on hosts that are there: a machine short of memory would not wait for that moment.
        """
        reason = "the process of its SlicePoolManager died"
        for end in self.attempts_of(owner):
            job = self.jobs.get(end.job_id)
            if job is None or job.spec.spare_for is not None:
                continue  # dropped with its parent's attempt
            found = self._gang_in_attempt(end.job_id, end.task_index, end.attempt)
            if found is not None:
                _, position, gang = found
                started = any(task.state is not TaskState.ASSIGNED for task in gang.tasks)
                cause = next(task for task in gang.tasks if task.state is not TaskState.SUCCEEDED)
                self._on_member_ended(job, position, cause, TaskState.WORKER_FAILED, reason, instructions, started)
                self._spares.look_at(job)
            self._on_end_confirmed(end)
        for job in self.jobs_of(owner):
            for position, gang in enumerate(job.gangs):
                if gang.succeeded == len(gang.tasks) and not job.state.finished:
                    lost = "its results were lost: " + reason
                    self._on_member_ended(
                        job, position, gang.tasks[0], TaskState.WORKER_FAILED, lost, instructions, True
                    )
        self._settle_spares(instructions)  # before it is seen who is still on the slices
        for name in [name for name, holder in self.holders.items() if holder == owner]:
            self._on_slice_released(SliceReleasedEvent(name, owner))

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
        if self._allocations.end(job, (position, event.attempt)):
            self.unrecorded.add(event.job_id)

    def _mark_ending(self, job: Job, position: int) -> None:
        gang = job.gangs[position]
        gang.notice = None
        self._allocations.mark_ending(job, (position, gang.attempt))

    def _forget_old_jobs(self) -> None:
        excess = len(self._finished) - FINISHED_JOBS_KEPT
        if excess > 0:
            for job_id in list(islice(self._finished, excess)):
                if not self._allocations.of(job_id):
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

    def _on_worker_registered(self, event: WorkerRegisteredEvent, instructions: Instructions) -> None:
        self.fleet.register(
            Worker(
                event.node_id,
                event.address,
                event.attributes,
                event.resources,
                None,
                event.foreign,
                reported=event.attributes,
            )
        )
        if event.draining:
            drained = WorkerDrainedEvent(event.node_id, event.draining, deadline=event.deadline)
            self._on_worker_drained(drained, instructions)

    def _on_worker_drained(self, event: WorkerDrainedEvent, instructions: Instructions) -> None:
        """The worker takes nothing new. Gangs on it are told, once, and get replacements."""
        worker = self.workers.get(event.node_id)
        if worker is None:
            return
        known, deadline = worker.notice, event.deadline
        if deadline is None:
            deadline = self._now + NOTICE_S if known is None else known.deadline
        place = f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"
        notice = Notice(event.kind, f"{place}: {event.reason}", deadline)
        is_final = event.kind is not NoticeKind.MAINTENANCE
        if is_final and (worker.final is None or not is_as_urgent(worker.final[1], event.deadline)):
            worker.final = event.reason, notice
        if known is not None and is_as_urgent(known, event.deadline):
            return
        self.fleet.put(replace(worker, draining=event.reason, notice=notice))
        for task_id, attempt in worker.occupants:
            found = self._gang_in_attempt(job_of(task_id), index_of(task_id), attempt)
            if found is not None:
                job, _, gang = found
                self._spares.look_at(job)
                self._notify(job, gang, notice, instructions)

    def _on_maintenance_called_off(self, event: MaintenanceCalledOffEvent, instructions: Instructions) -> None:
        """The worker is as it was, unless it is to go anyway. Who was told keeps it, and hears of what is left.

        Gangs may know of the maintenance though the worker does not: from their records.
        """
        worker = self.workers.get(event.node_id)
        if worker is None:
            return
        if worker.notice is not None and worker.notice.kind is NoticeKind.MAINTENANCE:
            draining, notice = worker.final or (None, None)
            self.fleet.put(replace(worker, draining=draining, notice=notice))
        for task_id, attempt in worker.occupants:
            found = self._gang_in_attempt(job_of(task_id), index_of(task_id), attempt)
            if found is not None:
                job, _, gang = found
                self._spares.look_at(job)
                self._look_again_at_notice(job, gang, instructions)

    def _look_again_at_notice(self, job: Job, gang: Gang, instructions: Instructions) -> None:
        """The maintenance that a gang was told of may be called off, or be that of another of its hosts."""
        told = gang.notice
        if told is None or told.kind is not NoticeKind.MAINTENANCE:
            return
        hosts = (self.workers.get(task.node_id or "") for task in gang.tasks)
        left = [worker.notice for worker in hosts if worker is not None and worker.notice is not None]
        if any((notice.kind, notice.deadline) == (told.kind, told.deadline) for notice in left):
            return
        gang.notice = None
        self.unrecorded.add(job.spec.job_id)
        if left:
            self._notify(job, gang, min(left, key=lambda notice: notice.deadline), instructions)

    def _notify(self, job: Job, gang: Gang, notice: Notice, instructions: Instructions) -> None:
        """Tell a gang that it is to move, unless it knows of something that is as urgent; not spares, which go."""
        known = gang.notice
        if known is not None and known.kind is not NoticeKind.GROWTH and is_as_urgent(known, notice.deadline):
            return
        if job.spec.spare_for is not None:
            return
        gang.notice = notice
        self.unrecorded.add(job.spec.job_id)
        instructions.notices.append(NotifyGang(job.spec.job_id, gang.attempt, notice, gang.tasks[0].index))

    def _tell_of_its_hosts(self, job: Job, gang: Gang, instructions: Instructions) -> None:
        """Some of them may have had notice before the gang came there, or before its record was read."""
        for task in gang.tasks:
            worker = self.workers.get(task.node_id or "")
            if worker is not None and worker.notice is not None:
                self._notify(job, gang, worker.notice, instructions)

    def _on_worker_blamed(self, event: WorkerBlamedEvent) -> None:
        if event.node_id not in self.workers:
            return
        job = self.jobs.get(event.job_id)
        blame = Blame(event.node_id, job.spec.user if job else event.job_id, event.by_user_code, self._now)
        if (taint := self._blames.add(blame, event.reason)) is not None:
            self.fleet.taint(event.node_id, QUARANTINE, taint)
        for node_id, taint in self._blames.acquitted().items():
            if self.fleet.taints.get(node_id, {}).get(QUARANTINE) == taint:
                self.fleet.lift_taint(node_id, QUARANTINE)

    # -- spares ----------------------------------------------------------------------------------------------------

    def _on_gang_runs(self, job: Job, gang: Gang, instructions: Instructions) -> None:
        """All its tasks run."""
        if len(gang.groups) >= gang.groups_wanted:
            gang.groups_wanted = 0
        self._spares.gang_runs(job)
        spare_for = job.spec.spare_for
        if spare_for is not None and spare_for.purpose is SparePurpose.GROWTH:
            parent = self.jobs[spare_for.job_id]
            have = len(parent.gang.groups)
            reason = f"{have + len(gang.groups)} slices are there for it instead of {have}"
            self._notify(
                parent, parent.gang, Notice(NoticeKind.GROWTH, reason, self._now + GROWTH_NOTICE_S), instructions
            )

    def _settle_spares(self, instructions: Instructions) -> None:
        """Make the spares that jobs need now, and drop those that they don't. Who can't grow any more need not move."""
        for job, superfluous, missing in self._spares.changes(self.jobs, self.workers, self._now):
            for spare in superfluous:
                self._drop_spare(spare, instructions)
            for spec in missing:
                assert spec.spare_for is not None
                self._on_job_submitted(JobSubmittedEvent(spec, self._now))
                self.unrecorded.add(spec.spare_for.job_id)  # it counts them
                gang = self.jobs[spec.job_id].gang
                gang.started = True  # its job did; so it waits, whatever happens, and is never given up
                if spec.spare_for.purpose is SparePurpose.REPLACEMENT:
                    gang.returning_until = math.inf
            if job is not None and job.gang.is_to_grow and not self._spares.room_is_ready(job, self.jobs):
                job.gang.notice = None  # its pool asks before it moves
                self.unrecorded.add(job.spec.job_id)

    def _drop_spare(self, spare: Job, instructions: Instructions) -> None:
        """Nothing runs on what it holds, so that is free at once. Its owner keeps it warm."""
        job_id = spare.spec.job_id
        if spare.gang.placed:
            instructions.dropped.append(DropSpare(job_id, spare.spec.owner))
        for key in list(self._allocations.of(job_id)):
            self._allocations.end(spare, key)
        del self.jobs[job_id]
        self._pending.pop(job_id, None)
        self.queue_version += 1
        self.unrecorded.add(job_id)

    def _on_worker_failed(self, event: WorkerFailedEvent, instructions: Instructions) -> None:
        worker = self.workers.get(event.node_id)
        if worker is None:
            return
        self.fleet.remove(event.node_id)
        for task_id, attempt in worker.occupants:
            self._allocations.let_go(self.jobs[job_of(task_id)], event.node_id, task_id, attempt)
            self.unrecorded.add(job_of(task_id))
            found = self._gang_in_attempt(job_of(task_id), index_of(task_id), attempt)
            if found is not None:
                job, position, gang = found
                task = next(task for task in gang.tasks if task.task_id == task_id)
                started = any(t.state in (TaskState.RUNNING, TaskState.SUCCEEDED) for t in gang.tasks)
                self._on_member_ended(job, position, task, TaskState.WORKER_FAILED, event.reason, instructions, started)

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
            for job_id, (position, attempt) in self._allocations
            if self.jobs[job_id].spec.owner == owner
        ]

    def holds_capacity(self, job_id: str, attempt: int, task_index: int = 0) -> bool:
        """Whether the attempt's end is still to be confirmed."""
        job = self.jobs.get(job_id)
        return job is not None and (job.position_of(task_index), attempt) in self._allocations.of(job_id)

    def knows(self, worker: WorkerRegisteredEvent) -> bool:
        """Whether this registration would change nothing."""
        known = self.workers.get(worker.node_id)
        heard = known is not None and known.final is not None and is_as_urgent(known.final[1], worker.deadline)
        if known is not None and (worker.draining is None or heard):
            worker = replace(worker, draining=known.draining)
        return known is not None and (
            known.address, known.reported, known.resources, known.draining, known.foreign
        ) == (worker.address, worker.attributes, worker.resources, worker.draining, worker.foreign)  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken. For tests; every test that touches state ends with it."""
        check_state(self.jobs, self.fleet, self.usage, self._allocations.all_of(), self._pending, self._finished)
        self._spares.check(self.jobs)


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


def apply_all(state: ControllerState, events: Iterable[Event], total: Instructions | None = None) -> Instructions:
    """Apply several events in order and gather their instructions. One that is refused does not stop the others."""
    total = Instructions() if total is None else total
    for event in events:
        try:
            instructions = state.handle_event(event)
        except IllegalTransitionError:
            logger.exception("refused %s", event)
            continue
        total.add(instructions)
    return total
