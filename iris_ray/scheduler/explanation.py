"""Makes pending reasons: why a gang got nothing, and which groups come closest."""

from dataclasses import dataclass
from itertools import islice

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.availability import Availability
from iris_ray.scheduler.evaluation import Status
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Protected, ReachedLimit, Shortage
from iris_ray.scheduler.placement import buckets_for, num_groups
from iris_ray.scheduler.plan import Plan
from iris_ray.state.fleet import Fleet

OBSTACLES_NAMED = 4
"""How many groups a shortage names."""

GIVEN_AWAY_LOOKED_AT = 64
"""Among how many groups that the plan has changed a shortage looks for some that the job could have had."""


@dataclass(slots=True)  # not frozen, for the same reason as `PendingReason`
class Unplaced:
    """A job that found too few groups.

    Attributes:
        job: the job.
        available: where it looked.
        free: how many groups were free at its turn.
        ahead: how many jobs with the same requirement came before it and found too few.
        kept: names of the groups that are kept for it.
        avoided: names of the groups that it avoids, wholly or in part, because launches have failed there.
        taken_from: ids of jobs of lower bands that give it hosts.
        protected: what it may take from lower bands later, or None.
    """

    job: Job
    available: Availability
    free: int
    ahead: int
    kept: tuple[str, ...]
    avoided: tuple[str, ...] = ()
    taken_from: tuple[str, ...] = ()
    protected: Protected | None = None


class Explainer:
    """Explains, once a plan is made, why jobs got nothing. Jobs with the same requirement share a shortage."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self._fleet = fleet
        self._plan = plan
        self._shortages: dict[Availability, Shortage] = {}
        self._causes: dict[tuple[Availability, tuple[int, ...]], tuple[PendingKind, int]] = {}

    def reason(self, unplaced: Unplaced) -> PendingReason:
        """Return why a job waits."""
        job, available = unplaced.job, unplaced.available.to_all
        shortage, wanted, avoided = self._shortage(available), num_groups(job), unplaced.avoided
        kind, suitable = self._cause(job, available, shortage, wanted)
        return PendingReason(
            job.spec.job_id,
            kind,
            job.requirement,
            wanted,
            unplaced.free,
            suitable,
            shortage,
            unplaced.ahead,
            available.unplaced[0] if unplaced.ahead else None,
            unplaced.kept,
            tuple(self._display_name(name, job.requirement) for name in avoided) if avoided else (),
            unplaced.taken_from,
            unplaced.protected,
        )

    def _cause(
        self, job: Job, available: Availability, shortage: Shortage, wanted: tuple[int, ...]
    ) -> tuple[PendingKind, int]:
        """Return what kind of reason it is, and how many groups suit the job."""
        cause = self._causes.get((available, wanted))
        if cause is None:
            suitable = sum(map(available.suitable, buckets_for(job, available)))
            if suitable >= wanted[0]:
                kind = PendingKind.IN_USE
            else:
                kind = PendingKind.TOO_FEW if suitable or shortage.closest else PendingKind.NO_SUCH_WORKERS
            cause = self._causes[available, wanted] = kind, suitable
        return cause

    def _shortage(self, available: Availability) -> Shortage:
        shortage = self._shortages.get(available)
        if shortage is None:
            shortage = self._shortages[available] = self._new_shortage(available, available.requirement)
        return shortage

    def _new_shortage(self, available: Availability, requirement: Requirement) -> Shortage:
        available.catch_up()
        names = dict.fromkeys(islice(available.given_away(GIVEN_AWAY_LOOKED_AT), OBSTACLES_NAMED))
        names |= dict.fromkeys(available.closest(OBSTACLES_NAMED))
        closest = tuple(self._obstacle(available, name) for name in islice(names, OBSTACLES_NAMED))
        return Shortage(
            tuple((_name_of(what, requirement), count) for what, count in (+available.candidates.excluded).items()),
            closest,
            more=available.not_free - len(closest),
            slice_types={} if closest else self._fleet.slice_types(),
            groups=len(available.candidates.grouping),
        )

    def _obstacle(self, available: Availability, name: str) -> Obstacle:
        shown, found = self._display_name(name, available.requirement), available.evaluation(name)
        node_ids, plan = available.group(name).node_ids, self._plan
        kept_for = next((plan.kept[node_id] for node_id in node_ids if node_id in plan.kept), None)
        if found.status is not Status.FREE:
            then = "" if kept_for is None else f", then kept for {kept_for}"
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
