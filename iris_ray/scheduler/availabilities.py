"""The groups that are available to each job during a plan."""

from bisect import bisect_left

from iris_ray.model.jobs import Job
from iris_ray.model.requirement import Requirement
from iris_ray.scheduler.availability import Availability, buckets_for, num_groups
from iris_ray.scheduler.candidate_cache import CandidateCache
from iris_ray.scheduler.candidates import Preferences
from iris_ray.scheduler.remaining_capacity import Plan, RemainingCapacity
from iris_ray.state.fleet import Fleet
from iris_ray.state.quarantine import avoided_by


class Availabilities:
    """Makes each `Availability` when it is first needed."""

    def __init__(self, fleet: Fleet, cache: CandidateCache, plan: Plan, now: float) -> None:
        self._fleet = fleet
        self._cache = cache
        self._plan = plan
        self._now = now
        self._available: dict[Requirement, Availability] = {}
        self._elsewhere: dict[tuple[Requirement, tuple[str, ...]], Availability] = {}  # without avoided hosts
        self._remaining: dict[tuple[Requirement, Preferences], RemainingCapacity] = {}  # by shape and preferences

    def __contains__(self, requirement: Requirement) -> bool:
        return requirement in self._available

    def to(self, job: Job) -> Availability:
        """Return the groups available to a job. Hosts that it avoids are included only if the others are too few.

        As few as possible are included, and those first that failed first. So the job tries one after the other.
        """
        available = self._to_all(job.requirement)
        if not job.avoided and job.spec.user not in self._fleet.avoided:
            return available
        avoided = self._fleet.avoided_by(job.spec.user, self._now) + avoided_by(job, self._now)

        def suffice_without(start: int) -> bool:
            elsewhere = self._without(avoided[start:], available)
            return sum(map(elsewhere.suitable, buckets_for(job, elsewhere))) >= num_groups(job)[0]

        every = range(len(avoided))
        start = 0 if avoided and suffice_without(0) else bisect_left(every, True, key=suffice_without)
        return self._without(avoided[start:], available) if start < len(avoided) else available

    def forget_failures(self) -> None:
        """Discard the record of gangs that found too few groups, because hosts have become free."""
        for available in (*self._available.values(), *self._elsewhere.values()):
            available.failed_placements.clear()

    def _without(self, avoided: tuple[str, ...], available: Availability) -> Availability:
        key = available.requirement, avoided
        elsewhere = self._elsewhere.get(key)
        if elsewhere is None:
            workers = (self._fleet.workers.get(node_id) for node_id in avoided)
            elsewhere = available.without([worker for worker in workers if worker is not None])
            self._elsewhere[key] = elsewhere
        return elsewhere

    def _to_all(self, requirement: Requirement) -> Availability:
        available = self._available.get(requirement)
        if available is None:
            remaining = self._remaining_of(requirement)
            available = self._available[requirement] = Availability(requirement, remaining, self._now)
        return available

    def _remaining_of(self, requirement: Requirement) -> RemainingCapacity:
        key = requirement.shape, requirement.preferences
        remaining = self._remaining.get(key)
        if remaining is None:
            ranking = self._cache.ranking(self._fleet, *key, self._now)
            remaining = self._remaining[key] = RemainingCapacity(ranking, self._plan)
        return remaining
