"""The Controller's state, which only ``ControllerState.handle_event(event)`` changes.

The state has no clock, no network and no Ray: events carry the time, and `Instructions` describe the actions outside.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.cluster_settings import ClusterSettings
from iris_ray.model.goodput import ForgottenJob
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import HostNotice, NoticeKind, is_news
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.model.teams import Teams
from iris_ray.model.workers import Worker
from iris_ray.state import job_table, quarantine
from iris_ray.state.attempt_ends import AttemptEnds, Owner
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    AttemptMarkedEvent,
    AttemptSavesEvent,
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    GangReturnedEvent,
    GroupAssignedEvent,
    JobCancelledEvent,
    JobRestoredEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    PastUsageEvent,
    PoolRestartedEvent,
    PromiseEvent,
    SettingSetEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskDispatchFailedEvent,
    TasksAssignedEvent,
    TaskStateChangedEvent,
    TaskUnschedulableEvent,
    TeamsSetEvent,
    TimePassedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S, Allocations, Fleet, Taint, why_replaced, with_drain_of
from iris_ray.state.gangs import Gangs, SliceHolders
from iris_ray.state.instructions import Change, ChangeLog, FailedEvent, Instructions
from iris_ray.state.invariants import check_state
from iris_ray.state.job_groups import JobGroups
from iris_ray.state.job_table import JobTable
from iris_ray.state.promises import Evictions, Promises
from iris_ray.state.quarantine import Blame, Quarantine
from iris_ray.state.records import JobRecord
from iris_ray.state.runtime_limits import RuntimeLimits
from iris_ray.state.spares import GangNotices, SpareJobs, Spares
from iris_ray.state.successors import Successors
from iris_ray.state.team_use import TeamUse
from iris_ray.state.user_limits import PastUsage, UserLimits
from iris_ray.state.waiting_jobs import WaitingJobs

logger = logging.getLogger(__name__)


class ControllerState:
    """Every job, every worker and every allocation: the single source of truth.

    Attributes:
        fleet: all live workers, with the resources held on them.
        limits: limits by user, and the usage that counts towards them.
        teams: the teams and the resources that they hold.
        settings: the cluster's settings.
        job_groups: the groups of jobs that start and end together.
        jobs: all jobs by id, in the order of submission.
        workers: live workers by node id.
        holders: the owner that keeps actors on each busy or warm slice, by slice name.
        usage: the resources that each user's gangs hold, by Ray's names.
        past_usage: the decayed past usage of each user.
        attempts: the attempts of each band that hold resources, ordered by when they got them or last reported a save.
        heeding: the attempts in `attempts` that save their state when they receive a notice.
        evicted_at: the times of the latest evictions, by user and team; ascending, seconds. All of the past hour, and
            earlier ones until the next eviction.
        unrecorded: the jobs changed or forgotten since this was last cleared: id → changed chunks of the record.
        changed_specs: the specs of jobs that have changed, for the scheduler: the usage counted towards their limits
            may differ.
        job_changes: ids of jobs that have changed or were forgotten, for processes that show jobs.
    """

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.limits = UserLimits()
        self.teams = TeamUse()
        self.settings = ClusterSettings()
        self._now = 0.0
        self._table = JobTable(self.limits)
        self._allocations = Allocations(self.fleet, self.limits, self.teams)
        self._quarantine = Quarantine(self.fleet)
        self._spares = Spares()
        self._holders = SliceHolders(self._table, self.fleet)
        self._promises = Promises(self._table)
        self._notices = GangNotices(self._table, self.fleet, self._spares)
        about_spares = self._table, self.fleet, self._allocations, self._spares, self._notices
        self._spare_jobs = SpareJobs(*about_spares, self._promises.release)
        self._ends = AttemptEnds(self._table, self.fleet, self._allocations, self._spares)
        self._runtimes = RuntimeLimits(self._table, self._notices, self._ends)
        self.job_groups = JobGroups(self._table, self._ends)
        self._successors = Successors(self._table, self._ends, self.job_groups)
        about_evictions = self._table, self._promises, self._notices, self._spare_jobs, self._ends, self.teams
        self._evictions = Evictions(*about_evictions)
        self._gangs = Gangs(
            self._table,
            self.fleet,
            self._allocations,
            self._ends,
            self._notices,
            self._holders,
            self._spare_jobs,
            self._promises,
            self._runtimes,
        )
        self.jobs: Mapping[str, Job] = self._table.jobs
        self.workers: Mapping[str, Worker] = self.fleet.workers
        self.holders: Mapping[str, str] = self.fleet.holders
        self.usage: Mapping[str, Mapping[str, float]] = self._allocations.usage
        self.past_usage: PastUsage = self._allocations.past
        self.attempts: Mapping[PriorityBand, dict[AttemptId, None]] = self._allocations.by_band
        self.heeding: Mapping[PriorityBand, dict[AttemptId, None]] = self._allocations.heeding
        self.evicted_at: Mapping[Owner, Sequence[float]] = self._ends.evicted_at
        self.unrecorded: dict[str, set[int]] = self._table.unrecorded
        self.changed_specs: ChangeLog[JobSpec] = self._table.changed_specs
        self.job_changes: ChangeLog[str] = self._table.changes

    # -- changing --------------------------------------------------------------------------------------------------

    def handle_event(self, event: Event) -> Instructions:
        """Apply one event.

        Raises:
            IllegalTransitionError: the event is impossible in the current state. The error's notes list the latest
                events of the job and the gang.
        """
        self._now = max(self._now, getattr(event, "now", 0.0))
        change = Change(self._now)
        self._spares.time_passed(self._now)
        self._allocations.past.now = self.teams.past.now = self._now
        job_id = job_of(event)
        try:
            self._handle(event, change)
        except IllegalTransitionError as error:
            for line in self._table.event_log.lines(job_id, self._gang_of(event, job_id)):
                error.add_note(f"before: {line}")
            raise
        self._log(event, job_id, change.instructions)
        self._follow_up(event, job_id, change)
        return change.instructions

    def _handle(self, event: Event, change: Change) -> None:
        match event:
            case GangAssignedEvent() | TasksAssignedEvent():
                self._gangs.assigned(event, change)
            case GroupAssignedEvent():
                self._gangs.group_assigned(event, change)
                self.job_groups.started(self.jobs[event.job_id])
            case TaskStateChangedEvent():
                self._gangs.task_reported(event, change)
            case AttemptEndConfirmedEvent():
                self._ends.confirmed(event.attempt)
            case AttemptMarkedEvent():
                self._attempt_marked(event)
            case AttemptSavesEvent():
                self._attempt_saves(event)
            case JobSubmittedEvent():
                self._job_submitted(event, change)
            case JobRestoredEvent():
                self._gangs.job_restored(event.record, change)
                self._ends.restored(event.record.job, change.now)
                self._evictions.restored(self.jobs[event.record.job.spec.job_id])
                self._successors.restored(self.jobs[event.record.job.spec.job_id], change)
                self.job_groups.settle(self.jobs[event.record.job.spec.job_id], change)
            case JobCancelledEvent():
                self._ends.job_cancelled(event, change)
            case TaskUnschedulableEvent():
                self._ends.unschedulable(event, change)
            case WorkerRegisteredEvent():
                self._worker_registered(event, change)
            case TimePassedEvent():
                self.fleet.time_passed(self._now)
                self._evictions.time_passed(change)
                self._runtimes.time_passed(change)
                self.job_groups.time_passed(change)
            case WorkerDrainedEvent():
                self._notices.worker_drained(event, change)
            case MaintenanceCalledOffEvent():
                self._notices.maintenance_called_off(event, change)
            case WorkerBlamedEvent():
                self._worker_blamed(event)
            case TaintedEvent():
                self.fleet.taint(event.target, event.taint, Taint(event.reason, event.until))
            case PastUsageEvent():
                self._allocations.past.restore(event.hours, event.at)
                self.teams.past.restore(event.of_teams, event.at)
            case LimitsSetEvent():
                self.limits.set(event.user, event.band, event.limits)
            case TeamsSetEvent():
                self.teams.set(Teams(event.teams), self.jobs, self._allocations.all_of())
                self._evictions.tree_changed()
            case SettingSetEvent():
                self.settings.set(event.name, event.to)
            case TaintLiftedEvent():
                self._quarantine.taint_lifted(event.target, event.taint)
            case WorkerSuspectedEvent():
                self.fleet.suspect(event.node_id, event.reason, event.now + SUSPICION_S)
            case WorkerFailedEvent():
                if (worker := self.workers.get(event.node_id)) is not None:
                    self.fleet.remove(event.node_id)
                    self._promises.release_host(event.node_id)
                    self._ends.worker_lost(worker, event.reason, change)
            case PromiseEvent():
                self._evictions.promise(event, self.workers, change)
            case JobYieldsEvent():
                self._table.set_yields(event.job_id, event.yields)
                self._spares.look_at(self.jobs[event.job_id])
            case TaskDispatchFailedEvent():
                self._ends.dispatch_failed(event, change)
            case GangMovedEvent():
                self._ends.gang_moved(event, change)
            case GangReturnedEvent():
                self._ends.gang_returned(event, change)
            case PoolRestartedEvent():
                self._ends.pool_restarted(event.owner, change)
                self._spare_jobs.settle(change)  # first, so that dropped spares no longer hold slices
                self._holders.released_all(event.owner)
            case SliceHeldEvent():
                self._holders.held(event.slice_name, event.owner)
            case SliceReleasedEvent():
                self._holders.released(event.slice_name, event.owner)

    def _follow_up(self, event: Event, about: str, change: Change) -> None:
        """Apply the consequences of any event: finished jobs leave the queue, and promises and spares are settled."""
        finished = change.instructions.finished
        if (job := self.jobs.get(about)) is not None and job.started:
            self._successors.started(job, change)
        for job_id in finished:  # including the jobs that end because of these
            self._table.has_finished(job_id)
            self.job_groups.ended(self.jobs[job_id], change)
            self._successors.ended(self.jobs[job_id], change)
            job_table.note_job_ended(self.jobs[job_id], change.now)
            self._promises.release(self.jobs[job_id])
            self._spares.look_at(self.jobs[job_id])
            grouped = self.jobs[job_id].spec.coscheduling
            if grouped and grouped.group_by not in self._table.grouped_by:
                self.fleet.forget_grouping(grouped.group_by)
        if (job := self.jobs.get(about)) is not None and not job.pending:
            self._promises.release(job)
        if not isinstance(event, JobRestoredEvent):  # its spares and the job that evicts it are restored later
            self._spare_jobs.settle(change)  # first, so that no attempt leaves for a dropped spare
            self._evictions.settle(change)
            self._spare_jobs.settle(change)
        if finished:
            self._table.forget_old(self._allocations)

    def _job_submitted(self, event: JobSubmittedEvent, change: Change) -> None:
        self.job_groups.begin_again(event.spec)
        if event.spec.job_id not in self.jobs:
            self._successors.require_known(event.spec)
            self.job_groups.require_equal(event.spec)
        if (job := self._table.submit(event.spec, event.now)) is not None:
            self._successors.submitted(job, change)
            self.job_groups.settle(job, change)

    def _worker_registered(self, event: WorkerRegisteredEvent, change: Change) -> None:
        worker = Worker(
            event.node_id,
            event.address,
            event.attributes,
            event.resources,
            foreign=event.foreign,
            reported=event.attributes,
            elsewhere=event.elsewhere,
        )
        known = self.workers.get(event.node_id)
        if known is not None and (became := why_replaced(known, worker, self.jobs)) is not None:
            worker = with_drain_of(worker, known)
            self.fleet.remove(event.node_id)
            self._promises.release_host(event.node_id)
            self._ends.worker_lost(known, became, change)
        self.fleet.register(worker)
        if event.draining:
            drained = WorkerDrainedEvent(event.node_id, event.draining, deadline=event.deadline)
            self._notices.worker_drained(drained, change)

    def _attempt_marked(self, event: AttemptMarkedEvent) -> None:
        if (job := self.jobs.get(event.attempt.job_id)) is not None and len(job.gangs) == 1:
            job.times.marked(event.attempt.number, event.marks, self._now)
            self._table.changed(event.attempt.job_id)

    def _attempt_saves(self, event: AttemptSavesEvent) -> None:
        if (found := self._table.live(event.attempt)) is None:
            return
        job, gang = found
        if gang.saved_at < event.saved_at <= self._now:
            gang.saved_at, gang.saves_every_s = event.saved_at, event.every_s
        if event.heeds_notices and gang.heeds_notices is None:
            gang.heeds_notices = True
        self._allocations.has_saved(job, event.attempt, heeds_notices=gang.heeds_notices is True)
        self._table.gang_changed(job, gang)

    def _worker_blamed(self, event: WorkerBlamedEvent) -> None:
        if event.node_id in self.workers:
            job = self.jobs.get(event.job_id)
            user = job.spec.user if job else event.job_id
            self._quarantine.blame(Blame(event.node_id, user, event.fault, self._now), event.reason)
            if job and event.fault in (Fault.DISK, Fault.HANG):
                quarantine.avoid_host(job, event.node_id, self._now)
                self._table.changed(event.job_id)

    def _log(self, event: Event, job_id: str, instructions: Instructions) -> None:
        """Log the event for its job or gang, or, if it concerns no job, for the attempts that it stops."""
        event_log = self._table.event_log
        if isinstance(event, TasksAssignedEvent):
            for index in event.task_indices:
                event_log.add(job_id, self._logged_gang(job_id, index), event, self._now)
        elif job_id in self.jobs:
            event_log.add(job_id, self._gang_of(event, job_id), event, self._now)
        elif not job_id:
            for stopped, _, gang in dict.fromkeys(stop.attempt for stop in instructions.stop):
                if stopped in self.jobs:
                    event_log.add(stopped, self._logged_gang(stopped, gang), event, self._now)

    def _gang_of(self, event: Event, job_id: str) -> int | None:
        """Return the position of the gang for which an event is logged; None to log it for the whole job."""
        attempt = getattr(event, "attempt", None)
        if attempt is not None:
            return self._logged_gang(job_id, attempt.gang)
        if isinstance(event, GangAssignedEvent):
            return self._logged_gang(job_id, event.gang)
        index, job = getattr(event, "task_index", None), self.jobs.get(job_id)
        return None if index is None or job is None else self._logged_gang(job_id, index // len(job.gangs[0].tasks))

    def _logged_gang(self, job_id: str, gang: int) -> int | None:
        """Return a gang's position; None if the job has a single gang, whose events are logged for the job."""
        job = self.jobs.get(job_id)
        return None if job is None or len(job.gangs) == 1 else gang

    # -- views -----------------------------------------------------------------------------------------------------

    @property
    def evicted(self) -> list[AttemptId]:
        """The attempts that are being evicted."""
        return self._evictions.attempts

    @property
    def next_growth_at(self) -> float:
        """The time of the next growth check, if no event comes first; infinite if none is due."""
        return self._spares.next_look_at

    @property
    def queue_version(self) -> int:
        """The number of changes to the queue so far."""
        return self._table.queue_version

    @property
    def yields_version(self) -> int:
        """The number of times that jobs have begun or ceased to yield."""
        return self._table.yields_version

    def show_anew(self, job_id: str) -> None:
        """Add a job to `job_changes`, because data outside this state that is shown with it has changed."""
        self._table.show_anew(job_id)

    def take_forgotten(self) -> list[ForgottenJob]:
        """Remove and return the totals of the jobs that were forgotten since the last call."""
        taken = list(self._table.forgotten)
        self._table.forgotten.clear()
        return taken

    def record(self, job_id: str) -> JobRecord | None:
        """Return the record from which a job can be restored; None if the job is forgotten."""
        job = self.jobs.get(job_id)
        return None if job is None else JobRecord(job, self._allocations.of(job_id))

    def story(self, job_id: str, gang: int | None = None) -> tuple[str, ...]:
        """Return a job's latest events as text, oldest first; empty if the job is unknown.

        ``gang``, a gang's position, includes the events of that gang, if the job has several.
        """
        return self._table.event_log.lines(job_id, gang)

    def pending(self) -> WaitingJobs:
        """Return a live view of the jobs that have gangs waiting for workers."""
        return self._table.waiting

    def spares(self) -> list[Job]:
        """Return the spare jobs whose slices could be released."""
        return self._spares.dispensable(self.jobs)

    def yielding(self) -> list[Job]:
        """Return the jobs that have hosts and yield them to any waiting job."""
        return [job for job in self._table.yielding.values() if job.gang.placed]

    def jobs_of(self, owner: str) -> list[Job]:
        """Return the unfinished jobs of one owner."""
        return [job for job in self.jobs.values() if job.spec.owner == owner and not job.state.finished]

    def owners(self) -> set[str]:
        """Return the owners of all jobs that have not ended or whose attempts still hold hosts."""
        return {job.spec.owner for job in self.jobs.values() if not job.over or self._allocations.of(job.spec.job_id)}

    def attempts_of(self, owner: str) -> list[AttemptId]:
        """Return one owner's attempts whose end has not been confirmed."""
        return self._allocations.of_owner(self.jobs, owner)

    def placed_gangs(self, job: Job) -> Iterator[Gang]:
        """Iterate over the gangs of a job that have hosts, at a cost independent of the other gangs."""
        gangs = (job.gangs[attempt.gang] for attempt in self._allocations.of(job.spec.job_id))
        return (gang for gang in gangs if gang.placed)

    def holds_capacity(self, attempt: AttemptId) -> bool:
        """Return whether an attempt's end has not been confirmed yet."""
        return attempt in self._allocations.of(attempt.job_id)

    def knows(self, worker: WorkerRegisteredEvent) -> bool:
        """Return whether a registration would not change anything."""
        known = self.workers.get(worker.node_id)
        drain = HostNotice(NoticeKind.PREEMPTION, worker.draining or "", worker.deadline)
        heard = known is not None and known.final is not None and not is_news(known.final[1], drain, self._now)
        if known is not None and (worker.draining is None or heard):
            worker = replace(worker, draining=known.draining)
        return known is not None and (
            known.address, known.reported, known.resources, known.draining, known.foreign, known.elsewhere
        ) == (
            worker.address, worker.attributes, worker.resources, worker.draining, worker.foreign, worker.elsewhere
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Every test that touches state ends with this."""
        table = self._table
        check_state(table.jobs, self.fleet, self.usage, self._allocations.all_of(), self.pending(), table.finished)
        grouped = {job_id for job_id, job in self.jobs.items() if job.spec.coscheduling and not job.over}
        assert grouped == set[str]().union(*table.grouped_by.values()), "jobs by the attribute of their groups are off"
        self._spares.check(self.jobs)
        self._evictions.check(self.jobs)
        self._runtimes.check()
        self._successors.check()
        self.job_groups.check()
        held = sorted(attempt for attempts in self.attempts.values() for attempt in attempts)
        assert held == sorted(self._allocations), "the attempts by band are off"
        assert all(self.heeding[band].keys() <= attempts.keys() for band, attempts in self.attempts.items())
        self._promises.check(self.workers)
        self.limits.check(self.jobs, self._allocations.all_of())
        self.teams.check(self.jobs, self._allocations.all_of())
        assert table.event_log.job_ids <= self.jobs.keys(), "a story of a job that is forgotten"


def job_of(event: Event) -> str:
    """Return the id of the job that an event concerns, or an empty string."""
    attempt: AttemptId | None = getattr(event, "attempt", None)
    if attempt is not None:
        return attempt.job_id
    match event:
        case JobSubmittedEvent(spec):
            return spec.job_id
        case JobRestoredEvent(record):
            return record.job.spec.job_id
    return getattr(event, "job_id", "")


def apply_all(state: ControllerState, events: Iterable[Event], total: Instructions | None = None) -> Instructions:
    """Apply several events in order and collect their instructions. A refused event does not stop the others."""
    total = Instructions() if total is None else total
    for event in events:
        try:
            instructions = state.handle_event(event)
        except IllegalTransitionError:
            logger.exception("refused %s", event)
            continue
        total.add(instructions)
    return total


def apply_safely(state: ControllerState, events: Iterable[Event], total: Instructions) -> None:
    """Apply events like `apply_all`, and add events that raise an unexpected error to ``total.failed``."""
    for event in events:
        try:
            apply_all(state, [event], total)
        except Exception as error:
            logger.exception("%s about %r could not be handled", type(event).__name__, job_of(event))
            total.failed.append(FailedEvent(event, error))
