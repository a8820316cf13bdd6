"""A referee: it plays the queue once more, job by job, and refuses a plan that breaks a written rule.

Where the rules leave a choice, such as that between two equal slices, it follows the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from iris_ray.model.jobs import Gang, Job
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import Worker, accelerators, rounded
from iris_ray.scheduler import SchedulingResult
from iris_ray.state.controller_state import ControllerState
from iris_ray.state.events import GangAssignedEvent, JobAssignedEvent
from tests.proofs.reference import rules
from tests.proofs.reference.rules import Place
from tests.support.worlds import one_by_one

Turn = tuple[Job, tuple[Gang, ...]]


@dataclass(frozen=True)
class Plan:
    """What a plan decides.

    Attributes:
        assignments: an event for each gang that gets hosts.
        rooms: job id → the hosts that are reserved for it from now on, where that changes.
        timed_out, unschedulable: ids of the jobs that it gives up.
        explained: ids of the jobs for which it says why they wait.
    """

    assignments: tuple[JobAssignedEvent, ...]
    rooms: Mapping[str, tuple[str, ...]]
    timed_out: frozenset[str]
    unschedulable: frozenset[str]
    explained: frozenset[str]

    @staticmethod
    def of(result: SchedulingResult) -> "Plan":
        """Return the scheduler's plan."""
        return Plan(
            tuple(one_by_one(result.assignments)),
            {event.job_id: event.node_ids for event in result.promises},
            frozenset(event.job_id for event in result.timed_out),
            frozenset(event.job_id for event in result.unschedulable),
            frozenset(result.pending_reasons),
        )


class Referee:
    """Judges one plan.

    Args:
        state: the state for which the plan was made.
        plan: the plan.
        now, bound: the time, and the backfill bound; seconds.

    Attributes:
        reserved: node id → the job for which it is reserved.
        perhaps: the hosts that a job may keep for the seconds in which it waits for others.
        keepers: ids of the jobs that have had their turn and keep a reservation.
        fulfilled: ids of the jobs that got hosts, which ends their earlier reservations.
    """

    def __init__(self, state: ControllerState, plan: Plan, now: float, bound: float) -> None:
        self.state, self.plan, self.now, self.bound = state, plan, now, bound
        self.taken: dict[str, dict[str, float]] = {}
        self.usage = {user: dict(amounts) for user, amounts in state.usage.items()}
        self.chips = {account: state.limits.held(*account).chips for account in state.limits.accounts}
        self.running = {account: set(state.limits.held(*account).running) for account in state.limits.accounts}
        self.reserved: dict[str, Job] = {}
        self.perhaps: set[str] = set()
        self.fulfilled: set[str] = set()
        self.keepers: set[str] = set()
        self.holds_limit: set[tuple[str, PriorityBand]] = set()
        self.placed: dict[tuple[str, int], JobAssignedEvent] = {}
        for event in plan.assignments:
            self._note(event)
        self.served = {*self.placed}

    def check(self) -> None:
        """Raise AssertionError if the plan breaks a rule."""
        waiting = [job for job in self.state.pending() if job.pending]
        timed_out = {job.spec.job_id for job in waiting if rules.is_timed_out(job, self.now)}
        never, maybe = (
            {job.spec.job_id for job in waiting if rules.can_never_be_compared(job, self.state, grouped)}
            for grouped in (False, True)
        )
        assert self.plan.timed_out == timed_out, f"timed out: {timed_out}, not {self.plan.timed_out}"
        ended = self.plan.unschedulable
        assert ended <= (never | maybe) - timed_out, f"UNSCHEDULABLE: {ended}"
        given_up = timed_out | ended
        self.never = never & maybe
        for job in waiting:
            if job.promise is not None and job.spec.job_id not in self.plan.rooms and job.spec.job_id not in given_up:
                self._reserve(job, job.promise.node_ids)
            elif job.promise is not None:  # who may have hosts whose reservation ends within the plan is not written
                self.perhaps |= {*job.promise.node_ids}
        turns = [turn for job in waiting if job.spec.job_id not in given_up for turn in self._turns_of(job)]
        unserved: set[str] = set()
        while turns:
            job, gangs = turn = min(turns, key=self._order)
            turns.remove(turn)
            if self._serve(job, gangs):
                unserved.add(job.spec.job_id)
            elif gangs[1:]:
                turns.append((job, gangs[1:]))
        assert not self.placed, f"{[*self.placed]} get hosts out of turn"
        late = {j.spec.job_id for j in waiting for g in self._pending(j) if self.now < g.not_before}
        assert self.plan.explained == unserved | late - given_up, "every job that waits says why"

    # -- the order -----------------------------------------------------------------------------------------------------

    def _turns_of(self, job: Job) -> list[Turn]:
        gangs = [gang for gang in self._pending(job) if self.now >= gang.not_before]
        first = tuple(gang for gang in gangs if rules.is_returning(job, gang, self.now))
        rest = tuple(gang for gang in gangs if not rules.is_returning(job, gang, self.now))
        return [(job, part) for part in (first, rest) if part]

    def _order(self, turn: Turn) -> tuple[object, ...]:
        """ "Priority bands come first"; "a gang that has lost its hosts comes first in its band"; "the user with the
        smallest share is next"; "age only decides between equal shares"; "growth and spares come last".
        """
        job, gangs = turn
        returns = rules.is_returning(job, gangs[0], self.now)
        share = self._share(job.spec.user)
        return rules.comes_last(job), job.spec.priority, not returns, share, job.number

    def _share(self, user: str) -> float:
        """ "A share is the largest fraction that the user holds of any resource, now and over the past hours"."""
        held, past = self.usage.get(user, {}), self.state.past_usage
        totals = {resource: total for resource, total in self.state.fleet.totals.items() if total > 0}
        hours = past.hours(user, self.now)
        parts = [(held.get(r, 0.0) + hours.get(r, 0.0)) / total for r, total in totals.items()]
        return max(parts, default=0.0)

    @staticmethod
    def _pending(job: Job) -> list[Gang]:
        return [job.gangs[position] for position in job.pending]

    # -- one turn ------------------------------------------------------------------------------------------------------

    def _serve(self, job: Job, gangs: Sequence[Gang]) -> bool:
        """Play a turn: a gang gets hosts, as the plan says, or there must be none for it. Return whether it waits."""
        suitable = list(rules.places(job, self.state))
        alike = [gangs[0].position, *(position for job_id, position in self.placed if job_id == job.spec.job_id)]
        for position in alike:  # which gang of a job is placed first is not written
            if (event := self.placed.pop((job.spec.job_id, position), None)) is not None:
                self._take(job, job.gangs[position], event, suitable)
                return False
        for gang in gangs:
            why = self._must_have(job, gang, suitable)
            assert why is None, f"{job.spec.job_id}/{gang.position} waits, and it could have {why}"
        if self._keep(job, gangs, suitable):
            assert job.spec.job_id not in self.never, f"{job.spec.job_id} is UNSCHEDULABLE"
        return True

    def _take(self, job: Job, gang: Gang, event: JobAssignedEvent, suitable: Sequence[Place]) -> None:
        """ "A gang gets all the hosts that it needs, or no host"."""
        groups = event.groups if isinstance(event, GangAssignedEvent) else ((event.node_id,),)
        what, hosts = f"{job.spec.job_id} gets {groups}", [node_id for group in groups for node_id in group]
        assert len(set(hosts)) == len(hosts), f"{what}: one host twice"
        assert len(groups) in self._counts(job), f"{what}: not as many groups as it asks for"
        by_host = {worker.node_id: place for place in suitable for worker in place.workers}
        assert all(node_id in by_host for node_id in hosts), f"{what}: a host does not suit it"
        used = [{by_host[node_id].name for node_id in group} for group in groups]
        assert all(len(names) == 1 for names in used), f"{what}: a group is not one"
        assert len(set.union(*map(set, used))) == len(groups), f"{what}: one group twice"
        sizes = {by_host[group[0]].size for group in groups}
        assert sizes == {len(group) for group in groups}, f"{what}: not as many hosts as it needs"
        workers = [self.state.workers[node_id] for node_id in hosts]
        for worker in workers:
            assert self._is_free(job, worker, may=True, returns=rules.is_returning(job, gang, self.now)), (
                f"{what}: {worker.node_id} is not free for it"
            )
        chips = sum(rules.chips_on(job, worker) for worker in workers)
        assert self._within_limits(job, chips), f"{what}: beyond the limits"
        assert not (chips and self._account(job) in self.holds_limit), f"{what}: an earlier job waits for that limit"
        self._require_best(job, gang, {one for names in used for one in names}, suitable)
        more = self._must_have(job, gang, suitable, more_than=len(groups))
        assert more is None, f"{what}, and it could have {more}"
        for worker in workers:
            demand = job.requirement.demand(worker)
            for amounts in (self.taken.setdefault(worker.node_id, {}), self.usage.setdefault(job.spec.user, {})):
                for resource, amount in demand.items():
                    amounts[resource] = rounded(amounts.get(resource, 0.0) + amount)
        if job.spec.coscheduling:  # it runs, which ends its reservation
            self.reserved = {node_id: keeper for node_id, keeper in self.reserved.items() if keeper is not job}
            self.fulfilled.add(job.spec.job_id)
        account = self._account(job)
        self.chips[account] = self.chips.get(account, 0.0) + chips
        if job.spec.spare_for is None:
            self.running.setdefault(account, set()).add(job.spec.job_id)

    def _require_best(self, job: Job, gang: Gang, names: set[object], suitable: Sequence[Place]) -> None:
        """No unused group is better by one written preference and no worse by the others."""
        if self._may_be_patient(job, gang, suitable) or job.spec.spreads:
            return  # it may have waited until others had their turn; what spreading weighs more is not written
        others = [p for p in suitable if p.name not in names and self._free_hosts(job, p, may=False)]
        mine = [p for p in suitable if p.name in names]
        for other in others:
            for one in mine:
                if other.size == one.size and len(other.workers) == other.size == len(one.workers):
                    a, b = self._merits(job, gang, other), self._merits(job, gang, one)
                    better = all(x >= y for x, y in zip(a, b, strict=True)) and a != b
                    assert not better, f"{job.spec.job_id} gets {one.name}, and {other.name} is better"

    def _merits(self, job: Job, gang: Gang, place: Place) -> tuple[int, ...]:
        """ "Hosts that satisfy more preferences are preferred"; "a gang prefers the slices that it had"; it avoids
        hosts where it has failed.
        """
        return (
            sum(rules.preferred(job, worker) for worker in place.workers),
            self._warmth(job, place),
            job.spec.is_one_gang and place.name in gang.groups,
            not any(rules.avoids(job, worker, self.state, self.now) for worker in place.workers),
        )

    def _warmth(self, job: Job, place: Place) -> int:
        """Rank a slice: 1 if it is warm for the owner of the job, 0 if nobody keeps it warm, -1 if another does."""
        holder = self.state.holders.get(str(place.name)) if job.spec.is_one_gang else None
        return 0 if holder is None else 1 if holder == job.spec.owner else -1

    def _must_have(self, job: Job, gang: Gang, suitable: Sequence[Place], more_than: int = 0) -> object:
        """Return the groups that a gang could have now, or None. "On the largest of these counts that is free now".

        Growth "keeps nothing from a job that waits": whether a gang that returns may come with more is not written.
        """
        if rules.comes_last(job) or (not more_than and self._may_be_patient(job, gang, suitable)):
            return None
        if more_than and rules.is_returning(job, gang, self.now):
            return None
        free = [
            (place, hosts) for place in self._fair(job, suitable) if (hosts := self._free_hosts(job, place, may=False))
        ]
        for count in (count for count in self._counts(job) if count > more_than):
            for size in {place.size for place, _ in free}:
                fit = [(sum(rules.chips_on(job, h) for h in hosts), p) for p, hosts in free if p.size == size]
                chosen = sorted(fit, key=lambda one: one[0])[:count]
                chips = sum(amount for amount, _ in chosen)
                held = bool(chips) and self._account(job) in self.holds_limit
                if len(chosen) == count and self._within_limits(job, chips) and not held:
                    return [place.name for _, place in chosen]
        return None

    def _may_be_patient(self, job: Job, gang: Gang, suitable: Sequence[Place]) -> bool:
        """ "In its first 30 s in the queue, it waits for slices whose last attempt is just ending if they would allow a
        larger count". Whether a gang may wait for the end of its own last attempt is not written, so it may.
        """
        ending = {occupant[1] for place in suitable for worker in place.members for occupant in worker.ending}
        waits = job.current_attempt(gang) in ending or (len(self._counts(job)) > 1 and bool(ending))
        return waits and self.now < gang.waiting_since + rules.JUST_ENDING_S

    def _fair(self, job: Job, suitable: Sequence[Place]) -> list[Place]:
        """ "iris_ray allocates whole slices only". Of parts of larger slices, for jobs that name no type, nothing is
        written: they count where there are no others, and only if the whole slice is sound.
        """
        whole = [place for place in suitable if not place.is_part]
        sound = [
            place
            for place in suitable
            if place.members == place.workers
            and not any(w.foreign or rules.is_suspected(w, self.now) for w in place.members)
        ]
        if job.requirement.whole_groups and len({place.size for place in whole}) > 1:
            return []  # whole slices of different sizes, for a job that names no type: nothing is written
        return whole or sound

    def _counts(self, job: Job) -> Sequence[int]:
        return job.spec.groups_per_gang

    def _free_hosts(self, job: Job, place: Place, may: bool) -> list[Worker]:
        """Return as many free hosts of a group as the gang needs there; none if there are not as many."""
        free = [worker for worker in place.workers if self._is_free(job, worker, may)]
        if not may:
            free = [worker for worker in free if not rules.avoids(job, worker, self.state, self.now)]
        return free[: place.size] if len(free) >= place.size else []

    def _is_free(self, job: Job, worker: Worker, may: bool, returns: bool = False) -> bool:
        if not may and worker.node_id in self.perhaps:
            return False
        if rules.is_suspected(worker, self.now) or not rules.has_room(job, worker, self.taken.get(worker.node_id, {})):
            return False
        keeper = self.reserved.get(worker.node_id)
        if keeper is None or keeper is job or self._is_lent(keeper, job, may):
            return True
        is_firm = keeper.promise is not None and keeper.promise.is_firm
        return returns and not is_firm and keeper.spec.priority == job.spec.priority

    # -- limits --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _account(job: Job) -> tuple[str, PriorityBand]:
        return job.spec.user, job.spec.priority

    def _within_limits(self, job: Job, chips: float) -> bool:
        """ "Chips that tasks hold, including spares"; "jobs that have hosts"."""
        account = self._account(job)
        most, running = self.state.limits.of(*account), self.running.get(account, set())
        assert most.chips is not None
        assert most.running_jobs is not None
        fits = not chips or self.chips.get(account, 0.0) + chips <= most.chips
        return fits and (
            job.spec.spare_for is not None or job.spec.job_id in running or len(running) < most.running_jobs
        )

    # -- reservations --------------------------------------------------------------------------------------------------

    def _reserve(self, job: Job, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            self.reserved.setdefault(node_id, job)

    def _is_lent(self, keeper: Job, job: Job, may: bool) -> bool:
        """ "A job may borrow a host if its max_runtime, or what is left of it, is at most half of the time until all
        reserved hosts are expected to be free". A firm promise holds against its own band and lower ones.
        """
        if job.spec.priority < keeper.spec.priority:
            return True
        times = [
            rules.free_in(self.state.workers[node_id], self.state, self.now)
            for node_id, one in self.reserved.items()
            if one is keeper
        ]
        within = max(most if may else least for least, most in times)
        return job.spec.max_runtime is not None and job.spec.max_runtime <= within / 2

    def _waits_for_limit(self, job: Job, waited: float) -> bool:
        """ "A job that waits for a limit does not keep hosts from other jobs"; "once a job has waited ten minutes for
        its user's chips, later jobs of the same user and band leave them to it": not if it asks for more than the
        limit.
        """
        account, least = self._account(job), self._least_chips(job)
        if self._within_limits(job, least):
            return False
        most = self.state.limits.of(*account).chips
        if self._is_past_bound(job, waited) and least and most is not None and least <= most:
            self.holds_limit.add(account)
        return True

    def _least_chips(self, job: Job) -> float:
        """A task on a slice holds at least one chip of its host, even if it asks for none."""
        asked = accelerators(job.spec.resources)
        hosts = job.spec.replicas if job.spec.coscheduling else 1
        return min(self._counts(job)) * hosts * (max(1.0, asked) if job.requirement.chips else asked)

    def _lacks_more_than_its_own(self, job: Job, gangs: Sequence[Gang]) -> bool:
        """ "Only a gang that has just lost its hosts does so while all that it lacks are the chips of its own last
        attempt, whose end is not confirmed yet".
        """
        last = {job.current_attempt(gang) for gang in gangs if rules.is_returning(job, gang, self.now)}
        workers = self.state.workers.values()
        own = sum(accelerators(w.occupants[one]) for w in workers for one in w.ending if one[1] in last)
        return not own or not self._within_limits(job, self._least_chips(job) - own)

    def _is_past_bound(self, job: Job, waited: float) -> bool:
        """ "After ten minutes, and in PRODUCTION at once"; spares "keep nothing from a job that waits"."""
        return waited >= rules.bound_of(job, self.bound) and not rules.comes_last(job)

    def _keep(self, job: Job, gangs: Sequence[Gang], suitable: Sequence[Place]) -> bool:
        """ "Hosts are reserved for the first such job in this order, whatever its size". Return whether no limit is in
        the way.
        """
        pending = self._pending(job)
        left = [gang for gang in pending if (job.spec.job_id, gang.position) not in self.served] or pending
        waited = self.now - max(gang.waiting_since for gang in left)
        is_patient = any(self._may_be_patient(job, gang, suitable) for gang in gangs)
        is_limited = self._waits_for_limit(job, waited)
        if is_patient and not (is_limited and self._lacks_more_than_its_own(job, gangs)):
            self.perhaps |= {worker.node_id for place in suitable for worker in place.members}
        if is_limited:
            return False
        if room := self._room(job):
            self._require_room(job, room, suitable)
            self._reserve(job, room)
            self.keepers.add(job.spec.job_id)
        elif self._is_past_bound(job, waited) and not is_patient:
            why = self._must_reserve(job, suitable, waited)
            assert why is None, f"nothing is reserved for {job.spec.job_id}, and it could be {why}"
        return True

    def _require_room(self, job: Job, room: Sequence[str], suitable: Sequence[Place]) -> None:
        """A reservation is for a job past its bound, on hosts that suit it, as many as it needs."""
        what = f"{room} are reserved for {job.spec.job_id}"
        longest = self.now - min(gang.waiting_since for gang in self._pending(job))
        assert self._is_past_bound(job, longest) or job.promise, f"{what}, which has not waited for its bound"
        hosts = {worker.node_id for place in suitable for worker in place.members}
        assert hosts.issuperset(room), f"{what}, and some do not suit it"
        groups = [place for place in suitable if len({w.node_id for w in place.workers} & {*room}) >= place.size]
        assert len(groups) >= min(self._counts(job)), f"{what}, and do not suffice"
        if job.spec.job_id in self.plan.rooms and not (job.promise and job.promise.is_firm):
            self._require_only_one(job, room, hosts, longest)

    def _require_only_one(self, job: Job, room: Sequence[str], hosts: set[str], waited: float) -> None:
        """ "One at a time among those that compete", for the same hosts or with the same requirement; "no hosts are
        reserved if they are not expected to be free within an hour".
        """
        avoided = {i for i in hosts if rules.avoids(job, self.state.workers[i], self.state, self.now)}
        others = {
            keeper.spec.job_id
            for node_id, keeper in self.reserved.items()
            if keeper is not job
            and node_id not in avoided
            and keeper.spec.job_id in self.keepers
            and (node_id in room or (keeper.requirement == job.requirement and node_id in hosts))
        }
        assert not others, f"{room} are reserved for {job.spec.job_id}, which competes with {others}"
        free_in = max(rules.free_in(self.state.workers[node_id], self.state, self.now)[0] for node_id in room)
        assert free_in <= max(rules.HOUR_S, waited), (
            f"{room} are reserved for {job.spec.job_id}, and not free in an hour"
        )

    def _room(self, job: Job) -> tuple[str, ...]:
        """Return the hosts that a job has reserved by the plan, or has kept from an earlier one."""
        earlier = job.promise.node_ids if job.promise and job.spec.job_id not in self.fulfilled else ()
        return self.plan.rooms.get(job.spec.job_id, earlier)

    @staticmethod
    def _chips_of(job: Job, place: Place) -> float:
        return sum(sorted(rules.chips_on(job, worker) for worker in place.workers)[: place.size])

    def _must_reserve(self, job: Job, suitable: Sequence[Place], waited: float) -> object:
        """ "No hosts are reserved if they are not expected to be free within an hour, or within the time that the job
        has already waited"; "one at a time among those that compete"; "if the turn of a job ends its promise, the plan
        makes no more promises of this kind".
        """
        promised = {job_id for job_id, one in self.state.jobs.items() if one.promise is not None}
        if promised & self.fulfilled or not all(self.plan.rooms.values()):
            return None
        hosts = {worker.node_id for place in suitable for worker in place.members}
        rooms = [self._room(other) for other in self.state.pending() if other is not job]
        if hosts & {*self.reserved, *self.perhaps, *chain.from_iterable(rooms)}:
            return None
        least = min(self._counts(job)) * min((self._chips_of(job, place) for place in suitable), default=0.0)
        if not self._within_limits(job, least):
            return None  # with all the chips of its hosts, of which it may have predicted fewer
        within = max(rules.HOUR_S, waited)
        soon = []
        for place in self._fair(job, suitable):
            able = [
                w
                for w in place.workers
                if rules.has_room(job, w, {}, idle=True)
                and rules.free_in(w, self.state, self.now)[1] <= within
                and not rules.avoids(job, w, self.state, self.now)
                and w.node_id not in self.taken
                and not rules.is_suspected(w, self.now)
            ]
            if len(able) >= place.size:
                soon.append(place)
        for size in {place.size for place in soon}:
            fit = [place.name for place in soon if place.size == size]
            if len(fit) >= min(self._counts(job)):
                return fit
        return None

    def _note(self, event: JobAssignedEvent) -> None:
        positions = (event.gang,) if isinstance(event, GangAssignedEvent) else event.task_indices
        for position in positions:
            key = event.job_id, position
            assert key not in self.placed, f"{key} gets hosts twice"
            self.placed[key] = event
