"""Attempts of lower bands that leave their slices, so that a waiting gang of another type can have the chips. Pure.

A provisioner names the slices of other types that it could delete, and how many chips the gang lacks. Here whole slices
are chosen among them so that their chips suffice: slices without tasks, and slices whose attempts may be evicted for
the gang's job by the scheduler's rules (`EvictionCosts`), those that lose the least work. Only attempts of lower bands,
spares and jobs that yield leave, within the eviction budgets of jobs, users and teams. Slices of the gang's own type
may be among them. These stay: the gang uses them, together with those that are free already.

The result is a promise (`Promise.removed_by`): the hosts are reserved for the job, and the victims get a notice. Once
all of them have left, the provisioner deletes the slices. If the promise ends before, the remaining victims continue.

If too few can leave, slices are held for a job that waits for too long (`holding.py`): a promise without victims, which
ends unless the provisioner asks again. Meanwhile they are lent. Borrowers leave once their slices suffice with them.

Where teams have quotas, a job that borrows comes after jobs of lower bands within quota. Such jobs do not leave for it:
they would get the slices again before it could have the chips.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import chain, islice

from iris_ray.capacity.demand import awaited_slices, demand_of, has_room, reserved_slices
from iris_ray.capacity.holding import slices_to_hold
from iris_ray.capacity.reservations import Holder, cover
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.plain_values import Words
from iris_ray.model.requirement import Requirement
from iris_ray.model.workers import TPU_NAME, UNCONFIRMED_S, Worker
from iris_ray.scheduler.eviction_costs import Cost, EvictionCosts, EvictionRules
from iris_ray.scheduler.evictions import OWNERS_SPARED, leaves_for, may_evict
from iris_ray.scheduler.fair_queue import Tier, comes_last
from iris_ray.scheduler.limits import least_chips
from iris_ray.scheduler.pending_reason import PendingKind, PendingReason
from iris_ray.scheduler.planner import running
from iris_ray.scheduler.team_quotas import QuotaSource, TeamQuotas
from iris_ray.scheduler.victims import Victims
from iris_ray.state import ControllerState
from iris_ray.state.attempt_ends import Owner
from iris_ray.state.events import PromiseEvent

MOST_SECONDS = 600.0
"""The longest time that slices stay reserved after the last victim has left, for a provisioner that has died."""
MOST_SLICES = 200
"""The number of slices among which a search chooses, or as many as have twice the chips that are lacking."""
_NOT_FOR_HOSTS = PendingKind.LIMITED, PendingKind.HELD_BACK

Waits = Sequence[tuple[Job, PendingReason]]


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """A slice that a provisioner could delete once no task runs there."""

    name: str
    tpu_type: str
    chips: int


@dataclass(frozen=True, slots=True)
class ChipsWanted:
    """The chips that a gang lacks.

    Attributes:
        job_id: its job.
        chips: how many. 0: the job needs no slices to be removed any more.
        slices: the slices that could go, or that the gang could use, the preferred ones first.
        most_of_type: how many slices of each type may go.
        seconds: how long the provisioner needs to delete slices that have become free, or to ask again.
        may_hold: whether slices may be held for the gang until enough of them are idle.
    """

    job_id: str
    chips: int
    slices: tuple[SharedSlice, ...] = ()
    most_of_type: tuple[tuple[str, int], ...] = ()
    seconds: float = MOST_SECONDS
    may_hold: bool = True


@dataclass(frozen=True, slots=True)
class ChipsLeft:
    """The answer to `ChipsWanted`.

    Attributes:
        slices: the slices that are reserved for the job and that it can't use yet; none if they would not suffice.
        jobs: the jobs that leave them; none if the slices are only held.
        seconds: when the last of these has left, at the latest.
        why_not: why no slices are reserved.
        is_held: whether the slices are held until enough of them are idle. The provisioner must ask again before its
            time is over.
    """

    slices: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    seconds: float = 0.0
    why_not: Words = ""
    is_held: bool = False


def promise_for(
    wanted: ChipsWanted, state: ControllerState, rules: EvictionRules | None, waits: Waits, now: float
) -> PromiseEvent | str | None:
    """Return the event that makes, renews or ends the promise of slices for a gang; or why there is none.

    Return None if the slices are promised already, and for long enough.

    Args:
        wanted: what the gang lacks.
        state: the Controller's state.
        rules: the conditions for evictions; None: no evictions.
        waits: the jobs that wait, with their reasons.
        now: seconds on the clock of the events.
    """
    job = state.jobs.get(wanted.job_id)
    before = reserved_slices(job, state.fleet) if job is not None else ()
    if job is not None and job.promise is not None and before and job.promise.is_firm:
        return None if wanted.chips else PromiseEvent(wanted.job_id, (), reason="it needs the slices no more")
    demand = demand_of(state, waits, now, last=wanted.job_id)
    gang = next((one for one in demand if one.job_id == wanted.job_id), None)
    if job is None or not wanted.chips or gang is None or not (gang.may_take and gang.may_reserve):
        if before:
            return PromiseEvent(wanted.job_id, (), reason="it needs the slices no more")
        return "it does not wait for them, or may not have them now"
    waiting = [one for one, why in waits if why.kind not in _NOT_FOR_HOSTS]
    search = _Search(wanted, job, state, rules, waiting, now)
    if (own := search.free_of_own_type(gang.there)) is None:
        why = "others use slices of its type that were free"
        return PromiseEvent(wanted.job_id, (), reason=why) if before else why
    seconds = UNCONFIRMED_S + min(wanted.seconds, MOST_SECONDS)
    if rules is not None and (found := search.find()) is not None and found[1]:
        names, victims = found
        gangs = [state.jobs[a.job_id].gangs[a.gang] for a in victims]
        deadline = now + rules.grace_s
        leave_at = [gang.eviction.deadline if gang.eviction else gang.leaves_by(now, deadline) for gang in gangs]
        leave, removed_by = tuple(sorted(victims)), max([now, *leave_at]) + seconds
        return PromiseEvent(wanted.job_id, _hosts_of((*own, *names), state), leave, deadline, removed_by=removed_by)
    held = search.hold() if wanted.may_hold else ""  # the provisioner knows why not
    if isinstance(held, str):
        ends = PromiseEvent(wanted.job_id, (), reason=held or "its provisioner holds none for it")
        return ends if before else search.why_not(held)
    if {*own, *held} == {*before} and job.promise is not None and job.promise.removed_by >= now + seconds / 2:
        return None
    return PromiseEvent(wanted.job_id, _hosts_of((*own, *held), state), removed_by=now + seconds)


def _hosts_of(names: Iterable[str], state: ControllerState) -> tuple[str, ...]:
    return tuple(host.node_id for name in names for host in state.fleet.slice_workers(name))


def left_for(job_id: str, state: ControllerState, now: float) -> ChipsLeft:
    """Return the slices that are reserved for a job and that it can't use yet, and the jobs that leave them."""
    job = state.jobs.get(job_id)
    if job is None or job.promise is None or not (names := awaited_slices(job, state.fleet)):
        return ChipsLeft(why_not="others need the slices")
    if not job.promise.is_firm:
        return ChipsLeft(names, is_held=True)
    leaving = [one for one in state.evicted if str(one) in job.promise.given_up]
    gangs = (state.jobs[one.job_id].gangs[one.gang] for one in leaving)
    deadline = max((gang.eviction.deadline for gang in gangs if gang.eviction), default=now)
    return ChipsLeft(names, tuple(dict.fromkeys(one.job_id for one in leaving)), max(0.0, deadline - now))


class _Reserved(IntEnum):
    """How a host is reserved for another job: the job may lose it, since it comes later, or not."""

    TO_LATER_TIERS = 0
    TO_LATER_JOBS = 1
    FIRMLY = 2


class _Search:
    """A search for slices and victims. The arguments are those of `promise_for`, and the jobs that wait for hosts."""

    def __init__(
        self,
        wanted: ChipsWanted,
        job: Job,
        state: ControllerState,
        rules: EvictionRules | None,
        waiting: Iterable[Job],
        now: float,
    ) -> None:
        self._wanted, self._job, self._state, self._rules, self._now = wanted, job, state, rules, now
        self._most = dict(wanted.most_of_type)
        self._idle = {
            one.current_attempt(one.gang): one for one in (*state.spares(), *state.yielding()) if comes_last(one)
        }
        self._costs = EvictionCosts(running(state), rules, self._idle, now)
        self._quotas = TeamQuotas(state.teams, state.fleet, now)
        self._reclaim = self._quotas.reclaim(job, least_chips(job))
        self._tier = self._tier_of(job)
        self._spared: set[Owner] = set()
        others = [one for one in state.pending().others.values() if one is not job and one.promise is not None]
        self._promised = {
            node_id: self._comes_after(one) for one in others if one.promise for node_id in one.promise.node_ids
        }
        self._suits = _Suits({one.requirement for one in waiting if self._tier_of(one) < self._tier})
        self._slices = {one.name: one for one in wanted.slices if not self._is_free_for_job(one.name)}
        self._usable = {name for name in self._slices if self._is_usable(name)}
        self._there: dict[str, Victims] = {}
        for name in self._slices:
            hosts = state.fleet.slice_workers(name)
            if self._could_go(name, hosts, _Reserved.TO_LATER_TIERS):
                self._there[name] = frozenset(
                    who[1] for host in hosts for who in host.occupants.keys() - host.ending.keys()
                )
        lent, own = job.promise.lent if job.promise is not None else (), reserved_slices(job, state.fleet)
        there = chain.from_iterable(self._there.get(name, ()) for name in own)
        self._lent = {one for one in there if one.job_id in lent and leaves_for(state.jobs[one.job_id], job)}

    def _comes_after(self, other: Job) -> "_Reserved":
        """Return how a job with a reservation compares to this one."""
        assert other.promise is not None
        if other.promise.is_firm:
            return _Reserved.FIRMLY
        tier = self._tier_of(other)
        if tier == self._tier:
            return _Reserved.TO_LATER_JOBS if other.number > self._job.number else _Reserved.FIRMLY
        return _Reserved.TO_LATER_TIERS if tier > self._tier else _Reserved.FIRMLY

    def _tier_of(self, job: Job) -> Tier:
        """Return a waiting job's place in the queue."""
        source = self._quotas.quota_source(job, least_chips(job))
        return source if isinstance(source, QuotaSource) else source.in_turn_as, job.spec.priority

    def _tier_after(self, victim: Job) -> Tier:
        """Return the first place in the queue that a job may have once it and others of its team have left."""
        source = self._quotas.quota_source_without(victim, least_chips(victim), PriorityBand)
        return source if isinstance(source, QuotaSource) else source.in_turn_as, victim.spec.priority

    def free_of_own_type(self, count: int) -> tuple[str, ...] | None:
        """Return a number of slices of its type that are free for the job, or None if there are fewer.

        Those that are reserved for it come first.
        """
        fleet = self._state.fleet
        names = dict.fromkeys((*reserved_slices(self._job, fleet), *fleet.grouping(TPU_NAME))) if count else ()
        free = (name for name in names if self._is_free_for_job(name) and self._is_usable(name))
        most = _Reserved.TO_LATER_TIERS
        found = (*islice((name for name in free if self._is_left(fleet.slice_workers(name), most)), count),)
        return found if len(found) == count else None

    def _is_free_for_job(self, name: str) -> bool:
        """Return whether the job could use a slice now as far as tasks and its conditions are concerned."""
        need, hosts = self._job.requirement, self._state.fleet.slice_workers(name)
        return has_room(name, self._job, self._state.fleet) and all(
            need.tolerated.issuperset(host.taints) and _suits(need, host) for host in hosts
        )

    def find(self, patient: bool = False) -> tuple[tuple[str, ...], Victims] | None:
        """Return the slices that go and the attempts that leave them, within all eviction budgets; None: too few chips.

        ``patient``: whether attempts count that have not yet run for the minimum time.
        """
        if not may_evict(self._job):
            return None
        for _ in range(OWNERS_SPARED + 1):
            found = self._find(patient)
            if found is None or patient:
                return found
            charged = found[1] - self._idle.keys() - self._costs.leaving - self._lent
            counts = Counter(chain.from_iterable(map(self._costs.owners_of, charged)))
            over = {owner for owner, count in counts.items() if self._costs.owner_waits_s(owner, count)}
            if not over:
                return found
            self._spared |= over
        return None

    def hold(self) -> tuple[str, ...] | str:
        """Return the slices to hold until enough of them are idle, or why there are none; see `slices_to_hold`.

        Slices that are reserved for later jobs of the same tier are held only if the others don't suffice.
        """
        borrows = self._tier[0] is not QuotaSource.OWN  # lower bands may not leave for it
        rules, fleet, held = None if borrows else self._rules, self._state.fleet, ""
        for most in (_Reserved.TO_LATER_TIERS, _Reserved.TO_LATER_JOBS):
            names = [name for name in self._slices if self._could_go(name, fleet.slice_workers(name), most)]
            could_go = map(self._slices.__getitem__, names)
            slices = [Holder(one.name, one.tpu_type, "", one.chips) for one in could_go]
            found = slices_to_hold(self._job, self._wanted.chips, slices, self._most, self._state, rules, self._now)
            if not isinstance(found, str):
                return found
            held = found
        return held

    def why_not(self, not_held: str) -> str:
        """Return why no slices can go now. ``not_held``: why none are held; empty: not yet."""
        why = "the cluster evicts no jobs" if self._rules is None else "it may not evict jobs"
        if self._rules is not None and may_evict(self._job):
            why = self._why_not_left()
        return why + (f"; none are held for it: {not_held}" if not_held else "")

    def _why_not_left(self) -> str:
        self._spared = set()
        later = self.find(patient=True)
        if later is None:
            borrows = self._tier[0] is not QuotaSource.OWN
            return f"jobs of lower bands {'behind it, as it borrows quota, ' if borrows else ''}hold too few of them"
        if not later[1]:
            return "idle slices soon suffice"
        waits = [cost[0] for one in later[1] if (cost := self._cost_of(one, patient=True)) is not None]
        who = sorted({one.job_id for one in later[1]})
        wait_s = max(waits, default=0.0)
        when = f"for {math.ceil(wait_s / 60)} min" if wait_s else "since their users or teams had enough evictions"
        return f"{', '.join(who[:4])}{', …' if len(who) > 4 else ''} may not be evicted yet {when}"

    def _find(self, patient: bool) -> tuple[tuple[str, ...], Victims] | None:
        attempts = frozenset[AttemptId]().union(*self._there.values())
        costs = {one: cost for one in attempts if (cost := self._cost_of(one, patient)) is not None}
        there = self._cheapest(costs)
        if self._chips(there, frozenset(costs)) < self._wanted.chips:
            return None
        victims: Victims = frozenset()
        offers = _Offers(there, {name: one.chips for name, one in self._slices.items()}, costs)
        while (lacking := self._wanted.chips - self._chips(there, victims)) > 0:
            victims |= offers.take_best(lacking)
        for one in sorted(victims, key=lambda one: (costs[one], one), reverse=True):
            if self._chips(there, victims - {one}) >= self._wanted.chips:
                victims -= {one}
        free = self._free(there, victims)
        chosen = cover([Holder(name, "", "", self._slices[name].chips) for name in free], self._wanted.chips)
        names = tuple(one.name for one in chosen)
        return names, frozenset[AttemptId]().union(*(there[name] for name in names))

    def _cheapest(self, costs: Mapping[AttemptId, Cost]) -> dict[str, Victims]:
        """Return the slices among which to choose, with the attempts there, those with the fewest first."""

        def cost_of_chip(name: str) -> Cost:
            parts = zip(*(costs[one] for one in self._there[name]), strict=True)
            return tuple(sum(part) / self._slices[name].chips for part in parts)

        free = sorted((name for name, attempts in self._there.items() if attempts <= costs.keys()), key=cost_of_chip)
        chips, chosen, of_type = 0, set[str](), Counter[str]()
        for name in free:
            if len(chosen) >= MOST_SLICES and chips >= 2 * self._wanted.chips:
                break
            one = self._slices[name]
            chosen.add(name)
            of_type[one.tpu_type] += 1
            if of_type[one.tpu_type] <= self._most.get(one.tpu_type, 0):
                chips += one.chips
        there = {name: attempts for name, attempts in self._there.items() if name in chosen}
        return dict(sorted(there.items(), key=lambda one: len(one[1])))

    def _free(self, there: Mapping[str, Victims], victims: Victims) -> list[str]:
        """Return the slices that may go once these victims have left, in their order."""
        left, found = dict(self._most), []
        for name in (name for name, needs in there.items() if needs <= victims):
            tpu_type = self._slices[name].tpu_type
            if left.get(tpu_type, 0) > 0:
                left[tpu_type] -= 1
                found.append(name)
        return found

    def _chips(self, there: Mapping[str, Victims], victims: Victims) -> int:
        return sum(self._slices[name].chips for name in self._free(there, victims))

    def _could_go(self, name: str, hosts: Iterable[Worker], most: "_Reserved") -> bool:
        """Return whether a slice may serve the job's chips once its attempts have left it.

        ``most``: how its hosts may be reserved for other jobs.
        """
        return name in self._usable and self._is_left(hosts, most)

    def _is_left(self, hosts: Iterable[Worker], most: "_Reserved") -> bool:
        return all(self._promised.get(host.node_id, most) <= most for host in hosts)

    def _is_usable(self, name: str) -> bool:
        """Return whether a slice is whole, not in use by other Ray work, and suits no waiting job of a higher band.

        Such a job would get it instead.
        """
        group = self._state.fleet.grouping(TPU_NAME).get(name)
        if group is None or group.defect is not None:
            return False
        for host in self._state.fleet.slice_workers(name):
            if host.draining or host.foreign or self._now < host.suspected_until or host.stuck(self._now):
                return False
            if self._suits.any_on(host):
                return False
        return True

    def _cost_of(self, attempt: AttemptId, patient: bool) -> Cost | None:
        """Return the cost of an attempt's end; None if it does not leave for the job."""
        victim, band = self._state.jobs.get(attempt.job_id), self._job.spec.priority
        if victim is None:
            return None
        by_band = victim.spec.priority > band and self._reclaim.by_band(victim.spec)
        if attempt in self._lent:
            return self._costs.of(attempt, band, self._reclaim, patient, self._lent)
        if attempt not in self._idle and not (by_band and self._tier_after(victim) > self._tier):
            return None
        if attempt not in self._costs.leaving and self._costs.is_of(attempt, self._spared):
            return None
        return self._costs.of(attempt, band, self._reclaim, patient)


_Rank = tuple[Cost, tuple[AttemptId, ...]]


class _Offers:
    """Chooses victims by their cost for each chip that they free.

    Args:
        there: the attempts on each slice.
        chips: of each slice.
        costs: of each attempt.
    """

    def __init__(self, there: Mapping[str, Victims], chips: Mapping[str, int], costs: Mapping[AttemptId, Cost]) -> None:
        self._there, self._chips, self._costs = there, chips, costs
        self._slices_of = defaultdict[AttemptId, list[str]](list)
        for name, attempts in there.items():
            for one in attempts:
                self._slices_of[one].append(name)
        self._victims: Victims = frozenset()
        self._offers: dict[Victims, tuple[Cost, int, tuple[AttemptId, ...]]] = {}
        for attempts in {*there.values()}:
            self._offer(attempts)
        # A heap. A rank in it may be out of date, but never too high.
        self._turns: list[tuple[_Rank, Victims]] = [(self._rank(one, math.inf), one) for one in self._offers]
        heapify(self._turns)

    def take_best(self, lacking: int) -> Victims:
        """Return the next victims, if that many chips are lacking. There must be some that free any.

        ``lacking`` never increases from one call to the next, so that no offer becomes better by that.
        """
        while True:
            rank, best = heappop(self._turns)
            if best not in self._offers:
                continue
            if (now := self._rank(best, lacking)) == rank:
                break
            heappush(self._turns, (now, best))
        more = best - self._victims
        self._victims |= more
        for attempts in {self._there[name] for one in more for name in self._slices_of[one]}:
            self._offers.pop(attempts, None)
            self._offer(attempts)
            if attempts in self._offers:
                heappush(self._turns, (self._rank(attempts, lacking), attempts))
        return more

    def _offer(self, attempts: Victims) -> None:
        """Note the cost of the rest of these attempts, and how many chips become free with it."""
        if not (more := attempts - self._victims):
            return
        near = {name for one in more for name in self._slices_of[one]}
        freed = sum(self._chips[name] for name in near if self._there[name] <= self._victims | more)
        total = tuple(map(sum, zip(*(self._costs[one] for one in more), strict=True)))
        self._offers[attempts] = tuple(part / freed for part in total), freed, tuple(sorted(more))

    def _rank(self, attempts: Victims, lacking: float) -> _Rank:
        each, freed, more = self._offers[attempts]
        return (each if freed <= lacking else tuple(part * freed / lacking for part in each)), more


class _Suits:
    """Tells which hosts suit any of some requirements. Of hosts that are alike, one is looked at."""

    def __init__(self, needs: Collection[Requirement]) -> None:
        self._needs = needs
        self._resources = sorted({name for need in needs for name, _ in need.resources})
        self._keys = sorted({constraint.key for need in needs for constraint in need.constraints})
        self._known: dict[object, bool] = {}

    def any_on(self, host: Worker) -> bool:
        """Return whether a task with any of the requirements could run on a host without tasks."""
        like = *map(host.resources.get, self._resources), *map(host.attributes.get, self._keys)
        if like not in self._known:
            self._known[like] = any(_suits(need, host) for need in self._needs)
        return self._known[like]


def _suits(need: Requirement, host: Worker) -> bool:
    """Return whether a task with a requirement could run on a host without tasks."""
    if not need.fits_into(host.resources):
        return False
    try:
        return all(constraint.matches(host.attributes) for constraint in need.constraints)
    except TypeError:
        return False
