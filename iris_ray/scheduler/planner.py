"""From the state to a plan, and from the plan to committed assignments."""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.containment import SetAside
from iris_ray.model.jobs import Gang, Job
from iris_ray.scheduler.eviction_costs import Running
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.result import SchedulingResult
from iris_ray.scheduler.scheduler import Scheduler
from iris_ray.scheduler.unplannable_jobs import UnplannableJobs, unplannable
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_safely
from iris_ray.state.events import AssignedEvent, TaskAssignedEvent, TaskUnschedulableEvent
from iris_ray.state.instructions import FailedEvent, Instructions, ReclaimSlice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedGang:
    """A gang that a plan has given hosts.

    Attributes:
        job, gang: which.
        reclaim: slices that other owners must release first.
    """

    job: Job
    gang: Gang
    reclaim: list[ReclaimSlice]


def running(state: ControllerState) -> Running:
    """Return what runs, as a plan sees it."""
    return Running(state.jobs, state.attempts, state.evicted)


def _versions(state: ControllerState) -> tuple[int, int, int, int]:
    """Return the versions of what a plan depends on. That of the queue is last: new jobs need no look at the others."""
    return state.fleet.version, state.limits.version, state.yields_version, state.queue_version


class Planner:
    """Asks the scheduler and commits what it proposes.

    A job that can't be planned or committed is left out of plans for a while, and all others are planned.

    Args:
        state: is planned for, and changed by what is committed.
        look_again_s: after so many seconds a plan is made anew though nothing has changed: pauses and other time limits
            may have passed.
        scheduler: makes the plans.
        most_placed: gangs that one plan places at most, see `Scheduler.find_assignments`; None: all that it can.

    Attributes:
        pending_reasons: why each pending job waits, by job id, from the latest plan that has looked at it.
        unfinished: whether the latest plan ended before the queue did, and another one is to go on.
        counts: jobs that starved, timed out or turned out to be unschedulable, and attempts that were evicted, since
            this Controller began.
    """

    def __init__(
        self,
        state: ControllerState,
        look_again_s: float,
        scheduler: Scheduler | None = None,
        most_placed: int | None = None,
    ) -> None:
        self.pending_reasons: Mapping[str, PendingReason] = {}
        self.unfinished = False
        self.counts: Counter[str] = Counter()
        self._state = state
        self._look_again_s = look_again_s
        self._scheduler = scheduler or Scheduler()
        self._most_placed = most_placed
        self._still_waiting: Mapping[str, PendingReason] | None = None  # what the next plan may take over of the latest
        self._unplannable = UnplannableJobs()
        self._starved: set[str] = set()
        self._planned_for = (0, 0, 0, 0)
        self._planned_at = 0.0

    def plan(self, now: float, instructions: Instructions) -> list[PlacedGang]:
        """Place what can be placed, and commit it.

        Args:
            now: seconds since the epoch.
            instructions: what the commits want done besides is added here.
        """
        return self._plan(now, instructions, may_give_back=True)

    def _plan(self, now: float, instructions: Instructions, may_give_back: bool) -> list[PlacedGang]:
        """Plan until nothing is left to be placed. Spares are given back once, so that they don't come and go."""
        state = self._state
        recent = now < self._planned_at + self._look_again_s
        versions = _versions(state)
        if recent and not self.unfinished and self._planned_for == versions:
            return []  # nothing has changed that a plan depends on
        still_waiting = self._still_waiting if recent and versions[:-1] == self._planned_for[:-1] else None
        if still_waiting is None:
            self._planned_at = now
        result = self._propose(now, still_waiting, [*state.spares(), *state.yielding()] if may_give_back else ())
        result.timed_out = list(map(self._with_last_reason, result.timed_out))
        self._note_reasons(result)
        self._count(result)
        queue_version = state.queue_version
        placements = self._commit(result, now, instructions)
        apply_safely(state, [*result.rooms, *result.evictions, *result.given_back], instructions)
        done = state.queue_version == queue_version  # else some gang got spares to be placed, or needs fewer
        if done:
            # its own assignments leave nothing to place
            self._planned_for = _versions(state)
        apply_safely(state, (*result.timed_out, *result.unschedulable), instructions)
        self.unfinished = not result.complete
        if self.left_out:
            self.pending_reasons = {**self.pending_reasons, **self._unplannable.reasons(state.pending(), now)}
        if done or self.unfinished:
            return placements
        return placements + self._plan(now, instructions, may_give_back and not result.given_back)

    def _with_last_reason(self, late: TaskUnschedulableEvent) -> TaskUnschedulableEvent:
        """Return the event of a job that has waited for too long, with the reason from the plan before."""
        last = self.pending_reasons.get(late.job_id)
        return late if last is None else replace(late, reason=f"{late.reason}; the last reason was: {last}")

    def _note_reasons(self, result: SchedulingResult) -> None:
        """Keep the reasons of jobs that an unfinished plan has not reached.

        After a plan that gave up room the next one looks at all jobs, so that whoever is due to it has it kept.
        """
        self._still_waiting = None if result.gave_up_room else result.pending_reasons
        not_reached = {} if result.complete else self.pending_reasons
        self.pending_reasons = {**not_reached, **result.pending_reasons}

    def look_again(self) -> None:
        """Make the next plan anew, though nothing may have changed: a time limit has passed."""
        self._planned_at = -math.inf

    @property
    def left_out(self) -> Mapping[str, SetAside]:
        """Jobs that are left out of plans, by their ids."""
        return self._unplannable.jobs

    def _propose(
        self, now: float, still_waiting: Mapping[str, PendingReason] | None, spares: Sequence[Job]
    ) -> SchedulingResult:
        """Return a plan of all jobs that can be planned."""
        while True:
            pending = self._unplannable.without(self._state.pending(), now)
            try:
                return self._find(pending, now, still_waiting, spares)
            except Exception:
                if not pending:
                    raise  # no job is to blame
                logger.exception("making a plan failed; looking for the jobs that can't be planned")
                still_waiting = None
                self._leave_out_some(pending, now, spares)

    def _find(
        self,
        jobs: Sequence[Job],
        now: float,
        still_waiting: Mapping[str, PendingReason] | None,
        spares: Sequence[Job],
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
            spares,
            state.limits,
        )

    def _leave_out_some(self, pending: list[Job], now: float, spares: Sequence[Job]) -> None:
        """Find the jobs to blame in plans made of the same as the one that failed: else it would fail again."""

        def plan(jobs: Sequence[Job]) -> None:
            self._scheduler.forget()
            self._find(jobs, now, None, spares)

        for job, error in unplannable(pending, plan):
            self._leave_out(job, error, now)
        self._scheduler.forget()

    def _leave_out(self, job: Job, error: Exception, now: float) -> None:
        logger.error("%s is left out of plans for a while", job.spec.job_id, exc_info=error)
        self._unplannable.leave_out(job, error, now)

    def _commit(self, result: SchedulingResult, now: float, instructions: Instructions) -> list[PlacedGang]:
        placed = (self._commit_one(assignment, now, instructions) for assignment in result.assignments)
        return [placement for placement in placed if placement is not None]

    def _commit_one(self, assignment: AssignedEvent, now: float, instructions: Instructions) -> PlacedGang | None:
        """Commit an assignment; if it is refused, leave its job out."""
        job = self._state.jobs[assignment.job_id]
        try:
            wanted = self._state.handle_event(assignment)
        except IllegalTransitionError as error:
            self._leave_out(job, error, now)
            return None
        except Exception as error:
            instructions.failed.append(FailedEvent(assignment, error))
            return None
        instructions.add(wanted)
        gang = job.gang_of(assignment.task_index) if isinstance(assignment, TaskAssignedEvent) else job.gang
        return PlacedGang(job, gang, wanted.reclaim)

    def _count(self, result: SchedulingResult) -> None:
        """Log and count what did not go as its owner hoped, once for each job."""
        starved = [job_id for job_id in result.starving if job_id not in self._starved]
        self._starved = {*result.starving} if result.complete else {*self._starved, *result.starving}
        for job_id in starved:
            logger.warning("%s starves: %s", job_id, result.pending_reasons[job_id])
        for event in (*result.timed_out, *result.unschedulable):
            logger.warning("%s is given up: %s", event.job_id, event.reason)
        for taken in result.evictions:
            victims = ", ".join(map(str, taken.victims))
            logger.warning("%s takes hosts from lower bands: %s", taken.job_id, victims)
        self.counts.update(
            evicted=sum(len(taken.victims) for taken in result.evictions),
            starved=len(starved),
            timed_out=len(result.timed_out),
            unschedulable=len(result.unschedulable),
        )
