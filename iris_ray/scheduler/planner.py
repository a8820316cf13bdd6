"""From the state to a plan, and from the plan to committed assignments."""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from iris_ray.model.jobs import Gang, Job
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.result import SchedulingResult
from iris_ray.scheduler.scheduler import Scheduler
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import TaskAssignedEvent
from iris_ray.state.instructions import Instructions, ReclaimSlice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """A gang that a plan has given hosts.

    Attributes:
        job, gang: which.
        reclaim: slices that other owners must release first.
    """

    job: Job
    gang: Gang
    reclaim: list[ReclaimSlice]


class Planner:
    """Asks the scheduler and commits what it proposes.

    Args:
        state: is planned for, and changed by what is committed.
        look_again_s: after so many seconds a plan is made anew though nothing has changed: pauses and other time limits
            may have passed.
        scheduler: makes the plans.
        most_placed: gangs that one plan places at most, see `Scheduler.find_assignments`; None: all that it can.

    Attributes:
        pending_reasons: why each pending job waits, by job id, from the latest plan that has looked at it.
        unfinished: whether the latest plan ended before the queue did, and another one is to go on.
        counts: jobs that starved, timed out or turned out to be unschedulable, since this Controller began.
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
        self._looked_at: Mapping[str, PendingReason] = {}  # those of the pending reasons that are of the latest plan
        self._starved: set[str] = set()
        self._planned_for = (0, 0)
        self._planned_at = 0.0

    def plan(self, now: float, instructions: Instructions) -> list[Placement]:
        """Place what can be placed, and commit it.

        Args:
            now: seconds since the epoch.
            instructions: what the commits want done besides is added here.
        """
        state = self._state
        recent, fleet_version = now < self._planned_at + self._look_again_s, self._planned_for[0]
        versions = state.fleet.version, state.queue_version
        if recent and not self.unfinished and self._planned_for == versions:
            return []  # nothing has changed that a plan depends on
        still_waiting = self._looked_at if recent and fleet_version == state.fleet.version else None
        if still_waiting is None:
            self._planned_at = now
        result = self._scheduler.find_assignments(
            state.pending(), state.fleet, state.usage, now, still_waiting, self._most_placed
        )
        self._note_reasons(result)
        self._count(result)
        queue_version = state.queue_version
        placements = self._commit(result, instructions)
        done = state.queue_version == queue_version  # else some gang got spares to be placed, or needs fewer
        if done:
            self._planned_for = state.fleet.version, state.queue_version  # its own assignments leave nothing to place
        apply_all(state, (*result.timed_out, *result.unschedulable), instructions)
        self.unfinished = not result.complete
        return placements if done or self.unfinished else placements + self.plan(now, instructions)

    def _note_reasons(self, result: SchedulingResult) -> None:
        """Keep the reasons of jobs that an unfinished plan has not reached."""
        self._looked_at = result.pending_reasons
        not_reached = {} if result.complete else self.pending_reasons
        self.pending_reasons = {**not_reached, **result.pending_reasons}

    def look_again(self) -> None:
        """Make the next plan anew, though nothing may have changed: a time limit has passed."""
        self._planned_at = -math.inf

    def _commit(self, result: SchedulingResult, instructions: Instructions) -> list[Placement]:
        placements = []
        for assignment in result.assignments:
            wanted = self._state.handle_event(assignment)
            instructions.add(wanted)
            job = self._state.jobs[assignment.job_id]
            gang = job.gang_of(assignment.task_index) if isinstance(assignment, TaskAssignedEvent) else job.gang
            placements.append(Placement(job, gang, wanted.reclaim))
        return placements

    def _count(self, result: SchedulingResult) -> None:
        """Log and count what did not go as its owner hoped, once for each job."""
        starved = [job_id for job_id in result.starving if job_id not in self._starved]
        self._starved = {*result.starving} if result.complete else {*self._starved, *result.starving}
        for job_id in starved:
            logger.warning("%s starves: %s", job_id, result.pending_reasons[job_id])
        for event in (*result.timed_out, *result.unschedulable):
            logger.warning("%s is given up: %s", event.job_id, event.reason)
        self.counts.update(
            starved=len(starved), timed_out=len(result.timed_out), unschedulable=len(result.unschedulable)
        )
