"""Finds room for a group of jobs, which run all together or not at all: now, or once others have left.

`together.py` tries the placements.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import accelerators
from iris_ray.scheduler.availabilities import Availabilities
from iris_ray.scheduler.availability import Availability, buckets_for, hosts_of, num_groups
from iris_ray.scheduler.candidate_cache import CandidateCache
from iris_ray.scheduler.eviction_costs import Running
from iris_ray.scheduler.evictions import Evictor
from iris_ray.scheduler.limits import Allowances
from iris_ray.scheduler.pending_reason import ReachedLimit
from iris_ray.scheduler.remaining_capacity import Plan
from iris_ray.scheduler.together import (
    FleetOnceLeft,
    GroupPlacement,
    PlacementFailure,
    only,
    place_on,
    place_together,
)
from iris_ray.scheduler.victims import Victims
from iris_ray.state.fleet import Fleet

VICTIMS_SPARED = 64
"""The number of a group's victims for which a plan tries whether they may stay."""


@dataclass(frozen=True, slots=True)
class GroupRoom:
    """Hosts on which a group fits once their occupants have ended, and the victims that are evicted from them."""

    node_ids: tuple[str, ...]
    victims: Victims = frozenset()


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
        comes_next: whether a starving group needs hosts promised to other jobs. Then the plan makes no promises to
            jobs after it, so that its turn comes once those jobs run.
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
        self.comes_next = False
        self._fleet = fleet
        self._cache = cache
        self._plan = plan
        self._available = available
        self._allowances = allowances
        self._running = running
        self._evictor = evictor
        self._now = now
        self._once_left: dict[tuple[int, Victims | None], FleetOnceLeft] = {}  # see `_fits_once_left`; the latest two

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

    def hosts_for(self, leader: Job, own: tuple[str, ...]) -> GroupRoom | None:
        """Return the hosts on which a group fits once their occupants have ended; None if there are too few.

        Also returns None if suitable hosts are promised to other jobs: only one of the competing jobs has a promise at
        a time. Spares, jobs that yield and lower bands leave if the group then runs.

        ``leader`` represents the group, and ``own`` has the hosts promised to it.
        """
        jobs, needs = self._running.jobs, [(job, self._available.to(job)) for job in leader.members]
        if own:
            is_firm = leader.promise is not None and leader.promise.is_firm
            left = [node_id for node_id in own if node_id not in self._plan.taken]  # by returning gangs, and on loan
            room = None if is_firm else self._evicting(leader, left, partial(self._fits_on, leader, left))
            return room or GroupRoom(own)
        if not jobs or any(self._too_few_exist(job, available) for job, available in needs):
            return None
        gangs = [(job, one) for job, one in needs if job.spec.coscheduling or accelerators(job.spec.resources)]
        if any(available.is_any_kept(buckets_for(job, available)) for job, available in gangs):
            self.comes_next = True
            return None
        away = self._plan.kept.keys() | self._plan.taken.keys()
        if (found := self._fits_once_left(leader, away)) is None:
            self.comes_next |= bool(away) and self._fits_once_left(leader, ()) is not None
            return None
        hosts = self._fleet.workers.keys() - away
        return self._evicting(leader, hosts, partial(self._fits_once_left, leader, away)) or GroupRoom(found)

    def _evicting(
        self, leader: Job, node_ids: Collection[str], find: Callable[[Victims], tuple[str, ...] | None]
    ) -> GroupRoom | None:
        """Return hosts, among these, on which a group fits as soon as its victims have left, or None.

        ``find`` returns the hosts on which it fits once some victims have left, or None.
        """
        victims = self._evictor.victims_of_group(leader, node_ids)
        found = find(victims) if victims else None
        if found is None:
            return None
        needed = self._evictor.victims_of_group(leader, found)
        for victim in sorted(needed)[:VICTIMS_SPARED]:
            fewer = needed - {victim}
            if self._fits_on(leader, found, fewer) is not None:
                needed = fewer
        return GroupRoom(found, needed) if needed and not self._evictor.over_budgets(needed, leader) else None

    @staticmethod
    def _too_few_exist(job: Job, available: Availability) -> bool:
        least = num_groups(job)[0] * (len(job.gangs) if job.spec.coscheduling else 1)
        return sum(available.suitable(bucket, later=True) for bucket in buckets_for(job, available)) < least

    def _fits_once_left(
        self, leader: Job, away: Collection[str], victims: Victims | None = None
    ) -> tuple[str, ...] | None:
        """Return hosts, without those in ``away``, on which a group fits once some occupants have left, or None.

        ``victims`` has the attempts that leave; None: all but the spares that may hold their hosts for ever.
        """
        idle = self._evictor.held_ready
        key = len(idle), victims  # spares may have left for other jobs
        if key not in self._once_left:
            stays = self._stays if victims is None else lambda attempt: attempt not in victims
            self._once_left = dict([*self._once_left.items()][-1:])
            self._once_left[key] = FleetOnceLeft(self._fleet, self._fleet.workers.values(), self._now, stays)
        return self._hosts_of(self._once_left[key].place(leader.members, away, self._allowances))

    def _stays(self, attempt: AttemptId) -> bool:
        """Return whether an attempt may hold its hosts for ever: a spare that does not leave."""
        held = self._running.jobs.get(attempt.job_id)
        return held is not None and held.spec.spare_for is not None and attempt not in self._evictor.held_ready

    def _fits_on(self, leader: Job, node_ids: Iterable[str], victims: Victims) -> tuple[str, ...] | None:
        """Return hosts, among these, on which a group fits within its limits once some victims have left, or None."""
        hosts = [self._fleet.workers[node_id] for node_id in node_ids]
        there = FleetOnceLeft(self._fleet, hosts, self._now, lambda attempt: attempt not in victims)
        return self._hosts_of(there.place(leader.members, (), self._allowances))

    def _hosts_of(self, found: GroupPlacement | PlacementFailure) -> tuple[str, ...] | None:
        """Return the hosts of a placement; None for a failure, whose limit is recorded."""
        if isinstance(found, PlacementFailure):
            self.limit = found.limit or self.limit
            return None
        return tuple(dict.fromkeys(node_id for one in found.assignments for node_id in hosts_of(one)))

    def fits_on(self, leader: Job, node_ids: Collection[str]) -> bool:
        """Return whether a group fits on the hosts promised to it once their occupants have ended.

        If the promise has victims, only attempts that leave count as ended. Suspicions of the hosts end, too.
        """
        hosts = [replace(self._fleet.workers[node_id], suspected=None) for node_id in node_ids]
        is_firm, leaving = leader.promise is not None and leader.promise.is_firm, self._evictor.leaving()
        there = FleetOnceLeft(self._fleet, hosts, self._now, lambda attempt: is_firm and attempt not in leaving)
        return isinstance(there.place(leader.members, (), None), GroupPlacement)
