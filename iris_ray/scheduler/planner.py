"""Makes plans from the state, and commits them to it.

A job that can't be planned because of a defect of iris_ray is left out of plans for a while (`UnplannableJobs`), so
that all others can be planned.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.containment import SetAside, by_a_defect, others_go_on
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.scheduler.cycle import SchedulingResult
from iris_ray.scheduler.eviction_costs import EvictionRules, Running
from iris_ray.scheduler.limited_kinds import LimitedKinds
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.reasons import Reasons
from iris_ray.scheduler.scheduler import Scheduler
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_safely
from iris_ray.state.events import (
    AssignedEvent,
    GroupAssignedEvent,
    JobAssignedEvent,
    PromiseEvent,
    TasksAssignedEvent,
    TaskUnschedulableEvent,
)
from iris_ray.state.instructions import FailedEvent, Instructions, ReclaimSlice
from iris_ray.state.waiting_jobs import WaitingJobs

logger = logging.getLogger(__name__)


MOST_ROUNDS = 8
"""The largest number of plans made at once, each of which places what the one before has made possible."""
LOOK_AT_ALL_S = 60.0
"""Seconds after which a plan considers also the jobs that wait for a limit and whose accounts have not changed.

Time alone never brings a job within its limits. It may change who the rest of a limit is reserved for."""


@dataclass(frozen=True, slots=True)
class PlacedGang:
    """A gang with hosts, the slices that other owners must release first, and the event by which a plan placed it."""

    job: Job
    gang: Gang
    reclaim: list[ReclaimSlice]
    event: JobAssignedEvent | None = None


def running(state: ControllerState) -> Running:
    """Return the running attempts for use in a plan."""
    return Running(state.jobs, state.attempts, state.evicted, state.heeding, state.evicted_at)


def _versions(state: ControllerState) -> tuple[int, int, int, int, int]:
    """Return the versions of everything that a plan depends on, with the queue's last (a new job changes only that)."""
    return state.fleet.version, state.limits.version, state.teams.version, state.yields_version, state.queue_version


class Planner:
    """Asks the scheduler for plans, and commits them to the state.

    Args:
        state: the state.
        look_again_s: seconds after which a new plan is made even without changes, since time limits may have passed.
        scheduler: the scheduler; by default, a new one.
        most_placed: the limit of gangs in a plan; see ``most`` in `Scheduler.find_assignments`.

    Attributes:
        pending_reasons: the reason of each pending job, by job id, from the latest plan that considered it.
        unfinished: whether the latest plan ended before the end of the queue, so that another plan must continue.
        counts: numbers of starved, timed-out and unschedulable jobs and of evictions since this object was made.
    """

    def __init__(
        self,
        state: ControllerState,
        look_again_s: float,
        scheduler: Scheduler | None = None,
        most_placed: int | None = None,
    ) -> None:
        self._limited = LimitedKinds(state)
        self.pending_reasons = Reasons()
        self.unfinished = False
        self.counts: Counter[str] = Counter()
        self._state = state
        self._look_again_s = look_again_s
        self._scheduler = scheduler or Scheduler()
        self._most_placed = most_placed
        self._still_waiting: Mapping[str, PendingReason] | None = None  # reasons that the next plan may reuse
        self._unplannable = UnplannableJobs()
        self._starved: set[str] = set()
        self._planned_for = (0, 0, 0, 0, 0)
        self._planned_at = 0.0
        self._looked_at_all = -math.inf

    def plan(self, now: float, instructions: Instructions) -> list[PlacedGang]:
        """Make and commit plans until nothing is left to place, and return the gangs that they have placed.

        A plan that reaches its limit of gangs is the last one (see ``unfinished``), and so is the eighth. A job changes
        its victims once at most; otherwise a spare could leave and come back for ever.

        Args:
            now: seconds on the clock of the events.
            instructions: the instructions of the committed events are added to these.
        """
        placements: list[PlacedGang] = []
        changed: set[str] = set()
        for _ in range(MOST_ROUNDS):
            placed, done = self._plan_once(now, instructions, changed)
            placements += placed
            if done:
                return placements
        logger.warning("planning stopped after %d rounds, and continues at the next event", MOST_ROUNDS)
        return placements

    def _plan_once(self, now: float, instructions: Instructions, changed: set[str]) -> tuple[list[PlacedGang], bool]:
        """Make and commit a plan. Return the gangs that it has placed, and whether nothing is left to place.

        ``changed`` has the ids of the jobs for which earlier plans of this call have asked attempts to leave.
        """
        state = self._state
        recent = now < self._planned_at + self._look_again_s
        versions = _versions(state)
        if recent and not self.unfinished and self._planned_for == versions:
            return [], True  # nothing that a plan depends on has changed
        still_waiting = self._still_waiting if recent and versions[:-1] == self._planned_for[:-1] else None
        if still_waiting is None:
            self._planned_at = now
        if now >= self._looked_at_all + max(LOOK_AT_ALL_S, self._look_again_s):
            self._looked_at_all = now
            self._limited.release_all(self.pending_reasons)
        else:
            self._limited.release_changed(self.pending_reasons)
        result = self._propose(now, still_waiting, [*state.spares(), *state.yielding()])
        result.timed_out = list(map(self._with_last_reason, result.timed_out))
        self._count(result)
        self._note_reasons(result)
        queue_version = state.queue_version
        committed = (self._commit(assignment, now, instructions) for assignment in result.assignments)
        placements = [gang for gangs in committed for gang in gangs]
        apply_safely(state, self._first_changes(result.promises, changed), instructions)
        done = state.queue_version == queue_version  # otherwise some gang needs more or fewer spares
        if done:  # the plan's own assignments, which change the versions, leave nothing to place
            self._planned_for = _versions(state)
            self._limited.planned()
        apply_safely(state, (*result.timed_out, *result.unschedulable), instructions)
        self.unfinished = not result.complete
        if self.left_out:
            self.pending_reasons.replace(self._unplannable.reasons(state.pending(), now))
        return placements, done or self.unfinished

    @staticmethod
    def _first_changes(promises: Iterable[PromiseEvent], changed: set[str]) -> list[PromiseEvent]:
        """Return the events without those of jobs that would ask attempts to leave a second time, and log these."""
        first: list[PromiseEvent] = []
        for event in promises:
            if event.leave and event.job_id in changed:
                logger.warning("%s would take hosts a second time from %s", event.job_id, [*map(str, event.leave)])
                continue
            first.append(event)
            if event.leave:
                changed.add(event.job_id)
        return first

    def _with_last_reason(self, late: TaskUnschedulableEvent) -> TaskUnschedulableEvent:
        """Return the event of a timed-out job, with the reason from the previous plan."""
        last = self.pending_reasons.get(late.job_id)
        return late if last is None else replace(late, reason=f"{late.reason}; the last reason was: {last}")

    def _note_reasons(self, result: SchedulingResult) -> None:
        """Update the reasons, and keep those of jobs that the plan has not reached or not considered.

        If a job lost its promise, the next plan must consider all jobs, since another job may get a promise.
        """
        if result.complete:
            self._limited.add(result.limited, result.pending_reasons)
        self._still_waiting = None if result.gave_up_promise else result.pending_reasons
        reasons, before = result.pending_reasons, self.pending_reasons
        passed_over = [reason.job_id for reason in reasons.apart() if reason.kind is PendingKind.NOT_LOOKED_AT]
        still = {job_id: before[job_id] for job_id in passed_over if job_id in before}
        self.pending_reasons = Reasons({} if result.complete else before, beside=self._limited.reasons)
        self.pending_reasons.replace(reasons)
        self.pending_reasons.replace(still)

    @property
    def rules(self) -> EvictionRules | None:
        """The conditions for evictions; None: no evictions."""
        return self._scheduler.evictions

    def look_again(self) -> None:
        """Make the next call plan even without changes, because a time limit has passed."""
        self._planned_at = self._looked_at_all = -math.inf

    @property
    def left_out(self) -> Mapping[str, SetAside]:
        """The jobs that are left out of plans, by id."""
        return self._unplannable.jobs

    def _propose(
        self, now: float, still_waiting: Mapping[str, PendingReason] | None, idle: Sequence[Job]
    ) -> SchedulingResult:
        """Make a plan of all jobs that can be planned."""
        while True:
            pending = self._unplannable.without(self._limited.rest(), now)
            try:
                return self._find(pending, now, still_waiting, idle)
            except Exception:
                if not pending:
                    raise  # no job has caused it
                logger.exception("making a plan failed; looking for the jobs that can't be planned")
                still_waiting = None
                self._leave_out_some([*pending], now, idle)

    def _find(
        self,
        jobs: Iterable[Job],
        now: float,
        still_waiting: Mapping[str, PendingReason] | None,
        idle: Sequence[Job],
    ) -> SchedulingResult:
        state = self._state
        return self._scheduler.find_assignments(
            jobs,
            state.fleet,
            state.usage,
            now,
            still_waiting,
            self._most_placed,
            state.past_usage,
            running(state),
            idle,
            state.limits,
            state.teams,
        )

    def _leave_out_some(self, pending: list[Job], now: float, idle: Sequence[Job]) -> None:
        """Find the jobs that make the plan fail, by planning subsets, and leave them out."""

        def plan(jobs: Sequence[Job]) -> None:
            self._scheduler.forget()
            self._find(jobs, now, None, idle)

        for job, error in unplannable(pending, plan):
            self._leave_out(job, error, now)
        self._scheduler.forget()

    def _leave_out(self, job: Job, error: Exception, now: float) -> None:
        logger.error("%s is left out of plans for a while", job.spec.job_id, exc_info=error)
        self._unplannable.leave_out(job, error, now)
        self._limited.release_all(self.pending_reasons)

    def _commit(self, assignment: AssignedEvent, now: float, instructions: Instructions) -> list[PlacedGang]:
        """Commit an assignment. If it is refused, leave out its job."""
        job = self._state.jobs[assignment.job_id]
        try:
            wanted = self._state.handle_event(assignment)
        except IllegalTransitionError as error:
            self._leave_out(job, error, now)
            return []
        except Exception as error:
            instructions.failed.append(FailedEvent(assignment, error))
            self._limited.release_all(self.pending_reasons)
            return []
        instructions.add(wanted)
        if isinstance(assignment, GroupAssignedEvent):
            of_each = ((self._state.jobs[one.job_id], one) for one in assignment.assignments)
            placed = [(job, job.gangs[position], one) for job, one in of_each for position in gangs_of(one)]
            slices = [(job, gang, {*gang.groups} if job.requirement.chips else (), one) for job, gang, one in placed]
            return [
                PlacedGang(job, gang, [slice for slice in wanted.reclaim if slice.wanted in names], one)
                for job, gang, names, one in slices
            ]
        return [PlacedGang(job, job.gangs[position], wanted.reclaim, assignment) for position in gangs_of(assignment)]

    def _count(self, result: SchedulingResult) -> None:
        """Log and count starving, ended and evicted jobs, once each."""
        starved = [job_id for job_id in result.starving if job_id not in self._starved]
        self._starved = {*result.starving} if result.complete else {*self._starved, *result.starving}
        for job_id in starved:
            logger.warning("%s starves: %s", job_id, result.pending_reasons[job_id])
        for event in (*result.timed_out, *result.unschedulable):
            logger.warning("%s is given up: %s", event.job_id, event.reason)
        for promise in result.promises:
            if promise.leave:
                logger.warning("%s takes hosts from others: %s", promise.job_id, ", ".join(map(str, promise.leave)))
            elif not promise.node_ids and promise.reason:
                logger.warning("the promise to %s is called off: %s", promise.job_id, promise.reason)
        self.counts.update(
            evicted=len({one for promise in result.promises for one in promise.leave if self._is_to_run_on(one)}),
            starved=len(starved),
            timed_out=len(result.timed_out),
            unschedulable=len(result.unschedulable),
        )

    def _is_to_run_on(self, attempt: AttemptId) -> bool:
        """Return whether an attempt is not a spare and has not been evicted yet."""
        job = self._state.jobs.get(attempt.job_id)
        return job is not None and job.spec.spare_for is None and job.gangs[attempt.gang].eviction is None


def gangs_of(assignment: JobAssignedEvent) -> tuple[int, ...]:
    """Return the positions of the gangs that an event assigns hosts to."""
    return assignment.task_indices if isinstance(assignment, TasksAssignedEvent) else (assignment.gang,)


LEFT_OUT_S = 600.0
"""Seconds for which a job is left out of plans before it is retried."""


class UnplannableJobs:
    """The jobs that are left out of plans for a while.

    Attributes:
        jobs: these jobs by id, with the reasons.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, SetAside] = {}

    def without(self, pending: WaitingJobs, now: float) -> WaitingJobs:
        """Return the jobs that are not left out, and forget those whose time has expired."""
        if not self.jobs:
            return pending
        waiting = {job.spec.job_id for job in pending}
        self.jobs = {name: one for name, one in self.jobs.items() if name in waiting and now < (one.until or 0.0)}
        return WaitingJobs(job for job in pending if job.spec.job_id not in self.jobs)

    def leave_out(self, job: Job, error: Exception, now: float) -> None:
        """Leave a job out for `LEFT_OUT_S`."""
        job_id = job.spec.job_id
        why = (
            f"iris_ray can't place it, {by_a_defect(error)}. {others_go_on('jobs', 'Controller')}. To end the job:"
            f" iris-ray cancel {job_id}"
        )
        self.jobs[job_id] = SetAside(job_id, why, since=now, until=now + LEFT_OUT_S)

    def reasons(self, pending: Iterable[Job], now: float) -> dict[str, PendingReason]:
        """Return the pending reasons of the jobs among these that are left out."""
        return {
            job.spec.job_id: PendingReason(
                job.spec.job_id, PendingKind.PAUSED, job.requirement, (1,), pause=(one.until - now, one.why)
            )
            for job in (pending if self.jobs else ())
            if (one := self.jobs.get(job.spec.job_id)) is not None and one.until is not None
        }


def unplannable(jobs: Sequence[Job], plan: Callable[[Sequence[Job]], object]) -> list[tuple[Job, Exception]]:
    """Return the jobs that make a plan fail, each with the plan's error.

    The search is by bisection. One such job costs about as much as two more plans of all jobs. ``plan`` makes a plan of
    some jobs (at least one), and raises an error if one of them can't be planned.
    """
    try:
        plan(jobs)
    except Exception as error:
        if len(jobs) == 1:
            return [(jobs[0], error)]
        middle = len(jobs) // 2
        found = [*unplannable(jobs[:middle], plan), *unplannable(jobs[middle:], plan)]
        return found or [(job, error) for job in jobs[middle:]]  # each half can be planned alone, but not both together
    return []
