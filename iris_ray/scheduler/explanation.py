"""Makes pending reasons: why a gang got nothing, and which groups come closest."""

from collections.abc import Iterator
from itertools import chain, islice

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.availability import Availability, FailedPlacement
from iris_ray.scheduler.pending_reason import Obstacle, PendingKind, PendingReason, Shortage
from iris_ray.scheduler.placement import num_groups
from iris_ray.state.fleet import Fleet

OBSTACLES_NAMED = 4
"""How many groups a shortage names."""


class Explainer:
    """Explains failed placements. Gangs with the same requirement share a shortage until the plan changes it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._shortages: dict[Requirement, tuple[int, Shortage]] = {}  # with the version of the availability

    def failed_placement(self, job: Job, available: Availability, buckets: tuple[int, ...]) -> FailedPlacement:
        """Explain why a gang of the job, and any like it, gets no groups."""
        wanted = num_groups(job)
        suitable = sum(available.candidates.suitable[bucket] for bucket in buckets)
        shortage = self._shortage(available)
        if suitable >= wanted[0]:
            kind = PendingKind.IN_USE
        else:
            kind = PendingKind.TOO_FEW if suitable or shortage.closest else PendingKind.NO_SUCH_WORKERS
        return FailedPlacement(kind, wanted, sum(map(available.free, buckets)), suitable, shortage)

    def _shortage(self, available: Availability) -> Shortage:
        candidates = available.candidates
        requirement = candidates.requirement
        known = self._shortages.get(requirement)
        if known is not None and known[0] == available.version:
            return known[1]
        closest = tuple(islice(chain(self._given_away(available), self._not_free(available)), OBSTACLES_NAMED))
        shortage = Shortage(
            tuple((_name_of(what, requirement), count) for what, count in (+candidates.excluded).items()),
            closest,
            more=len(available.given_away) + len(candidates.closest) - len(closest),
            slice_types={} if closest else self._fleet.slice_types(),
        )
        self._shortages[requirement] = available.version, shortage
        return shortage

    def _given_away(self, available: Availability) -> Iterator[Obstacle]:
        candidates = available.candidates
        requirement = candidates.requirement
        for name, job_id, is_kept in available.given_away:
            yield Obstacle(
                self._display_name(name, requirement),
                candidates.evaluations[name].bucket or requirement.replicas,
                f"{'is kept for' if is_kept else 'goes to'} {job_id}",
                (job_id,),
            )

    def _not_free(self, available: Availability) -> Iterator[Obstacle]:
        candidates = available.candidates
        for hosts_missing, _, name in candidates.closest:
            found = candidates.evaluations[name]
            shown = self._display_name(name, candidates.requirement)
            yield Obstacle(shown, hosts_missing, found.obstacle, found.used_by)

    def _display_name(self, name: str, requirement: Requirement) -> str:
        """Return a group's name for people. A host that is a group by itself is named by its slice or its address."""
        worker = self._fleet.workers.get(name) if requirement.group_by is None else None
        if worker is None:
            return name
        return f"{worker.slice_name} {worker.name}" if worker.slice_name else f"host {worker.address}"


def pending_reason(job: Job, failed: FailedPlacement, available: Availability, kept: tuple[str, ...]) -> PendingReason:
    """Return why the job waits after a failed placement."""
    ahead = available.unplaced
    return PendingReason(
        job.spec.job_id,
        failed.kind,
        job.requirement,
        failed.num_groups,
        failed.free,
        failed.suitable,
        failed.shortage,
        len(ahead),
        ahead[0] if ahead else None,
        kept,
    )


def paused(job: Job, pause_s: float, cause: str | None, kept: tuple[str, ...]) -> PendingReason:
    """Return why the job waits if it is not tried for some seconds after a failed launch."""
    pause = pause_s, cause or "unknown cause"
    return PendingReason(job.spec.job_id, PendingKind.PAUSED, job.requirement, num_groups(job), kept=kept, pause=pause)


def _name_of(what: int | str, requirement: Requirement) -> str:
    """Return a constraint (by position) or a taint (by name) in words."""
    return what if isinstance(what, str) else str(requirement.constraints[what])
