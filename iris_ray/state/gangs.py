"""Gangs that get hosts, run and succeed; and the owners of slices."""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.jobs import Allocation, Gang, Job, Task
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.parts import is_on_slices
from iris_ray.state import job_table, quarantine
from iris_ray.state.attempt_ends import AttemptEnds, has_begun
from iris_ray.state.events import (
    GangAssignedEvent,
    GroupAssignedEvent,
    JobAssignedEvent,
    TasksAssignedEvent,
    TaskStateChangedEvent,
)
from iris_ray.state.fleet import Allocations, Fleet
from iris_ray.state.growth import note_size
from iris_ray.state.instructions import Change, NotifyGang, ReclaimSlice, StopAttempt
from iris_ray.state.job_table import JobTable, move, new_gangs
from iris_ray.state.promises import Promises
from iris_ray.state.records import JobRecord
from iris_ray.state.runtime_limits import RuntimeLimits
from iris_ray.state.spares import GangNotices, SpareJobs

_Placement = tuple[list[tuple[Gang, tuple[str, ...]]], tuple[str, ...]]
"""Gangs with the node ids of their hosts, and the names of the groups that the hosts belong to."""
_Taken = dict[str, dict[str, float]]
"""Node id → resources."""


class SliceHolders:
    """Maintains `Fleet.holders`, the owner of actors on each slice, as jobs take slices and owners release them."""

    def __init__(self, table: JobTable, fleet: Fleet) -> None:
        self._table = table
        self._fleet = fleet

    def take(self, job: Job, groups: tuple[str, ...], change: Change) -> None:
        """Make the job's owner the holder of its slices or parts, or instruct the present holders to release them.

        A slice can't be held together with a part of it, by the same owner either, nor parts that share hosts.
        """
        if not job.requirement.chips:
            return
        for name in groups:
            held = self._fleet.holders
            for other in self._fleet.held_on(name):
                if other != name or held[other] != job.spec.owner:  # it stays the holder until it has released it
                    change.instructions.reclaim.append(ReclaimSlice(other, held[other], name))
            if name not in held:
                self._fleet.hold(name, job.spec.owner)

    def held(self, slice_name: str, owner: str) -> None:
        """Record that an owner holds a slice, unless another owner does."""
        if slice_name not in self._fleet.holders:
            self._fleet.hold(slice_name, owner)

    def released(self, slice_name: str, owner: str) -> None:
        """Record that an owner has released a slice. The owner of a job placed there since becomes the holder."""
        if self._fleet.holders.get(slice_name) != owner:
            return
        next_owner = None
        for worker in self._fleet.slice_workers(slice_name):
            for _, attempt in worker.occupants:
                job = self._table.jobs[attempt.job_id]
                gang = job.gangs[attempt.gang]
                runs_here = gang.attempt == attempt.number and gang.placed and slice_name in gang.groups
                if runs_here and job.requirement.chips:
                    next_owner = job.spec.owner
        self._fleet.hold(slice_name, next_owner)

    def released_all(self, owner: str) -> None:
        """Record that an owner has released all its slices."""
        for name in [name for name, holder in self._fleet.holders.items() if holder == owner]:
            self.released(name, owner)


class Gangs:
    """Assigns gangs to hosts and takes the reports of their tasks."""

    def __init__(
        self,
        table: JobTable,
        fleet: Fleet,
        allocations: Allocations,
        ends: AttemptEnds,
        notices: GangNotices,
        holders: SliceHolders,
        spares: SpareJobs,
        promises: Promises,
        runtimes: RuntimeLimits,
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._allocations = allocations
        self._ends = ends
        self._runtimes = runtimes
        self._notices = notices
        self._holders = holders
        self._spares = spares
        self._promises = promises

    # -- assigning -------------------------------------------------------------------------------------------------

    def group_assigned(self, event: GroupAssignedEvent, change: Change) -> None:
        """Assign hosts to all jobs of a group, or refuse the whole assignment.

        Raises:
            IllegalTransitionError: a job or gang of the group is missing, or an assigned host isn't available.
        """
        leader = self._table.known(event.job_id)
        given: Counter[tuple[str, int]] = Counter()
        for one in event.assignments:
            positions = one.task_indices if isinstance(one, TasksAssignedEvent) else (one.gang,)
            given.update((one.job_id, position) for position in positions)
        if given != Counter((job.spec.job_id, i) for job in leader.members for i in range(len(job.gangs))):
            raise IllegalTransitionError(f"job {event.job_id} stands for a group, which starts as a whole")
        taken: _Taken = {}
        checked = [(one, self._checked(one, taken)) for one in event.assignments]
        sizes = {(one.job_id, len(node_ids)) for one, (placed, _) in checked for _, node_ids in placed}
        if len(sizes) > len(leader.members):
            raise IllegalTransitionError(f"job {event.job_id}: a job of its group gets slices of several sizes")
        for one, placement in checked:
            self._place(one, placement, change)

    def assigned(self, event: JobAssignedEvent, change: Change) -> None:
        """Assign hosts to all tasks of a gang, or a host to independent tasks, or refuse the whole assignment."""
        self._place(event, self._checked(event), change)

    def _checked(self, event: JobAssignedEvent, taken: _Taken | None = None) -> _Placement:
        """Validate an assignment. Return the gangs with their hosts, and the names of their groups.

        Args:
            event: the assignment.
            taken: resources assigned to other jobs of the group, to which this assignment's are added; None for a job
                outside a group.

        Raises:
            IllegalTransitionError: the assignment isn't possible.
        """
        job = self._table.known(event.job_id)
        if job.forms_group and taken is None:
            raise IllegalTransitionError(f"job {event.job_id} gets hosts together with all of its group, or none")
        if isinstance(event, GangAssignedEvent):
            return self._checked_gang(job, event, taken)
        return self._checked_tasks(job, event, taken)

    def _place(self, event: JobAssignedEvent, placement: _Placement, change: Change) -> None:
        job, (placed, groups) = self._table.jobs[event.job_id], placement
        if len(placed[0][0].tasks) != len(placed[0][1]):  # another number or size of slices
            self._resize(job, len(placed[0][1]))
        self._assign(job, placed, groups, event.lent_by, change)

    def _checked_gang(self, job: Job, event: GangAssignedEvent, taken: _Taken | None) -> _Placement:
        config, gang = job.spec.coscheduling, self._table.gang(job, event.gang)
        sizes = {len(group) for group in event.groups}
        equal = len(sizes) == 1 if job.spec.whole_groups else sizes == {job.spec.replicas}
        if config is None or not equal or len(event.groups) not in job.spec.groups_per_gang:
            raise IllegalTransitionError(f"job {event.job_id}: {event.groups} does not fit its gang")
        self._require_groups(event, config.group_by)
        groups = _numbered(gang, event, keep_hosts=not is_on_slices(config.group_by))
        node_ids = tuple(node_id for group in groups.values() for node_id in group)
        self._require_pending(job, gang)
        if len(set(node_ids)) != len(node_ids):
            raise IllegalTransitionError(f"job {event.job_id}: {node_ids} names a worker twice")
        for node_id in node_ids:
            self._require_room(job, node_id, taken=taken)
        if len(gang.tasks) != len(node_ids) and job.attempt and len(job.gangs) > 1:
            raise IllegalTransitionError(f"job {event.job_id}: its other slices have {len(gang.tasks)} hosts each")
        return [(gang, node_ids)], tuple(groups)

    def _resize(self, job: Job, size: int) -> None:
        """Change the number of tasks in each gang of a job, all of which are pending."""
        for gang, tasks in zip(job.gangs, new_gangs(job.spec.job_id, len(job.gangs), size), strict=True):
            gang.tasks = tasks
        job.counts = Counter({TaskState.PENDING: len(job.gangs) * size})
        self._table.all_changed(job)

    def _checked_tasks(self, job: Job, event: TasksAssignedEvent, taken: _Taken | None) -> _Placement:
        if job.spec.coscheduling is not None:
            raise IllegalTransitionError(f"job {event.job_id} is a gang; its tasks are not assigned one by one")
        if not event.task_indices or len({*event.task_indices}) != len(event.task_indices):
            raise IllegalTransitionError(f"job {event.job_id}: {event.task_indices} names a task twice, or none")
        gangs = [self._table.gang(job, index) for index in event.task_indices]
        for gang in gangs:
            self._require_pending(job, gang)
        self._require_room(job, event.node_id, len(gangs), taken)
        slice_name = self._fleet.workers[event.node_id].slice_name
        return [(gang, (event.node_id,)) for gang in gangs], (slice_name or event.node_id,)

    def _require_groups(self, event: GangAssignedEvent, group_by: str) -> None:
        """Refuse an assignment unless each group's hosts belong to the group of that name, and all names differ."""
        names, grouping = event.group_names, self._fleet.grouping(group_by)
        if len(set(names)) != len(event.groups) or len(names) != len(event.groups):
            raise IllegalTransitionError(f"job {event.job_id}: {names} does not name {len(event.groups)} groups")
        for name, node_ids in zip(names, event.groups, strict=True):
            for node_id in node_ids:
                worker = self._fleet.workers.get(node_id)
                if worker is not None and grouping.name_of(worker) != name:
                    raise IllegalTransitionError(f"job {event.job_id}: worker {node_id} is not of {group_by} {name}")

    def _require_pending(self, job: Job, gang: Gang) -> None:
        if job.state.finished or not gang.pending:
            state = gang.tasks[0].state.name
            raise IllegalTransitionError(f"{gang.tasks[0].task_id} is {state}; only PENDING tasks are assigned")

    def _require_room(self, job: Job, node_id: str, tasks: int = 1, taken: _Taken | None = None) -> None:
        """Refuse an assignment to a host that is lost or full, as a last check against overcommitted hosts."""
        worker, need = self._fleet.workers.get(node_id), job.requirement
        if worker is not None:
            demand = need.demand(worker)
            others = {r: amount * (tasks - 1) for r, amount in demand.items()} if tasks > 1 else None
            if taken is not None:
                before, more = taken.get(node_id, {}), others or {}
                others = {r: before.get(r, 0.0) + more.get(r, 0.0) for r in {**before, **demand}}
                taken[node_id] = {r: amount + demand.get(r, 0.0) for r, amount in others.items()}
            if need.has_room(worker, others):
                return
        raise IllegalTransitionError(f"job {job.spec.job_id}: worker {node_id} is gone or full")

    def _assign(
        self,
        job: Job,
        placed: Sequence[tuple[Gang, tuple[str, ...]]],
        groups: tuple[str, ...],
        lent_by: Collection[str],
        change: Change,
    ) -> None:
        """Assign hosts, all in the same groups, to gangs of a job. ``lent_by``: see `GangAssignedEvent`."""
        allocations = dict[AttemptId, Allocation]()
        hosts = tuple(dict.fromkeys(node_id for _, node_ids in placed for node_id in node_ids))
        demands = {node_id: job.requirement.demand(self._fleet.workers[node_id]) for node_id in hosts}
        for gang, node_ids in placed:
            gang.attempt += 1
            job.attempt = max(job.attempt, gang.attempt)
            gang.groups = groups
            gang.running_since = math.inf
            found = []
            for task, node_id in zip(gang.tasks, node_ids, strict=True):
                found.append((node_id, task.task_id, demands[node_id]))
                move(job, gang, task, TaskState.ASSIGNED)
                task.node_id = node_id
            allocations[job.current_attempt(gang)] = tuple(found)
        self._table.dequeue(job, *(gang for gang, _ in placed))
        self._allocations.add(job, allocations)
        for allocation in allocations.values():
            job_table.note_assigned(job, allocation, change.now)
        returns = any(change.now < gang.returning_until for gang, _ in placed)
        self._promises.kept_by(job, hosts, lent_by, returns)
        self._holders.take(job, groups, change)
        for gang, _ in placed:
            self._notices.tell_host_notices(job, gang, change)
            self._runtimes.placed(job, gang, change)
        self._spares.look_at(job)

    # -- running ---------------------------------------------------------------------------------------------------

    def task_reported(self, event: TaskStateChangedEvent, change: Change) -> None:
        """Apply a task's report. Reports about attempts that are not live have no effect."""
        found = self._table.live(event.attempt)
        if found is None:
            return
        job, gang = found
        task = _task(event, gang)
        if task.state is event.new_state:
            return  # a duplicate
        match event.new_state:
            case TaskState.FAILED | TaskState.WORKER_FAILED:
                if task.state is TaskState.SUCCEEDED and event.new_state is TaskState.FAILED:
                    raise IllegalTransitionError(f"{task.task_id}: SUCCEEDED → FAILED")
                error = event.error or "unknown cause"
                if event.new_state is TaskState.WORKER_FAILED and not has_begun(gang):
                    self._ends.lost_before_start(job, gang, error, change)
                    return
                self._ends.member_ended(
                    job,
                    gang,
                    task,
                    event.new_state,
                    error,
                    change,
                    started=True,
                    exit_code=event.exit_code,
                    is_hopeless=event.is_hopeless and not job.started,
                    is_hang=event.is_hang,
                )
            case TaskState.SUCCEEDED:
                self._succeeded(job, gang, task, change)
            case TaskState.RUNNING:
                if task.state is not TaskState.SUCCEEDED:  # otherwise a late report
                    self._runs(job, gang, task, change)
            case _:
                raise IllegalTransitionError(f"{task.task_id}: a task does not report {event.new_state.name}")

    def _runs(self, job: Job, gang: Gang, task: Task, change: Change) -> None:
        move(job, gang, task, TaskState.RUNNING)
        task.started_at = change.now
        self._has_started(job, gang, change)
        if job.spec.is_one_gang and job.counts[TaskState.RUNNING] == len(gang.tasks):
            note_size(job, change.now)
            if len(gang.groups) >= gang.groups_wanted:
                gang.groups_wanted = 0
            self._spares.gang_runs(job)

    def _succeeded(self, job: Job, gang: Gang, task: Task, change: Change) -> None:
        if job.spec.spare_for is not None:
            raise IllegalTransitionError(f"{task.task_id} only holds a slice; it has nothing to return")
        if task.state is TaskState.ASSIGNED:  # the RUNNING report may be late or lost
            move(job, gang, task, TaskState.RUNNING)
        move(job, gang, task, TaskState.SUCCEEDED)
        job_table.note_task_success(task, change.now)
        self._has_started(job, gang, change)
        if gang.succeeded in (1, len(gang.tasks)):  # other successes don't change the need for spares
            self._spares.look_at(job)
        if gang.succeeded == len(gang.tasks):
            self._ends.mark_ending(job, gang, change.now)
        if job.state.finished:
            change.instructions.finished.append(job.spec.job_id)

    def _has_started(self, job: Job, gang: Gang, change: Change) -> None:
        if gang.running_since == math.inf:
            gang.running_since = change.now
            gang.dispatch_failures = 0
            quarantine.forgive(job, gang)
        job.started = True
        if job.began_at == math.inf:
            job.began_at = change.now
            self._runtimes.began(job)
        job_table.note_began(job, change.now)
        self._table.gang_changed(job, gang)

    # -- coming back -----------------------------------------------------------------------------------------------

    def job_restored(self, record: JobRecord, change: Change) -> None:
        """Restore a job and its attempts' resources from an earlier Controller's record."""
        job = record.job
        if job.spec.job_id in self._table.jobs:
            return
        self._table.restore(job)
        self._runtimes.began(job)
        self._promises.restored(job, self._fleet.workers)
        if job.spec.spare_for is not None:
            self._spares.restored(job)
        for attempt, allocation in record.allocations.items():
            self._restore_allocation(job, attempt, allocation, change)
        if job.spec.is_one_gang and job.gang.placed:
            self._spares.placed_again(job)

    def _restore_allocation(self, job: Job, attempt: AttemptId, allocation: Allocation, change: Change) -> None:
        """Restore an attempt's resources. An attempt that has ended is stopped again, in case its pool missed it."""
        gang, workers = job.gangs[attempt.gang], self._fleet.workers
        there = tuple(place for place in allocation if place[0] in workers)
        self._allocations.add(job, {attempt: there})
        if not gang.placed or gang.attempt != attempt.number:
            self._allocations.mark_ending(attempt, change.now)
            change.instructions.stop.append(StopAttempt(attempt, gang.error or "the job is over"))
            return
        self._holders.take(job, gang.groups, change)
        lost = next((task for task in gang.tasks if task.node_id not in workers), None)
        if lost is not None:
            reason = f"{lost.node_id} was lost while no Controller was there to see it"
            self._ends.member_ended(job, gang, lost, TaskState.WORKER_FAILED, reason, change, has_begun(gang))
            return
        if gang.notice is not None:  # its pool may not have the notice
            change.instructions.notices.append(NotifyGang(attempt, gang.notice))
        self._notices.tell_host_notices(job, gang, change)


def _numbered(gang: Gang, event: GangAssignedEvent, keep_hosts: bool) -> dict[str, tuple[str, ...]]:
    """Return an assignment's groups by name, in the order of their numbers.

    ``keep_hosts`` also keeps the numbers of hosts within their groups; for a slice, Google assigns these.
    """
    groups, before = dict(zip(event.group_names, event.groups, strict=True)), dict(gang.last_ran)
    if keep_hosts:
        groups |= {name: tuple(keep_positions(before.get(name, ()), hosts)) for name, hosts in groups.items()}
    return {name: groups[name] for name in keep_positions(list(before), event.group_names)}


def keep_positions(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the names of ``now``, ordered so that as many as possible keep their positions in ``before``.

    New names, and names whose position no longer exists, fill the free positions.
    """
    places = {name: place for place, name in enumerate(before) if place < len(now)}
    stay = {places[name]: name for name in now if name in places}
    others = (name for name in now if name not in places)
    return [stay[place] if place in stay else next(others) for place in range(len(now))]


def _task(event: TaskStateChangedEvent, gang: Gang) -> Task:
    index = event.task_index - gang.tasks[0].index
    if not 0 <= index < len(gang.tasks):
        raise IllegalTransitionError(f"{event.attempt} has no task {event.task_index}")
    return gang.tasks[index]
