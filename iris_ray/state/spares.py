"""Spares: slices held ready for a running gang, to replace slices that are lost or about to be lost, or for growth.

Each spare is a separate job without a function, which waits in the queue like other jobs. Once it is placed, the pool
of the gang's job reserves the slices and starts processes that wait there. When the gang is requeued, its spares are
dropped. Their slices are then the gang's first choice, since its pool keeps them warm.
"""

import heapq
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from iris_ray.model.job_spec import CoschedulingConfig, JobSpec, SpareFor, SparePurpose
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.notices import GROWTH_NOTICE_S, NOTICE_S, HostNotice, Notice, NoticeKind, is_news
from iris_ray.model.workers import Worker
from iris_ray.state.events import MaintenanceCalledOffEvent, WorkerDrainedEvent
from iris_ray.state.fleet import Allocations, Fleet
from iris_ray.state.growth import patience_s
from iris_ray.state.instructions import Change, DropSpare, NotifyGang
from iris_ray.state.job_table import JobTable

Need = tuple[SparePurpose, tuple[int, ...]]
"""The purpose of a spare, and the slice counts that satisfy the need."""

NO_LIMIT = 1_000_000_000


class Spares:
    """The spares of all jobs, and the jobs whose need for spares may have changed. `SpareJobs` makes the spares."""

    def __init__(self) -> None:
        self._of: dict[str, list[str]] = {}  # job id → ids of its spares
        self._restless: dict[str, None] = {}  # ids of jobs whose need for spares may have changed
        self._standing_in: dict[str, int] = {}  # job id → number of its spares that replace slices about to be lost
        self._may_grow: list[tuple[float, str]] = []  # a heap: when a running gang may grow, and its job's id
        self._next_look: dict[str, float] = {}  # job id → the time of its next check

    @property
    def are_settled(self) -> bool:
        """Whether no job's need for spares may have changed."""
        return not self._restless

    def look_at(self, job: Job) -> None:
        """Record that a job or its hosts have changed, and perhaps its need for spares; for a spare, its parent's."""
        if job.spec.spare_for is not None:
            self._restless[job.spec.spare_for.job_id] = None
        elif job.spec.is_one_gang:
            self._restless[job.spec.job_id] = None

    def gang_runs(self, job: Job) -> None:
        """Record that all tasks of a job run."""
        self.look_at(job)
        if job.spec.spare_for is None and _has_room_to_grow(job):
            after = job.spec.grow_after
            if isinstance(after, str):
                self.look_again(job, job.gang.asks_at)
            elif after is not None:
                self.look_again(job, job.gang.running_since + after)

    def look_again(self, job: Job, at: float) -> None:
        """Schedule the next check of a job's growth and need for spares."""
        if self._next_look.get(job.spec.job_id) != at:
            self._next_look[job.spec.job_id] = at
            heapq.heappush(self._may_grow, (at, job.spec.job_id))

    @property
    def next_look_at(self) -> float:
        """The time of the next growth check; infinite if none is due."""
        return self._may_grow[0][0] if self._may_grow else math.inf

    def time_passed(self, now: float) -> None:
        """Mark the jobs whose growth check is due."""
        while self._may_grow and self._may_grow[0][0] <= now:
            at, job_id = heapq.heappop(self._may_grow)
            if self._next_look.get(job_id) == at:
                del self._next_look[job_id]
            self._restless[job_id] = None

    def restored(self, spare: Job) -> None:
        """Add a restored spare."""
        assert spare.spec.spare_for is not None
        self._of.setdefault(spare.spec.spare_for.job_id, []).append(spare.spec.job_id)
        self.look_at(spare)

    def forget(self, spare: Job) -> None:
        """Remove a dropped spare."""
        assert spare.spec.spare_for is not None
        parent_id = spare.spec.spare_for.job_id
        self._of[parent_id].remove(spare.spec.job_id)
        if not self._of[parent_id]:
            del self._of[parent_id]

    def dispensable(self, jobs: Mapping[str, Job]) -> list[Job]:
        """Return the spares that hold slices and could release them.

        This excludes spares that replace slices about to be lost. Without such a spare, a replacement would be made,
        which precedes all jobs, and the next spare would make the replacement superfluous again.
        """
        found: list[Job] = []
        for job_id, ids in self._of.items():
            placed = [spare for spare in map(jobs.__getitem__, ids) if spare.gang.placed]
            if needed := self._standing_in.get(job_id, 0):
                needed_ids = [spare.spec.job_id for spare in placed if is_for(spare, SparePurpose.SPARE)][:needed]
                placed = [spare for spare in placed if spare.spec.job_id not in needed_ids]
            found += placed
        return found

    def changes(
        self, jobs: Mapping[str, Job], workers: Mapping[str, Worker], now: float
    ) -> Iterator[tuple[Job | None, list[Job], list[JobSpec]]]:
        """Yield each changed job (None if forgotten) with its superfluous spares and the specs of its missing ones."""
        restless, self._restless = self._restless, {}
        for job_id in restless:
            job = jobs.get(job_id)
            known = self._of.pop(job_id, ())
            spares = [jobs[spare_id] for spare_id in known if spare_id in jobs]  # other spares were evicted
            sound = sum(is_for(spare, SparePurpose.SPARE) and holds_ready(spare, workers) for spare in spares)
            doomed = 0 if job is None else doomed_groups(job, workers)
            needs = [] if job is None else spares_needed(job, doomed, sound, now)
            self._note_standing_in(job_id, min(sound, doomed))
            kept, superfluous, unmet = _sort_out(spares, needs, workers)
            missing = [] if job is None else [spare_spec(job, need, self._number(job, need, jobs)) for need in unmet]
            if kept or missing:
                self._of[job_id] = [spare.spec.job_id for spare in kept] + [spec.job_id for spec in missing]
            yield job, superfluous, missing

    def _note_standing_in(self, job_id: str, count: int) -> None:
        if count:
            self._standing_in[job_id] = count
        else:
            self._standing_in.pop(job_id, None)

    def ready_room(self, job: Job, jobs: Mapping[str, Job]) -> Job | None:
        """Return the growth spare of a gang, if the processes on its slices have started, or None."""
        spares = (jobs[spare_id] for spare_id in self._of.get(job.spec.job_id, ()) if spare_id in jobs)
        rooms = (spare for spare in spares if is_for(spare, SparePurpose.GROWTH))
        return next((room for room in rooms if room.counts[TaskState.RUNNING] == len(room.tasks)), None)

    def _number(self, job: Job, need: Need, taken: Container[str]) -> int:
        """Return a number for an unused id. Ids are never reused, because pools remember attempts."""
        job.spares_made += 1
        while spare_id(job, need, job.spares_made) in taken:
            job.spares_made += 1
        return job.spares_made

    def check(self, jobs: Mapping[str, Job]) -> None:
        """Raise AssertionError if this disagrees with the jobs. For tests."""
        known = [spare_id for ids in self._of.values() for spare_id in ids]
        assert sorted(known) == sorted(job_id for job_id, job in jobs.items() if job.spec.spare_for)
        for parent_id, spare_ids in self._of.items():
            assert spare_ids, f"{parent_id}: an empty entry without spares"
            parent = jobs.get(parent_id)
            assert parent is not None, f"{spare_ids} are held for {parent_id}, which is forgotten"
            assert parent.gang.placed, f"{spare_ids} are held for {parent_id}, which does not run"
            for spare in map(jobs.__getitem__, spare_ids):
                assert spare.spec.spare_for is not None
                assert spare.spec.spare_for.job_id == parent_id
                assert not spare.state.finished, f"{spare.spec.job_id} is over, which spares never are"
        for job_id, job in jobs.items():
            if any(gang.is_to_grow for gang in job.gangs):
                assert self.ready_room(job, jobs) is not None, f"{job_id} is to grow, but there is no room for it"


def spares_needed(job: Job, doomed: int, sound: int, now: float) -> list[Need]:
    """Return a job's current needs for spares.

    Args:
        job: any job.
        doomed: the number of its slices that are about to be lost.
        sound: the number of its spares that hold slices; a spare in the queue can't replace a slice.
        now: seconds on the clock of the events.
    """
    config, spec = job.spec.coscheduling, job.spec
    if (
        config is None
        or not spec.is_one_gang
        or spec.spare_for is not None
        or not job.requirement.chips
        or not job.gang.placed
    ):
        return []
    needs: list[Need] = [(SparePurpose.SPARE, (1,))] * spec.spares
    if not (job.yields or spec.runs_once):  # a yielding job might have to leave for its own replacement
        needs += [(SparePurpose.REPLACEMENT, (1,))] * (doomed - min(sound, spec.spares))
    have = len(job.gang.groups)
    if not doomed and may_grow(job, now):
        needs.append((SparePurpose.GROWTH, tuple(count - have for count in config.num_groups if count > have)))
    return needs


def _sort_out(
    spares: Iterable[Job], needs: Iterable[Need], workers: Mapping[str, Worker]
) -> tuple[list[Job], list[Job], list[Need]]:
    """Return the spares that satisfy a need, the superfluous spares, and the unmet needs."""
    kept, superfluous, unmet = [], [], list(needs)
    for spare in sorted(spares, key=lambda spare: not spare.gang.placed):
        if need_of(spare) in unmet and not doomed_groups(spare, workers):
            unmet.remove(need_of(spare))
            kept.append(spare)
        else:
            superfluous.append(spare)
    return kept, superfluous, unmet


def may_grow(job: Job, now: float) -> bool:
    """Return whether a gang on fewer slices than it can use should get a growth spare."""
    gang, after = job.gang, job.spec.grow_after
    if after is None or gang.eviction is not None or not _has_room_to_grow(job):
        return False
    if any(task.state is not TaskState.RUNNING for task in gang.tasks):
        return False
    if isinstance(after, str):
        return now >= gang.asks_at
    return len(gang.groups) < gang.groups_wanted or now >= gang.running_since + after


def moves_at(job: Job, room: Job, now: float) -> float:
    """Return when a gang moves to the slices of its growth spare; seconds."""
    if not isinstance(job.spec.grow_after, str):
        return 0.0
    return room.gang.running_since + patience_s(job, len(job.gang.groups), len(room.gang.groups), now)


def _has_room_to_grow(job: Job) -> bool:
    config = job.spec.coscheduling
    return config is not None and not job.spec.runs_once and len(job.gang.groups) < max(config.num_groups)


def doomed_groups(job: Job, workers: Mapping[str, Worker]) -> int:
    """Return the number of a gang's groups that are about to be lost."""
    if not job.spec.is_one_gang or not job.gang.placed:
        return 0
    tasks, per_group = job.gang.tasks, len(job.gang.tasks) // len(job.gang.groups)
    hosts = (workers.get(task.node_id or "") for task in tasks)
    return len({i // per_group for i, worker in enumerate(hosts) if worker is not None and worker.draining})


def spare_id(job: Job, need: Need, number: int) -> str:
    """Return the job id of a spare."""
    return f"{job.spec.job_id}/{need[0].value}-{number}"


def spare_spec(job: Job, need: Need, number: int) -> JobSpec:
    """Return the spec of a spare for a job."""
    purpose, counts = need
    assert job.spec.coscheduling is not None
    return replace(
        job.spec,
        job_id=spare_id(job, need, number),
        name=f"{purpose.value} for {job.spec.name}",
        coscheduling=CoschedulingConfig(job.spec.coscheduling.group_by, counts),
        spare_for=SpareFor(job.spec.job_id, purpose),
        spares=0,
        max_retries_preemption=NO_LIMIT,
        max_retries_failure=NO_LIMIT,
        max_task_failures=None,
        scheduling_timeout=None,
        max_runtime=None,
        stop_without_progress=None,
        after={},
        group=None,
        stored_secrets=(),
    )


def is_for(spare: Job, purpose: SparePurpose) -> bool:
    """Return whether a job is a spare for this purpose."""
    return spare.spec.spare_for is not None and spare.spec.spare_for.purpose is purpose


def holds_ready(spare: Job, workers: Mapping[str, Worker]) -> bool:
    """Return whether a spare has its slices and none of them is about to be lost."""
    return spare.gang.placed and not doomed_groups(spare, workers)


def need_of(spare: Job) -> Need:
    """Return the need that a spare was made for."""
    assert spare.spec.spare_for is not None
    assert spare.spec.coscheduling is not None
    return spare.spec.spare_for.purpose, spare.spec.coscheduling.num_groups


class GangNotices:
    """Gives gangs their notices. A gang gets a notice only if it is more urgent than the one that it has."""

    def __init__(self, table: JobTable, fleet: Fleet, spares: Spares) -> None:
        self._table = table
        self._fleet = fleet
        self._spares = spares

    def worker_drained(self, event: WorkerDrainedEvent, change: Change) -> None:
        """Mark a worker as draining and give its gangs a notice, once. `SpareJobs` then makes replacements."""
        worker = self._fleet.workers.get(event.node_id)
        if worker is None:
            return
        known, deadline = worker.notice, event.deadline
        if deadline is None:
            deadline = change.now + NOTICE_S if known is None else known.deadline
        place = f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"
        notice = Notice(event.kind, f"{place}: {event.reason}", deadline)
        heard, is_final = HostNotice(event.kind, event.reason, event.deadline), event.kind is not NoticeKind.MAINTENANCE
        if is_final and is_news(None if worker.final is None else worker.final[1], heard, change.now):
            worker.final = event.reason, notice
        if not is_news(known, heard, change.now):
            return
        self._fleet.put(replace(worker, draining=event.reason, notice=notice))
        for _, attempt in worker.occupants:
            if (found := self._table.live(attempt)) is not None:
                self._spares.look_at(found[0])
                self.tell(*found, notice, change, event.told_by)

    def maintenance_called_off(self, event: MaintenanceCalledOffEvent, change: Change) -> None:
        """Cancel a maintenance. If the worker is draining for another reason, its gangs get that notice.

        A restored gang may have a maintenance notice that its worker does not have.
        """
        worker = self._fleet.workers.get(event.node_id)
        if worker is None:
            return
        if worker.notice is not None and worker.notice.kind is NoticeKind.MAINTENANCE:
            draining, notice = worker.final or (None, None)
            self._fleet.put(replace(worker, draining=draining, notice=notice))
        for _, attempt in worker.occupants:
            if (found := self._table.live(attempt)) is not None:
                self._spares.look_at(found[0])
                self._look_again(*found, change)

    def _look_again(self, job: Job, gang: Gang, change: Change) -> None:
        """Withdraw a gang's maintenance notice, unless another of its hosts has the same one.

        The gang then gets the most urgent remaining notice of its hosts or of an eviction.
        """
        told = gang.notice
        if told is None or told.kind is not NoticeKind.MAINTENANCE:
            return
        hosts = (self._fleet.workers.get(task.node_id or "") for task in gang.tasks)
        left = [worker.notice for worker in hosts if worker is not None and worker.notice is not None]
        if any((notice.kind, notice.deadline) == (told.kind, told.deadline) for notice in left):
            return
        gang.notice = None
        self._table.gang_changed(job, gang)
        if gang.eviction is not None:
            left.append(gang.eviction.notice)
        if left:
            self.tell(job, gang, min(left, key=lambda notice: notice.deadline), change)

    def tell(self, job: Job, gang: Gang, notice: Notice, change: Change, told_by: str | None = None) -> None:
        """Give a gang a notice, unless it is no news to the gang. Spares get none.

        The pool that has reported the notice, ``told_by``, has told the tasks itself if they ran by then.
        """
        if job.spec.spare_for is not None or not is_news(gang.notice, notice, change.now):
            return
        gang.notice = notice
        self._table.gang_changed(job, gang)
        if told_by != job.spec.owner or gang.running_since == math.inf:
            change.instructions.notices.append(NotifyGang(job.current_attempt(gang), notice))

    def tell_host_notices(self, job: Job, gang: Gang, change: Change) -> None:
        """Give a gang the notices that its hosts had before the gang was placed or restored."""
        for task in gang.tasks:
            worker = self._fleet.workers.get(task.node_id or "")
            if worker is not None and worker.notice is not None:
                self.tell(job, gang, worker.notice, change)


class SpareJobs:
    """Makes and drops spare jobs as `Spares` decides. ``release`` ends the promise of a dropped spare."""

    def __init__(
        self,
        table: JobTable,
        fleet: Fleet,
        allocations: Allocations,
        spares: Spares,
        notices: GangNotices,
        release: Callable[[Job], None],
    ) -> None:
        self._table = table
        self._fleet = fleet
        self._allocations = allocations
        self._spares = spares
        self._notices = notices
        self._release = release

    def look_at(self, job: Job) -> None:
        """Record that a job has changed, and so perhaps its need for spares."""
        self._spares.look_at(job)

    def restored(self, spare: Job) -> None:
        """Add a restored spare."""
        self._spares.restored(spare)

    def placed_again(self, job: Job) -> None:
        """Record that a restored job's gang has its hosts."""
        self._spares.gang_runs(job)

    def gang_runs(self, job: Job) -> None:
        """Record that all tasks of a gang run. If it is a growth spare, its parent's gang may get a notice to move."""
        self._spares.gang_runs(job)

    def give_back(self, spare: Job, change: Change) -> None:
        """Release a spare's slices to another job. Its parent gets a new spare, which waits behind all jobs."""
        self._spares.look_at(spare)
        self._spares.forget(spare)
        self._note_lost_room(spare, change.now)
        self._drop(spare, change)

    def settle(self, change: Change) -> None:
        """Make missing spares and drop superfluous ones. Withdraw a growth notice whose spare is gone."""
        if self._spares.are_settled:
            return
        for job, superfluous, missing in self._spares.changes(self._table.jobs, self._fleet.workers, change.now):
            for spare in superfluous:
                self._drop(spare, change)
            for spec in missing:
                self._make(spec, change)
            if job is not None and job.spec.is_one_gang:
                self._settle_growth(job, change)

    def _settle_growth(self, job: Job, change: Change) -> None:
        """Give a gang a growth notice once the move pays. Cancel the move if the slices are gone."""
        gang, room = job.gang, self._spares.ready_room(job, self._table.jobs)
        if room is None and gang.is_to_grow:
            gang.notice = None  # its pool asks before it moves
            self._table.gang_changed(job, gang)
        elif room is not None and not gang.is_to_grow:
            at = moves_at(job, room, change.now)
            if change.now < at:
                self._spares.look_again(job, at)
                return
            have = len(gang.groups)
            reason = f"{have + len(room.gang.groups)} slices are there for it instead of {have}"
            self._notices.tell(job, gang, Notice(NoticeKind.GROWTH, reason, change.now + GROWTH_NOTICE_S), change)

    def _note_lost_room(self, spare: Job, now: float) -> None:
        """Make a gang wait before it gets another growth spare, since other jobs need the slices."""
        parent = self._table.jobs.get(spare.spec.spare_for.job_id) if spare.spec.spare_for is not None else None
        if parent is not None and is_for(spare, SparePurpose.GROWTH) and isinstance(parent.spec.grow_after, str):
            gang = parent.gang
            gang.asks_at = now + patience_s(parent, len(gang.groups), max(1, len(spare.gang.groups)), now)
            self._table.gang_changed(parent, gang)
            self._spares.look_again(parent, gang.asks_at)

    def _make(self, spec: JobSpec, change: Change) -> None:
        assert spec.spare_for is not None
        self._table.submit(spec, change.now)
        self._table.changed(spec.spare_for.job_id)  # its record counts its spares
        spare = self._table.jobs[spec.job_id]
        spare.started = True  # so that it can't become unschedulable
        if spec.spare_for.purpose is SparePurpose.REPLACEMENT:
            spare.gang.returning_until = math.inf

    def _drop(self, spare: Job, change: Change) -> None:
        """Free a spare's hosts at once, since no user code runs there. Its owner keeps the slices warm."""
        job_id = spare.spec.job_id
        held = list(self._allocations.of(job_id))
        if held:  # even if its attempt has ended but its pool has not confirmed that yet
            change.instructions.dropped.append(DropSpare(job_id, spare.spec.owner))
        for attempt in held:
            self._allocations.end(spare, attempt)
        self._release(spare)
        self._table.remove(job_id)
