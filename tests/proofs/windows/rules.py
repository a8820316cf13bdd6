"""The rules of promises, told from events and from who holds what: the scheduler's own reasons are not asked."""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU_NAME, Worker
from iris_ray.scheduler.eviction_costs import GRACE_S, EvictionRules
from iris_ray.scheduler.fair_queue import comes_last
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    GangAssignedEvent,
    GangMovedEvent,
    PromiseEvent,
    TasksAssignedEvent,
)
from iris_ray.state.instructions import Instructions
from tests.proofs.windows.limits import SeenLimits
from tests.proofs.windows.seen import (
    UNCONFIRMED_S,
    Ledger,
    Promised,
    account_of,
    begun,
    least_chips,
    may_use,
    names_of,
)

LOOKS_AGAIN_S = 1.0
"""A plan is made at least so often; what passes between two plans is noticed by the second."""
SEES_ITS_CHANCE_S = 45.0
"""A job that could evict may wait for so long: for ends to be confirmed, and for more slices or its own."""

_Passed = tuple[Job, str, str, Promised, int]
"""Who got which host, to which job it was promised and how; and how many idle hosts the promise had."""


class Rules(SeenLimits):
    """Watches a Controller's state. `before` and `after` go around each event, `turn_over` follows each turn.

    Args:
        evictions: when attempts may be evicted; None: never.
        bound_s: for how many seconds jobs that came later may pass a waiting job.

    Attributes:
        counts: what was seen, by name.
    """

    def __init__(self, evictions: EvictionRules | None, bound_s: float) -> None:
        super().__init__(evictions, bound_s)
        self.counts: Counter[str] = Counter()
        self._broken: list[tuple[str, Promised]] = []  # promises that have ended, to be judged once a plan is over
        self._passed: list[_Passed] = []  # to be judged once a plan is over
        self._over: list[tuple[str, str]] = []  # takers over a limit until the plan ends what another job was promised
        self._placed: dict[
            str, tuple[tuple[float, float], bool]
        ] = {}  # in this turn, with the limits; is it a new job?
        self._limited: list[
            tuple[tuple[str, PriorityBand], Promised]
        ] = []  # promises that limits have ended, by account
        self._kept: list[Promised] = []  # promises to jobs that this plan has placed
        self._let_stay: set[AttemptId] = set()  # who was to leave for jobs to which this plan gives other hosts
        self._able_since: dict[str, float] = {}

    def watch(self, state: ControllerState, ledger: Ledger | None = None) -> None:
        """Watch another state from now on, with what the Controller before had written.

        It has promised nothing for which a host is gone meanwhile: then nobody is asked to leave for that any more,
        though it may hear only later who has left before the host was lost.
        """
        self._state = state
        if ledger is not None:
            self.ledger = ledger
            self.ledger.ended = {}  # a new Controller counts from when it sees them
            self._over.clear()
            self._broken.clear()
            self._passed.clear()
            self._placed.clear()
            self._limited.clear()
            self._kept.clear()
            self._able_since.clear()
            asked = [(attempt, self._live(attempt)) for attempt in ledger.asked]
            stay = [attempt for attempt, gang in asked if gang is None or gang.eviction is None]
            ledger.asked = {attempt: until for attempt, until in ledger.asked.items() if attempt not in stay}
            self._see_ends()
            self._see_promises()

    # -- each event ------------------------------------------------------------------------------------------------

    def before(self, event: Event) -> None:
        match event:
            case GangAssignedEvent(job_id, _, groups):
                self._is_placed(job_id, [node_id for group in groups for node_id in group])
            case TasksAssignedEvent(job_id, _, node_id):
                self._is_placed(job_id, [node_id])
            case PromiseEvent(leave=leave) if leave:
                self._asks(event)

    def after(self, event: Event, instructions: Instructions) -> None:
        self._see_ends()
        self._see_promises(event)
        stopped = {stop.attempt for stop in instructions.stop if stop.is_eviction}
        if isinstance(event, GangMovedEvent):
            stopped.add(event.attempt)
        for attempt in list(self.ledger.asked):
            gang = self._live(attempt)
            if gang is not None and gang.eviction is not None:
                continue
            del self.ledger.asked[attempt]
            if gang is None and attempt in stopped:
                takers = self._takers(attempt)
                assert takers, f"{attempt} left, and its hosts are promised to nobody any more"
                for promised in takers:
                    promised.left = (*promised.left, attempt)
                self.counts["left"] += 1
            elif gang is not None:
                self.counts["called off"] += 1
                if isinstance(event, GangAssignedEvent | TasksAssignedEvent):
                    self._let_stay.add(attempt)
            stopped.discard(attempt)
        evicted = [stop.attempt for stop in instructions.stop if stop.is_eviction and stop.attempt in stopped]
        assert not evicted, f"{evicted} are stopped, and nobody was promised their hosts"

    def turn_over(self, finished: bool) -> None:
        """Judge what has happened; ``finished``: whether the plan is over. Else the next turn goes on with it."""
        self._let_stay.clear()
        over, self._over = self._over, []
        for job_id, who in over:
            if (promised := self.ledger.promised.get(job_id)) is not None:
                is_over = self._is_over_the_limit(self._state.jobs[job_id], self._chips_of(promised.node_ids))
                assert not is_over, f"{who} would be over the limit of its user"
        broken, self._broken = self._broken, []
        for one in broken:
            self._ends(*one)
        self._passed = [one for one in self._passed if not self._may_pass(*one)]
        if not finished:
            return
        for job_id, promised in self._broken:
            raise AssertionError(
                f"{job_id} was promised {promised.node_ids} and has neither run nor a reason to lose them;"
                f" {names_of(promised.left)} left for it, {names_of(promised.given_up)} were asked to"
            )
        for job, node_id, job_id, promised, _ in self._passed:
            how = "firmly" if promised.is_firm else "past the bound"
            raise AssertionError(f"{job.spec.job_id} got {node_id}, which was promised to {job_id} ({how})")
        for attempt, until in self.ledger.asked.items():
            assert self._takers(attempt), f"{attempt} leaves, and nobody has a use for it"
            assert self.now < until, f"{attempt} was to leave {self.now - until:.0f} s ago"
        self._limited.clear()
        self._kept.clear()
        self._promises_are_sound()
        self._limits_are_kept()
        self._chances_are_taken()

    # -- what is seen ----------------------------------------------------------------------------------------------

    def _see_ends(self) -> None:
        ending = {attempt for worker in self._state.workers.values() for _, attempt in worker.ending}
        self.ledger.ended = {attempt: self.ledger.ended.get(attempt, self.now) for attempt in ending}

    def _see_promises(self, event: Event | None = None) -> None:
        jobs, promised = self._state.jobs, self.ledger.promised
        if isinstance(event, TasksAssignedEvent) and (kept := promised.get(event.job_id)) is not None and kept.is_firm:
            self._is_partly_kept(jobs[event.job_id], event.node_id, kept)
        for job_id in [job_id for job_id in promised if job_id not in jobs or jobs[job_id].promise is None]:
            self._ends(job_id, promised.pop(job_id))
        for job_id, job in jobs.items():
            if job.promise is None:
                continue
            lost = self._lost(job, promised[job_id]) if job_id in promised else set()
            if lost and self._has_enough_elsewhere(job, promised[job_id], lost, job.promise.node_ids):
                promised[job_id].elsewhere -= len(lost)
            elif lost:
                self._ends(job_id, replace(promised[job_id]))
                if not {*job.promise.node_ids} <= {*promised[job_id].node_ids}:  # else others leave for the rest of it
                    del promised[job_id]
            if job_id in promised and promised[job_id].is_firm and not job.promise.is_firm:
                del promised[job_id]  # for which others left; this is another one
            if job_id not in promised:
                promised[job_id] = Promised(job.promise.node_ids, limits=self._limits(job), begun=begun(job))
                self.counts["promised"] += 1
            if promised[job_id].node_ids != job.promise.node_ids or not promised[job_id].there:
                promised[job_id].node_ids = job.promise.node_ids
                promised[job_id].there = frozenset(self._on(job.promise.node_ids))
        if isinstance(event, PromiseEvent) and event.leave and event.job_id in promised:
            one = promised[event.job_id]
            one.limits = self._limits(jobs[event.job_id])
            for attempt in event.leave:
                if attempt in one.given_up:
                    continue
                gang = self._live(attempt)
                if gang is not None and gang.eviction is not None:
                    grace_s = GRACE_S if self._evictions is None else self._evictions.grace_s
                    self.ledger.asked.setdefault(attempt, self.now + grace_s)
                elif gang is None:
                    one.left = (*one.left, attempt)  # a spare leaves at once
                    self.counts["given back"] += 1
                one.given_up = (*one.given_up, attempt)

    def _ends(self, job_id: str, promised: Promised) -> None:
        """Note that a promise has ended. If nothing excuses it now, what comes until the plan is over may."""
        why = self._excuse(job_id, promised)
        if why in ("", "limit reached", "limits were set"):
            self._limited.append((account_of(self._state.jobs[job_id]), promised))
        if why == "runs":
            self._kept.append(promised)
        if why:
            self.counts[f"ended: {why}"] += 1
        else:
            self._broken.append((job_id, promised))

    def _is_partly_kept(self, job: Job, node_id: str, promised: Promised) -> None:
        """Note that a task of a job got a host. What others leave for the rest of its tasks lasts."""
        promised.elsewhere += node_id not in promised.node_ids
        promised.node_ids = tuple(other for other in promised.node_ids if other != node_id)[: len(job.pending)]
        promised.begun = begun(job)
        if not promised.node_ids:
            del self.ledger.promised[job.spec.job_id]

    def _has_enough_elsewhere(
        self, job: Job, promised: Promised, lost: Collection[str], left: Iterable[str] = ()
    ) -> bool:
        """Return whether as many tasks run elsewhere as their job has lost hosts, and its limit allows no more."""
        is_limited = self._is_over_the_limit(job, self._chips_of([*left, next(iter(lost))]))
        return len(lost) <= promised.elsewhere and is_limited

    def _lost(self, job: Job, promised: Promised) -> set[str]:
        """Return the hosts for which others were asked to leave, and instead of which a job has other hosts now."""
        assert job.promise is not None
        return {*promised.node_ids} - {*job.promise.node_ids} if promised.is_firm else set()

    # -- a host is for one job -------------------------------------------------------------------------------------

    def _is_placed(self, job_id: str, node_ids: Iterable[str]) -> None:
        """Nobody gets a promised host but a higher band, and a gang that returns where nobody has left for another."""
        job = self._state.jobs[job_id]
        self._placed.setdefault(job_id, (self._limits(job), self._is_new(job, self._held(job, now=True)[1])))
        for node_id in node_ids:
            for other_id, promised in self.ledger.promised.items():
                if other_id == job_id or node_id not in promised.node_ids:
                    continue
                other = self._state.jobs[other_id]
                is_higher = job.spec.priority < other.spec.priority
                returns = self._returns_to(job, node_id) and job.spec.priority <= other.spec.priority
                if not is_higher and not (returns and not promised.is_firm) and not self._excuse(other_id, promised):
                    self._passed.append((job, node_id, other_id, promised, self._idle(promised)))

    def _may_pass(self, job: Job, node_id: str, other_id: str, promised: Promised, idle: int) -> bool:
        """Return whether a job may have got a host: the other job has as much of others, or its promise may end."""
        now = self.ledger.promised.get(other_id)
        has_other = now is not None and node_id not in now.node_ids and self._idle(now) >= idle
        return has_other or bool(self._excuse(other_id, promised))

    def _idle(self, promised: Promised) -> int:
        """Return how many hosts of a promise nobody uses any more."""
        return sum(not any(True for _ in self._on([node_id])) for node_id in promised.node_ids)

    def _returns_to(self, job: Job, node_id: str) -> bool:
        slice_name = self._state.workers[node_id].slice_name
        return self._is_returning(job) and any(slice_name in gang.groups for gang in job.gangs)

    # -- nothing is ended except for a promise ---------------------------------------------------------------------

    def _asks(self, event: PromiseEvent) -> None:
        """Somebody is asked to leave: for a job that then runs.

        Who was to leave for another job, and may stay since the same plan gives that one other hosts, leaves for this
        one. Who has gone meanwhile is not asked: growth ends as soon as its own gang is to leave.
        """
        taker = self._state.jobs[event.job_id]
        who = f"{event.job_id}, for which {names_of(event.leave)} are asked to leave,"
        assert taker.pending, f"{who} does not wait"
        assert not comes_last(taker), f"{who} comes last"
        live = ((attempt, self._live(attempt)) for attempt in event.leave if attempt not in self.ledger.asked)
        stay = [(attempt, gang) for attempt, gang in live if gang is not None]
        for attempt, gang in stay:
            job = self._state.jobs[attempt.job_id]
            assert any(task.node_id in event.node_ids for task in gang.tasks), f"{who} gets no host of {attempt}"
            if job.yields or job.spec.spare_for is not None or attempt in self._let_stay:
                continue
            if taker.promise is not None and job.spec.job_id in taker.promise.lent:
                bands = job.spec.priority, taker.spec.priority
                assert bands[0] > bands[1] or bands == (PriorityBand.BATCH,) * 2, f"{who} lent {attempt} no host"
                continue
            assert self._may_evict(taker, job, gang), f"{who} may not evict {attempt}"
        self._is_enough(taker, event.node_ids, event.leave, who)
        assert taker.spec.coscheduling or len(event.node_ids) <= len(taker.pending), f"{who} gets too many hosts"
        chips = self._chips_of(event.node_ids)
        lose = [job_id for job_id, one in self.ledger.promised.items() if {*one.node_ids} & {*event.node_ids}]
        if self._is_over_the_limit(taker, chips, event.leave, besides=lose):
            self._over.append((event.job_id, who))
        if stay:
            self._is_needed(taker, event, who)
        self.counts["asked"] += 1

    def _is_enough(
        self,
        taker: Job,
        node_ids: Iterable[str],
        leave: Collection[AttemptId],
        who: str,
        unconfirmed_s: float = UNCONFIRMED_S,
    ) -> None:
        """The hosts are as many as the job needs, and each waits for something that has a bound."""
        hosts = [self._state.workers[node_id] for node_id in node_ids]
        for host in hosts:
            assert not host.draining, f"{who} could not run on {host.node_id}, which is about to go"
            is_stranger = host.foreign and taker.requirement.chips
            assert not is_stranger, f"{who} could not run on {host.node_id}, whose chips a stranger uses"
            for attempt in self._in_the_way(host, leave, unconfirmed_s):
                since = self.ledger.ended.get(attempt)
                held = "goes on" if since is None else f"has ended {self.now - since:.1f} s ago, unconfirmed"
                raise AssertionError(f"{who} could not run on {host.node_id}: {attempt} {held}")
        names = {host.slice_name for host in hosts}
        if taker.spec.coscheduling is not None:
            have, needed = len(names), taker.spec.groups_per_gang[0]
            assert have >= needed, f"{who} needs {needed} slices, and is promised {sorted(map(str, names))}"
            assert len(hosts) == have * taker.spec.replicas, f"{who} is promised parts of slices: {node_ids}"

    def _is_needed(self, taker: Job, event: PromiseEvent, who: str) -> None:
        """Nobody is asked to leave while enough is free, or about to be, and not for others that come first.

        A job that comes later in the plan may leave what it was promised to others, since it finds other hosts.
        Only spares of the user leave if others would not help: the user has reached a limit.
        """
        if self._is_over_the_limit(taker, least_chips(taker)):
            assert all(account_of(self._state.jobs[one.job_id]) == account_of(taker) for one in event.leave), who
            return
        others = [one for job_id, one in self.ledger.promised.items() if job_id != taker.spec.job_id]
        others += [one for account, one in self._limited if account == account_of(taker)]  # by what the taker gets
        others += self._kept
        no_use = {node_id for one in others for node_id in one.node_ids}
        no_use |= {*taker.avoided, *self._state.fleet.avoided_by(taker.spec.user, self.now)}
        leave = [one for one in self.ledger.asked if self._would_leave(taker, self._state.jobs[one.job_id])]
        groups, needed, size = list(self._slices().values()), taker.spec.groups_per_gang[0], taker.spec.replicas
        if taker.spec.coscheduling is None:
            groups, needed, size = [[host] for hosts in groups for host in hosts], len(event.node_ids), 1
        free = [
            hosts
            for hosts in groups
            if len(hosts) == size
            and all(self._is_free_soon(host, no_use, leave) and may_use(taker, host) for host in hosts)
        ]
        names = [host.node_id for hosts in free for host in hosts]
        first = [job for job in self._state.pending() if job is not taker and job.spec.priority <= taker.spec.priority]
        returning = [(job, gang) for job in first for gang in self._returns(job)]
        most = sum(max(len(gang.groups), *job.spec.groups_per_gang) * job.spec.replicas for job, gang in returning)
        assert len(names) - most < needed * size, f"{who} finds {names} free, or about to be"

    def _would_leave(self, taker: Job, job: Job) -> bool:
        """Return whether attempts of a job that are about to leave leave for this one, too."""
        is_lower = job.spec.priority > taker.spec.priority and taker.spec.may_evict
        return job.yields or is_lower

    def _is_free_soon(self, host: Worker, no_use: Collection[str], leave: Collection[AttemptId]) -> bool:
        is_fit = not (host.draining or host.foreign or host.node_id in no_use or self.now < host.suspected_until)
        return is_fit and not any(self._in_the_way(host, leave))

    # -- limits ----------------------------------------------------------------------------------------------------

    def _limits_are_kept(self) -> None:
        """Nobody gets more than a limit allows. What was promised firmly is reserved: nobody uses it up meanwhile.

        What has ended does not count for that on promised hosts, whose chips count already. Elsewhere it does, unless
        tasks of the job, or of another one with the same limit and a promise, got other hosts, or the limit was set
        since: then it is about to leave for 30 s. A limit counts as set since until the promise is within it without
        that.
        """
        for job_id, (limits, is_new) in self._placed.items():
            if (job := self._state.jobs.get(job_id)) is not None and limits == self._limits(job):
                chips, running = self._held(job)
                is_over = chips > limits[0] or (is_new and len(running) > limits[1])
                assert not is_over, f"{job_id} runs, and its user is over a limit"
        self._placed.clear()
        there = [attempt for one in self.ledger.promised.values() for attempt in self._on(one.node_ids)]
        ended = {attempt for attempt in there if attempt in self.ledger.ended}
        soon = {attempt for attempt, since in self.ledger.ended.items() if self.now < since + UNCONFIRMED_S}
        jobs = self._state.jobs
        elsewhere = {account_of(jobs[job_id]) for job_id, one in self.ledger.promised.items() if one.elsewhere}
        for job_id, promised in self.ledger.promised.items():
            job, leave = jobs[job_id], {*self._on(promised.node_ids), *ended}
            chips = self._chips_of(promised.node_ids)
            if not self._is_over_the_limit(job, chips, leave, now=True):
                promised.limits = self._limits(job)
            if account_of(job) in elsewhere or promised.limits != self._limits(job):
                leave |= soon
            if not self._is_over_the_limit(job, chips, leave):
                if promised.is_firm:
                    self.counts["reserved"] += sum(
                        account_of(other) == account_of(job)
                        and other is not job
                        and self._is_over_the_limit(other, least_chips(other))
                        and not self._is_over_the_limit(other, least_chips(other), besides=[job_id])
                        for other in self._state.pending()
                    )
            elif promised.is_firm:
                raise AssertionError(f"{job_id} was promised {promised.node_ids}, and is over a limit now")

    # -- a promise is kept -----------------------------------------------------------------------------------------

    def _may_idle_for_long(self, job: Job, promised: Promised) -> bool:
        """Return whether an attempt on reserved hosts has run for longer than an hour, and than the job has waited."""
        there = [node_id for node_id in promised.node_ids if node_id in self._state.workers]
        gangs = (gang for attempt in self._on(there) if (gang := self._live(attempt)) is not None)
        ran_s = max((self.now - gang.running_since for gang in gangs), default=0.0)
        return ran_s > max(3600.0, self.now - job.gangs[next(iter(job.pending))].waiting_since)

    def _excuse(self, job_id: str, promised: Promised) -> str:
        """Return why a promise may end; an empty string if it may not.

        A limit that was lowered ends what its user was promised if all that counts when the plan looks at it is too
        much: what has still to leave, and what was promised to others that the limit ends in the same plan.
        """
        job = self._state.jobs.get(job_id)
        if job is None or job.state.finished:
            return "over"
        if not job.pending or begun(job) > promised.begun:
            return "runs"
        if job.yields:
            return "yields"
        if job.promise is None and self._has_enough_elsewhere(job, promised, promised.node_ids):
            return "other room"
        is_partly_lost = promised.is_firm and job.promise is not None and not job.spec.coscheduling
        left = job.promise.node_ids if job.promise is not None and is_partly_lost else ()
        beside = [one for account, one in self._limited if account == account_of(job) and one is not promised]
        others = sum(self._chips_of(one.node_ids) for one in beside)  # they counted when the plan looked at this job
        is_limited = self._is_over_the_limit(job, least_chips(job) + self._chips_of(left) + others, now=True)
        if promised.limits != self._limits(job) and is_limited:
            return "limits were set"
        if not promised.is_firm and self._pauses(job):
            return "pauses"
        is_limited = self._is_over_the_limit(job, least_chips(job), now=True)
        if not promised.is_firm and (is_limited or self._is_kept_for_another(job)):
            return "limit reached"
        if is_limited and not promised.left and self.ledger.asked.keys().isdisjoint(promised.given_up):
            return "limit reached"  # who was to leave has ended by itself, and counts until that is confirmed
        there = [worker for i in promised.node_ids if (worker := self._state.workers.get(i)) is not None]
        for one in self._state.pending():
            is_higher = one.spec.priority < job.spec.priority and any(may_use(one, worker) for worker in there)
            if is_higher and self._is_returning(one) and not self._pauses(one):
                return "higher band"
        if not promised.is_firm and self._may_idle_for_long(job, promised):
            return "may idle for long"
        others_firm = (one for who, one in self.ledger.promised.items() if who != job_id and one.is_firm)
        if not promised.is_firm and any(not {*one.node_ids}.isdisjoint(promised.node_ids) for one in others_firm):
            return "used meanwhile"  # by a job that leaves in time
        other = self.ledger.promised.get(job_id)
        if other is not None and {*promised.node_ids} <= {*other.node_ids}:
            return "promised again"  # after a higher band found other room
        if other is not None and (not promised.is_firm if other.is_firm else self._is_no_worse(other, promised)):
            return "other room"  # others leave it, or it is free; or less is in the way than before
        for node_id in promised.node_ids:
            worker = self._state.workers.get(node_id)
            if worker is None or worker.draining or (worker.foreign and job.requirement.chips):
                return "host lost"
            if node_id in job.avoided and self.now < job.avoided_until:
                return "host avoided"
            for _, attempt in worker.occupants:
                if self.now >= self.ledger.ended.get(attempt, math.inf) + UNCONFIRMED_S:
                    return "unconfirmed"
                is_higher = self._state.jobs[attempt.job_id].spec.priority < job.spec.priority
                if is_higher and attempt not in promised.there:
                    return "higher band"
            higher = (one for one in self._state.pending() if one.spec.priority < job.spec.priority)
            if any(one.promise is not None and node_id in one.promise.node_ids for one in higher):
                return "higher band"
        return ""

    def _is_no_worse(self, other: Promised, promised: Promised) -> bool:
        """Return whether a promise for which nobody leaves may take the place of one.

        All its hosts are free; or nobody has left for the earlier one, and as few hosts wait for what runs there.
        """
        before = sum(not promised.there.isdisjoint(self._on([node_id])) for node_id in promised.node_ids)
        wait = sum(self._ways(other))
        return not wait or (not promised.is_firm and wait <= before)

    def _promises_are_sound(self) -> None:
        """A host is promised once, and what is promised firmly waits for nothing that has no bound."""
        whose: dict[str, str] = {}
        for job_id, promised in self.ledger.promised.items():
            job = self._state.jobs[job_id]
            for node_id in promised.node_ids:
                assert node_id not in whose, f"{node_id} is promised to {whose[node_id]} and to {job_id}"
                whose[node_id] = job_id
            if promised.is_firm:
                who = f"{job_id}, for which {names_of(promised.given_up)} were asked to leave,"
                leave = {*promised.given_up} & self.ledger.asked.keys()
                self._is_enough(job, promised.node_ids, leave, who, UNCONFIRMED_S + LOOKS_AGAIN_S)

    # -- chances are taken -----------------------------------------------------------------------------------------

    def _chances_are_taken(self) -> None:
        """A job for which others may be asked to leave, so that all who wait could run, does not wait for ever."""
        waiting = self._state.pending()
        needed = sum(max(job.spec.groups_per_gang) * len(job.pending) for job in waiting if not comes_last(job))
        able = {job.spec.job_id for job in waiting if self._has_a_chance(job, needed)}
        self._able_since = {job_id: self._able_since.get(job_id, self.now) for job_id in sorted(able)}
        for job_id, since in self._able_since.items():
            assert self.now < since + SEES_ITS_CHANCE_S, f"{job_id} could have run for {self.now - since:.0f} s"

    def _has_a_chance(self, job: Job, needed: int) -> bool:
        if comes_last(job) or job.promise is not None or len(job.gangs) > 1:
            return False
        if job.gang.not_before > self.now or job.avoided or any(c.key == TPU_NAME for c in job.spec.constraints):
            return False
        if self._rivals(job) or self._holds(job):
            return False
        workers = self._state.workers.items()
        own = {name for name, one in workers if any(a.job_id == job.spec.job_id for _, a in one.occupants)}
        if self._is_over_the_limit(job, least_chips(job) + self._chips_of(own)):
            return False  # perhaps by what its last attempt holds, whose end nobody confirms
        return sum(self._could_be_free(job, hosts) for hosts in self._slices().values()) >= needed

    def _holds(self, job: Job) -> bool:
        """Return whether an attempt of a job holds hosts, unless its end is unconfirmed for too long."""
        there = (one for worker in self._state.workers.values() for _, one in worker.occupants)
        own = (self.ledger.ended.get(one, self.now) for one in there if one.job_id == job.spec.job_id)
        return any(self.now < since + UNCONFIRMED_S for since in own)

    def _could_be_free(self, job: Job, hosts: list[Worker]) -> bool:
        """Return whether a slice is free, or all that is there may be asked to leave now."""
        if len(hosts) != job.spec.replicas:
            return False
        idle = {one.spec.job_id for one in (*self._state.spares(), *self._state.yielding()) if comes_last(one)}
        for host in hosts:
            promised = any(host.node_id in one.node_ids for one in self.ledger.promised.values())
            if host.draining or host.foreign or promised or self.now < host.suspected_until:
                return False
            if host.node_id in self._state.fleet.avoided_by(job.spec.user, self.now):
                return False
            for _, attempt in host.occupants:
                if attempt in self.ledger.ended or attempt in self.ledger.asked:
                    return False
                other, gang = self._state.jobs[attempt.job_id], self._live(attempt)
                if attempt.job_id not in idle and (gang is None or not self._may_evict(job, other, gang)):
                    return False
        return True
