"""Finds room for a group of jobs, which run all together or not at all: now, or once others have left.

`together.py` tries the placements.
"""

from collections.abc import Callable, Collection, Iterable

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import accelerators
from iris_ray.scheduler.availabilities import Availabilities
from iris_ray.scheduler.availability import Availability, buckets_for, hosts_of, num_groups
from iris_ray.scheduler.candidate_cache import CandidateCache
from iris_ray.scheduler.evictions import Evictor, Taking
from iris_ray.scheduler.limits import Allowances
from iris_ray.scheduler.pending_reason import ReachedLimit
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.together import (
    FleetOnceEmpty,
    GroupPlacement,
    PlacementFailure,
    only,
    place_on,
    place_together,
    without_what_ends,
)
from iris_ray.scheduler.victims import Running
from iris_ray.state.fleet import Fleet

VICTIMS_SPARED = 64
"""The number of a group's victims for which a plan tries whether they may stay."""


class GroupRooms:
    """Finds room for groups during a plan.

    Args:
        fleet, cache: the workers, and the evaluations of their groups.
        plan: the hosts that the plan has taken so far.
        available: the groups available to each job.
        allowances: the resources that each user and team may still get.
        running, evictor: the running attempts, and who may leave.
        now: seconds on the clock of the events.

    Attributes:
        limit: the limit at which the latest trial ended, or None.
    """

    def __init__(
        self,
        fleet: Fleet,
        cache: CandidateCache,
        plan: Plan,
        available: Availabilities,
        allowances: Allowances,
        running: Running,
        evictor: Evictor,
        now: float,
    ) -> None:
        self.limit: ReachedLimit | None = None
        self._fleet = fleet
        self._cache = cache
        self._plan = plan
        self._available = available
        self._allowances = allowances
        self._running = running
        self._evictor = evictor
        self._now = now
        self._once_empty: FleetOnceEmpty | None = None
        self._idle_once_empty = 0

    def place(self, leader: Job, own: Collection[str]) -> GroupPlacement | PlacementFailure:
        """Return a placement for a group, preferably on the hosts promised to it, where it is known to fit."""
        members, now, allowances = leader.members, self._now, self._allowances
        if own:
            workers = (self._fleet.workers[node_id] for node_id in own)
            there = only(workers)
            if isinstance(found := place_on(members, there, now, allowances, given_away=self._plan), GroupPlacement):
                return found
        about = self._fleet, self._cache, self._plan, self._available
        return place_together(members, *about, now, allowances)

    def hosts_for(self, leader: Job, own: tuple[str, ...], comes_next: Callable[[], None]) -> Taking | None:
        """Return the hosts on which a group fits once their occupants have ended; None if there are too few.

        Also returns None if suitable hosts are promised to other jobs: only one of the competing jobs has a promise at
        a time. Spares and jobs that yield leave at once, and lower bands if the group then runs.

        Args:
            leader: the job that represents the group.
            own: the hosts promised to it.
            comes_next: is called if it needs hosts promised to other jobs, so that no more promises are made before it.
        """
        jobs, needs = self._running.jobs, [(job, self._available.to(job)) for job in leader.members]
        if own:
            is_firm = leader.promise is not None and leader.promise.is_firm
            taking = None if is_firm else self._evicting(leader, own)
            return taking or self._evictor.leave_for_group(leader, own)
        if not jobs or any(self._too_few_exist(job, available) for job, available in needs):
            return None
        gangs = [(job, one) for job, one in needs if job.spec.coscheduling or accelerators(job.spec.resources)]
        if any(available.is_any_kept(buckets_for(job, available)) for job, available in gangs):
            comes_next()
            return None
        away = self._plan.kept.keys() | self._plan.taken.keys()
        if not self._would_fit_once_empty(leader, away):
            if away and self._would_fit_once_empty(leader, ()):
                comes_next()
            return None
        hosts = [node_id for node_id in self._fleet.workers if node_id not in away]
        if (taking := self._evicting(leader, hosts)) is not None:
            return taking
        if (node_ids := self._would_fit_on(leader, hosts, self._stays)) is not None:
            return self._evictor.leave_for_group(leader, node_ids)
        return None

    def _stays(self, attempt: AttemptId) -> bool:
        """Return whether an attempt may hold its hosts for ever: a spare that does not leave."""
        held = self._running.jobs.get(attempt.job_id)
        return held is not None and held.spec.spare_for is not None and attempt not in self._evictor.held_ready

    def _evicting(self, leader: Job, node_ids: Collection[str]) -> Taking | None:
        """Return hosts, among these, on which a group fits as soon as its victims have left, or None."""
        victims = self._evictor.victims_of_group(leader, node_ids)
        found = self._would_fit_on(leader, node_ids, lambda attempt: attempt not in victims) if victims else None
        if found is None:
            return None
        needed = self._evictor.victims_of_group(leader, found)
        for victim in sorted(needed)[:VICTIMS_SPARED]:
            fewer = needed - {victim}
            if self._would_fit_on(leader, found, lambda attempt, fewer=fewer: attempt not in fewer) is not None:  # type: ignore[misc]
                needed = fewer
        return self._evictor.leave_for_group(leader, found, needed) if self._may_leave(needed, leader) else None

    def _may_leave(self, victims: Collection[AttemptId], leader: Job) -> bool:
        return bool(victims) and self._evictor.are_within_budgets(victims, leader)

    @staticmethod
    def _too_few_exist(job: Job, available: Availability) -> bool:
        least = num_groups(job)[0] * (len(job.gangs) if job.spec.coscheduling else 1)
        return sum(available.suitable(bucket, later=True) for bucket in buckets_for(job, available)) < least

    def _would_fit_once_empty(self, leader: Job, away: Collection[str]) -> bool:
        """Return whether a group would fit, without the hosts in ``away``, if only spares that don't leave stayed."""
        idle = len(self._evictor.held_ready)
        if self._once_empty is None or idle < self._idle_once_empty:  # spares have left for jobs
            self._once_empty = FleetOnceEmpty(self._fleet, self._now, self._stays)
            self._idle_once_empty = idle
        found = self._once_empty.place(leader.members, away, self._allowances)
        if isinstance(found, PlacementFailure):
            self.limit = found.limit or self.limit
        return isinstance(found, GroupPlacement)

    def _would_fit_on(
        self, leader: Job, node_ids: Iterable[str], stays: Callable[[AttemptId], bool]
    ) -> tuple[str, ...] | None:
        """Return hosts, among these, on which a group fits within its limits once all but some occupants have ended."""
        hosts, now = [self._fleet.workers[node_id] for node_id in node_ids], self._now
        staying = {who for worker in hosts for who in worker.occupants if who not in worker.ending and stays(who[1])}
        in_use = {worker.slice_name for worker in hosts if worker.occupants}
        free = {worker.slice_name for worker in hosts if worker.slice_name and worker.slice_name not in in_use}
        there = without_what_ends(self._fleet, hosts, now, staying)
        found = place_on(leader.members, there, now, self._allowances, prefer=free)
        if isinstance(found, PlacementFailure):
            self.limit = found.limit or self.limit
            return None
        return tuple(dict.fromkeys(node_id for one in found.assignments for node_id in hosts_of(one)))

    def fits_on(self, leader: Job, node_ids: Collection[str]) -> bool:
        """Return whether a group fits on the hosts promised to it once their occupants have ended.

        If the promise has victims, only attempts that leave count as ended.
        """
        hosts, now = [self._fleet.workers[node_id] for node_id in node_ids], self._now
        is_firm, leaving = leader.promise is not None and leader.promise.is_firm, self._evictor.leaving()
        there = (who for host in hosts for who in host.occupants.keys() - host.ending.keys())
        staying = {who for who in there if is_firm and who[1] not in leaving}
        left = without_what_ends(self._fleet, hosts, now, staying)
        return isinstance(place_on(leader.members, left, now), GroupPlacement)
