"""Makes pending reasons: why a gang got nothing, and which groups come closest."""

from itertools import islice
from typing import NamedTuple

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Protected, ReachedLimit, Shortage
from iris_ray.scheduler.placement import buckets_for, num_groups
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.state.fleet import Fleet

OBSTACLES_NAMED = 4
"""How many groups a shortage names."""

GIVEN_AWAY_LOOKED_AT = 64
"""Among how many groups that the plan has changed a shortage looks for some that the job could have had."""


_Cause = tuple[PendingKind, int, Shortage]
"""What kind of reason it is, how many groups suit the job, and what is in the way."""


class Unplaced(NamedTuple):
    """A job that found too few groups.

    Attributes:
        job: the job.
        available: where it looked.
        reason: why it waits.
    """

    job: Job
    available: Availability
    reason: PendingReason


class Explainer:
    """Explains why jobs got nothing. Jobs with the same requirement share a shortage."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self._fleet = fleet
        self._plan = plan
        self._shortages: dict[Availability, Shortage] = {}
        self._causes: dict[tuple[Availability, tuple[int, ...]], _Cause] = {}

    def reason(
        self,
        job: Job,
        available: Availability,
        free: int,
        kept: tuple[str, ...],
        taken_from: tuple[str, ...],
        protected: Protected | None,
    ) -> PendingReason:
        """Return why a job waits, and count it among the unplaced jobs. Its shortage is empty until `complete`.

        Args:
            job: the job.
            available: where it looked.
            free: how many groups were free at its turn.
            kept: names of the groups that are kept for it.
            taken_from: ids of jobs of lower bands that give it hosts.
            protected: what it may take from lower bands later, or None.
        """
        to_all, wanted = available.to_all, num_groups(job)
        kind, suitable, shortage = self._causes.get((to_all, wanted)) or self._cause(job, to_all, wanted)
        avoided, ahead = available.impaired, to_all.unplaced
        reason = PendingReason(
            job.spec.job_id,
            kind,
            job.requirement,
            wanted,
            free,
            suitable,
            shortage,
            len(ahead),
            ahead[0] if ahead else None,
            kept,
            tuple(self._display_name(name, job.requirement) for name in avoided) if avoided else (),
            taken_from,
            protected,
        )
        ahead.append(job.spec.job_id)
        return reason

    def same_reason(self, job: Job, before: Unplaced) -> PendingReason:
        """Return why a job waits that fares as one before it, for which nothing is kept; count it as `reason` does."""
        like, ahead = before.reason, before.available.to_all.unplaced
        reason = PendingReason(
            job.spec.job_id,
            like.kind,
            job.requirement,
            like.num_groups,
            like.free,
            like.suitable,
            like.shortage,
            len(ahead),
            ahead[0],
            (),
            like.avoided,
        )
        ahead.append(job.spec.job_id)
        return reason

    def complete(self) -> None:
        """Fill in the shortages: what is in the way once the whole plan is made."""
        for available, shortage in self._shortages.items():
            self._fill_in(shortage, available)

    def _cause(self, job: Job, available: Availability, wanted: tuple[int, ...]) -> _Cause:
        suitable = sum(map(available.suitable, buckets_for(job, available)))
        if suitable >= wanted[0]:
            kind = PendingKind.IN_USE
        else:
            kind = PendingKind.TOO_FEW if suitable or available.not_free else PendingKind.NO_SUCH_WORKERS
        cause = self._causes[available, wanted] = kind, suitable, self._shortages.setdefault(available, Shortage())
        return cause

    def _fill_in(self, shortage: Shortage, available: Availability) -> None:
        available.catch_up()
        names = dict.fromkeys(islice(available.given_away(GIVEN_AWAY_LOOKED_AT), OBSTACLES_NAMED))
        names |= dict.fromkeys(available.closest(OBSTACLES_NAMED))
        excluded, need = (+available.candidates.excluded).items(), available.requirement
        shortage.excluded = tuple((_name_of(what, need), count) for what, count in excluded)
        shortage.closest = tuple(self._obstacle(available, name) for name in islice(names, OBSTACLES_NAMED))
        shortage.more = available.not_free - len(shortage.closest)
        shortage.slice_types = {} if shortage.closest else self._fleet.slice_types()
        shortage.groups = len(available.candidates.grouping)

    def _obstacle(self, available: Availability, name: str) -> Obstacle:
        shown, found = self._display_name(name, available.requirement), available.evaluation(name)
        node_ids, plan = available.group(name).node_ids, self._plan
        kept_for = next((plan.kept[node_id] for node_id in node_ids if node_id in plan.kept), None)
        if found.status is not Status.FREE:
            then = f", then kept for {kept_for}" if kept_for and found.status is Status.IN_USE else ""
            return Obstacle(shown, found.hosts_missing, found.obstacle + then, found.used_by)
        if kept_for is not None:
            return Obstacle(shown, available.tasks(name), f"is kept for {kept_for}", (kept_for,))
        taker = next(plan.takers[node_id] for node_id in node_ids if node_id in plan.takers)
        return Obstacle(shown, available.tasks(name), f"goes to {taker}", (taker,))

    def _display_name(self, name: str, requirement: Requirement) -> str:
        """Return a group's name for people. A host that is a group by itself is named by its slice or its address."""
        worker = self._fleet.workers.get(name) if requirement.group_by is None else None
        if worker is None:
            return name
        return f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"


def paused(job: Job, pause_s: float, cause: str | None) -> PendingReason:
    """Return why the job waits if it is not tried for some seconds after a failed launch."""
    pause = pause_s, cause or "unknown cause"
    return PendingReason(job.spec.job_id, PendingKind.PAUSED, job.requirement, num_groups(job), pause=pause)


def not_looked_at(job: Job) -> PendingReason:
    """Return why the job waits if the plan has not looked at it; see `EvaluationLimits`."""
    return PendingReason(job.spec.job_id, PendingKind.NOT_LOOKED_AT, job.requirement, num_groups(job))


def limited(job: Job, reached: ReachedLimit, kept: tuple[str, ...]) -> PendingReason:
    """Return why the job waits if its user has reached a limit."""
    return PendingReason(
        job.spec.job_id, PendingKind.LIMITED, job.requirement, num_groups(job), kept=kept, limit=reached
    )


def _name_of(what: int | str, requirement: Requirement) -> str:
    """Return a constraint (by position) or a taint (by name) in words."""
    return what if isinstance(what, str) else str(requirement.constraints[what])
