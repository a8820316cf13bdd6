"""One random cluster: its story, its faults, and the deaths of its Controller."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from random import Random
from typing import Any
from unittest import mock

from iris_ray.actors.controller import pool_registry, recovery, write_ahead_log
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.pool_registry import Pool
from iris_ray.errors import IllegalTransitionError
from iris_ray.model.job_spec import SpareFor, SparePurpose
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import NoticeKind
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.eviction_costs import EvictionRules
from iris_ray.scheduler.planner import PlacedGang, Planner
from iris_ray.state import ControllerState, job_table, records
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    JobCancelledEvent,
    JobSubmittedEvent,
    JobYieldsEvent,
    MaintenanceCalledOffEvent,
    PoolRestartedEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    TimePassedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.instructions import Instructions, StopAttempt
from iris_ray.study import Simulation
from iris_ray.study.agenda import Timings
from iris_ray.study.hosts import SimulatedHosts
from tests.proofs.random_worlds.chance import CPUS, draw_fleet, draw_job
from tests.proofs.random_worlds.controller import (
    Background,
    FatalStore,
    Killed,
    Nodes,
    Orders,
    Registry,
    WatchedState,
    Written,
    fates,
    new_journal,
)
from tests.proofs.random_worlds.pools import Pools
from tests.support.worlds import promised

TIMINGS = Timings(launch=5.0, warm_launch=0.5, failed_launch=10.0, stop=3.0, exit=1.0, reclaim=1.0, keep_warm=60.0)
HOUR = 3600.0
MOST_PLANS_AT_ONCE = 200
READ_ANEW = (
    WorkerRegisteredEvent, WorkerFailedEvent, WorkerDrainedEvent, MaintenanceCalledOffEvent, WorkerSuspectedEvent,
    PoolRestartedEvent, SliceReleasedEvent, TimePassedEvent,
)  # fmt: skip
"""What nobody repeats: a new Controller learns it from Ray, from the hosts and from the pools."""
FAULTS = (
    "lose", "lose", "preempt", "warn", "maintain", "call off", "taint", "lift", "suspect", "bad host", "stranger",
    "pool dies", "pool ends", "cancel", "cancel", "blame", "no answer", "finish", "yield", "yield", "cancel the taker",
)  # fmt: skip


class RandomWorld(Simulation):
    """One cluster with its users, its faults and its Controllers, all drawn from a seed.

    Args:
        seed: of all chance.
        runner: runs the Controller's coroutines.

    Attributes:
        steps: events that states have handled.
        counts: what has happened, by name.
    """

    pools: Pools

    def __init__(self, seed: str, runner: asyncio.Runner) -> None:
        super().__init__(TIMINGS)
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.chance = Random(seed)
        self._loop = runner.get_loop()
        self._store = FatalStore(self.chance)
        self._written = Written(self._store)
        self._registered: dict[str, WorkerRegisteredEvent] = {}
        self._draining: dict[str, list[WorkerDrainedEvent]] = {}
        self._unacknowledged: list[Event] = []
        self._late: dict[int, Event] = {}
        self._sent = self._named = 0
        self._quiet = False  # nothing goes wrong any more
        self._look_soon = False
        self._plans_at = Counter[float]()  # how many plans the present moment has seen
        self._struck = False  # whether something has gone wrong since the latest plan
        self._owners: dict[str, list[str]] = {}  # pool → ids of its jobs
        self._check_after = self.chance.choice((5, 25, 100))
        self._draw()
        self._begin()

    def _draw(self) -> None:
        chance = self.chance
        self._unreliable, self._deadly = chance.choice((0.0, 0.05, 0.3)), chance.choice((0.0, 0.02, 0.06))
        self._most_placed = chance.choice((None, None, 1, 3))
        self._bound_s = chance.choice((0.0, 60.0, 600.0))
        least_run_s = {band: chance.choice((0.0, 20.0, 300.0)) for band in PriorityBand}
        self._evictions = EvictionRules(chance.choice((0.0, 5.0, 60.0)), least_run_s)
        self._fault_every_s, self._job_every_s = chance.choice((10.0, 40.0, 200.0)), chance.choice((10.0, 30.0, 100.0))
        self._most_jobs = chance.choice((3, 6, 12, 24))
        self.pools = Pools(self.agenda, self.state, self._report, self.look_at, self.history, TIMINGS)
        self.pools.begin(self._note)
        self._fleet = draw_fleet(chance)

    def _begin(self) -> None:
        """A Controller begins, finds hosts, and people come."""
        self._new_controller()
        self._run(self._comes_back())
        for tpu_type, attributes in self._fleet.slices:
            self.hosts.add_slices(tpu_type, 1, CPUS, attributes)
        for attributes in self._fleet.hosts:
            self.hosts.add_hosts(1, CPUS, attributes)
        self.agenda.after(0.0, self._someone_submits)
        self.agenda.after(self._fault_every_s, self._something_happens)

    # -- the story -----------------------------------------------------------------------------------------------------

    def play(self, steps: int) -> None:
        """Let things happen for that many steps; then nothing goes wrong any more, all ends, and nothing is left."""
        while self.steps < steps:
            self.run_until(self.now + 60.0)
        self._quiet = True
        for target, taints in list(self.state.fleet.taints.items()):
            self.apply([TaintLiftedEvent(target, name) for name in taints])
        self.run_until(self.now + HOUR)
        self.apply([JobCancelledEvent(job_id, "enough") for job_id in self._unfinished()])
        self.run_until(self.now + HOUR)
        self._look()
        self.counts["evicted"] = sum(one.outcome == "evicted" for one in self.history.attempts)
        assert not self._unfinished(), "jobs have not ended"
        assert not self.pools.running, f"something runs for ever: {self.pools.running}"
        held = {worker.node_id: worker.occupants for worker in self.state.workers.values() if worker.occupants}
        assert not held, f"hosts are held for ever: {held}"
        assert not any(self.state.usage.values()), self.state.usage
        self._dies()
        self.run_until(self.now + HOUR)
        self._look()

    def _someone_submits(self) -> None:
        if self._quiet:
            return
        self.agenda.after(self.chance.expovariate(1 / self._job_every_s), self._someone_submits)
        if len(self._unfinished()) >= self._most_jobs:
            return
        owners = [owner for owner in self._owners if owner in self.pools.incarnations]
        if len(owners) < 2 or self.chance.random() < 0.2:
            self._named += 1
            owners = [f"pool-{self._named}"]
            self.pools.incarnations[owners[0]] = 1
        owner = self.chance.choice(owners)
        self._named += 1
        job = draw_job(self.chance, f"job-{self._named}", owner, self._fleet)
        self._owners.setdefault(owner, []).append(job.spec.job_id)
        self._registry.is_met(owner)
        self._submit(job)

    def _something_happens(self) -> None:
        if self._quiet:
            return
        self.agenda.after(self.chance.expovariate(1 / self._fault_every_s), self._something_happens)
        what = self.chance.choice(FAULTS)
        self.counts[what] += 1
        self._struck = self._look_soon = True
        used = {attempt: set(held) for attempt, held in self.pools.running.items()}
        starting = {node_id for attempt in self.pools.starting() for node_id in used[attempt]}
        kept = {node_id for job in self.state.jobs.values() for node_id in promised(job)}
        places = self.chance.choice((set().union(*used.values()), starting, kept, self._draining, ()))
        hosts = sorted(places or self.state.workers)  # the order of the table depends on the seed of hashes
        if hosts:
            self._strike(what, self.chance.choice(hosts))

    def _strike(self, what: str, node_id: str) -> None:
        chance, slice_name = self.chance, self.state.workers[node_id].slice_name
        away_s = chance.choice((1.0, 30.0, 600.0))
        match what:
            case "lose":
                self.hosts.lose([node_id], "the host died", away_s)
            case "preempt" if slice_name is not None:
                self.hosts.preempt(slice_name, chance.choice((None, 10.0, 60.0)), away_s)
            case "warn" | "maintain":
                kind = NoticeKind.PREEMPTION if what == "warn" else NoticeKind.MAINTENANCE
                deadline = chance.choice((None, self.now + 20.0, self.now + 600.0))
                self.apply([WorkerDrainedEvent(node_id, "notice", kind, deadline)])
                if what == "warn":  # nothing takes a preemption back
                    self.agenda.after(60.0, self.hosts.lose, [node_id], "preempted", away_s)
            case "call off":
                self.apply([MaintenanceCalledOffEvent(one) for one in list(self._draining)])
            case "taint":
                until = chance.choice((None, self.now + 30.0))
                self.apply([TaintedEvent(chance.choice((node_id, slice_name or node_id)), "bad", "words", until)])
            case "lift":
                for target, taints in list(self.state.fleet.taints.items()):
                    self.apply([TaintLiftedEvent(target, name) for name in taints])
            case "suspect":
                self.apply([WorkerSuspectedEvent(node_id, "no answer", self.now)])
            case "bad host":
                self.pools.bad_hosts = {node_id} if chance.random() < 0.5 else set()
            case "stranger":
                changed = {"foreign": chance.choice(("a stranger", None))}
                self.apply([WorkerRegisteredEvent(**{**_facts(self._registered[node_id]), **changed})])
            case "pool dies" | "pool ends" if self.pools.incarnations:
                self._pool(chance.choice(list(self.pools.incarnations)), ends=what == "pool ends")
            case "blame" if self.state.jobs:
                job_id = chance.choice(list(self.state.jobs))
                self.apply([WorkerBlamedEvent(node_id, job_id, "boom", chance.choice(list(Fault)))])
            case "cancel the taker":
                gangs = (gang for job in self.state.jobs.values() for gang in job.gangs)
                takers = {gang.eviction.job_id for gang in gangs if gang.eviction and gang.eviction.job_id}
                self.apply([JobCancelledEvent(job_id, "cancelled by its user") for job_id in sorted(takers)])
            case "cancel" | "finish" | "no answer" | "yield":
                self._strike_job(what)

    def _strike_job(self, what: str) -> None:
        unfinished = self._unfinished()
        if not unfinished:
            return
        job_id = self.chance.choice(unfinished)
        if what == "cancel":
            self.apply([JobCancelledEvent(job_id, "cancelled by its user")])
        elif what == "finish":
            self.pools.finish(job_id)
        elif what == "yield":
            if len(self.state.jobs[job_id].gangs) == 1:
                self.apply([JobYieldsEvent(job_id, self.chance.random() < 0.7)])
        else:
            job = self.state.jobs[job_id]
            attempts = [job.current_attempt(gang) for gang in self.state.placed_gangs(job)]
            self.apply([TaskDispatchFailedEvent(attempt, "no answer", self.now) for attempt in attempts])
            for attempt in attempts:  # the Controller has it stopped, since its pool may have got the order after all
                self.pools._stop(StopAttempt(attempt, "no answer"))

    def _pool(self, owner: str, ends: bool) -> None:
        """The process of a pool dies. Ray starts it anew, or its caller is gone, too."""
        self.pools.died(owner, self._jobs_of(owner))
        self._late = {number: event for number, event in self._late.items() if _owner_of(event, self) != owner}
        self._unacknowledged = [
            event
            for event in self._unacknowledged
            if _owner_of(event, self) != owner
            or (not ends and isinstance(event, JobSubmittedEvent | JobCancelledEvent))
        ]
        if ends:
            del self.pools.incarnations[owner]
            self._run(self._registry.ends(owner))
        else:
            self.pools.incarnations[owner] += 1
            self._run(self._registry.process_is(owner, self.pools.incarnations[owner]))

    def _jobs_of(self, owner: str) -> set[str]:
        """Return the ids of a pool's jobs, and of their spares."""
        own = set(self._owners.get(owner, ()))
        spares = (job.spec.job_id for job in self.state.jobs.values() if job.spec.owner == owner)
        return own.union(spares)

    def _unfinished(self) -> list[str]:
        return [i for i, job in self.state.jobs.items() if not job.state.finished and job.spec.spare_for is None]

    # -- what reaches the Controller -----------------------------------------------------------------------------------

    def _report(self, events: Iterable[Event]) -> None:
        """What pools say comes late, twice, or in another order."""
        now = []
        for event in events:
            luck = 1.0 if self._quiet or isinstance(event, SliceReleasedEvent) else self.chance.random()
            if luck < self._unreliable:
                self._send_late(event)
            if luck > self._unreliable / 2:
                now.append(event)
        if now and self.chance.random() < self._unreliable:
            self.chance.shuffle(now)
        self.apply(now)

    def _send_late(self, event: Event) -> None:
        self._sent += 1
        self._late[self._sent] = event
        self.agenda.after(self.chance.choice((0.0, 0.4, 3.0, 40.0)), self._comes_late, self._sent)

    def _comes_late(self, number: int) -> None:
        if (event := self._late.pop(number, None)) is not None:
            self.apply([event])

    def apply(self, events: Iterable[Event]) -> None:
        if self._told < self.agenda.now:
            self._told = self.agenda.now
            self._instructions.add(self.state.handle_event(TimePassedEvent(self._told)))
        for event in events:
            self._really_happens(event)
            if not isinstance(event, READ_ANEW):
                self._unacknowledged.append(event)
            try:
                self._instructions.add(self.state.handle_event(event))
            except IllegalTransitionError:
                assert isinstance(event, TaskStateChangedEvent | AttemptEndConfirmedEvent | JobYieldsEvent), event
                self.counts["refused"] += 1
            self._changed = True

    def _really_happens(self, event: Event) -> None:
        match event:
            case WorkerRegisteredEvent():
                self._registered[event.node_id] = event
            case WorkerFailedEvent():
                self._registered.pop(event.node_id, None)
                self._draining.pop(event.node_id, None)
                self.pools.host_lost(event.node_id)
            case WorkerDrainedEvent() if event.node_id in self._registered:
                self._draining.setdefault(event.node_id, []).append(event)
            case MaintenanceCalledOffEvent():
                told = self._draining.pop(event.node_id, [])
                if left := [one for one in told if one.kind is not NoticeKind.MAINTENANCE]:
                    self._draining[event.node_id] = left

    # -- the Controller ------------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Plan, commit, write, carry out; the Controller may be killed before any write, and after the last one."""
        self.apply(())
        self.history.plans += 1
        self._plans_at = Counter({self.now: self._plans_at[self.now] + 1})
        assert self._plans_at[self.now] < MOST_PLANS_AT_ONCE, "plan follows plan, and nothing comes of it"
        looks = self._look_soon or self.history.plans % self._check_after == 0
        if looks:
            self._plan_twice()
        placements = self._planner.plan(self.now, self._instructions)
        self._require_no_defect()
        waiting = {job.spec.job_id for job in self.state.pending()}
        assert self._planner.unfinished or waiting <= self._planner.pending_reasons.keys(), (
            "a job waits without a reason"
        )
        orders = [(self._orders.order(one.job, one.gang), one) for one in placements]
        instructions, self._instructions = self._instructions, Instructions()
        note = self._written.turn(self.state)
        deadly = 0.0 if self._quiet else max(self._deadly, 0.3 * self._struck)
        self._store.writes_left, self._struck = fates(self.chance, deadly, 12), False
        try:
            self._run(self._journal.write(self.state))
            if self._store.writes_left is not None and self.chance.random() < 0.5:
                raise Killed
        except Killed:
            note()
            self._dies()
            return
        note()
        self._unacknowledged.clear()
        self._changed = self._planner.unfinished
        self._orders.carry_out(instructions)
        for order, placement in orders:
            self._orders.dispatch(order, placement)
        if self._planner.pending_reasons and self._looks_at <= self.now:
            self._looks_at = self.now + self._look_again_s
            self.look_at(self._looks_at)
        if looks:
            self._look_soon = False
            self._look()

    def _plan_twice(self) -> None:
        """The same snapshot gives the same plan, but for searches that go on where the last one ended."""
        planner, spares = self._planner, [*self.state.spares(), *self.state.yielding()]
        one, other = (planner._find(list(self.state.pending()), self.now, None, spares) for _ in range(2))
        if one.complete and other.complete and one.promises == other.promises:
            assert (one.assignments, one.starving) == (other.assignments, other.starving)
            assert one.pending_reasons.keys() == other.pending_reasons.keys()
        planner._scheduler.check(self.now)

    def _dies(self) -> None:
        """The Controller is killed, and the next one goes on; it may be killed as it comes back."""
        while True:
            self.counts["killed"] += 1
            self._store.killed = False
            self._new_controller()
            self._store.writes_left = fates(self.chance, 0.0 if self._quiet else 0.3, 40)
            self._compared = self._is_back = False
            try:
                self._run(self._comes_back())
                break
            except Killed:
                self._background.forget()
                if f"complete/{self._journal.epoch}" in self._store.values and not self._is_back:
                    self._written.all_of(self.state)
        self._store.writes_left = None
        self.pools.forget_unknown()
        repeated, self._unacknowledged = self._unacknowledged, []
        for event in repeated:
            if isinstance(event, JobSubmittedEvent) and event.spec.owner in self.pools.incarnations:
                self._registry.is_met(event.spec.owner)
        self.apply(repeated)
        self._changed = self._look_soon = True
        self.state.check()

    async def _comes_back(self) -> None:
        nodes: Any = Nodes(self.state, self._registered, self._draining)
        args: Any = self.state, self._journal, self._registry, nodes, self._orders, lambda: None
        await recovery.come_back(*args)
        if self._store.killed:  # while it wrote some values side by side
            raise Killed
        self._is_back = True
        self._written.all_of(self.state)
        await self._background.run()  # what follows from this is not written yet

    def _new_controller(self) -> None:
        self.state = WatchedState(self._count)
        self.pools.meet(self.state)
        self.hosts = self._hosts_of(self.state)
        self._journal: Journal = new_journal(self._store, lambda: self.now)
        self._background = Background()
        arguments = self._journal, self.state, self.apply, self._background
        self._registry = Registry(self.pools, self._restored, *arguments)
        logs: Any = None
        self._orders = Orders(self.pools, self.state, self._journal, self._registry, logs, self.apply, self._background)
        self._planner = Planner(
            self.state, self._look_again_s, Scheduler(self._bound_s, self._evictions), self._most_placed
        )
        self._instructions = Instructions()
        self._told = self._looks_at = 0.0
        self._compared = True

    def _hosts_of(self, state: ControllerState) -> SimulatedHosts:
        hosts = getattr(self, "hosts", None)
        if hosts is None or hosts._pools is not self.pools:
            return SimulatedHosts(self.agenda, state.fleet, self.apply, self.history, self.pools)
        hosts._fleet = state.fleet
        return hosts

    def _restored(self) -> None:
        if not self._compared:
            self._compared = True
            self._written.compare(self.state, self._registered)

    def _count(self) -> None:
        self.steps += 1

    def _note(self, placement: PlacedGang) -> None:
        super()._note(placement)
        self.counts["attempts"] += 1

    def _look(self) -> None:
        """The state is whole, and agrees with what really is."""
        self.state.check()
        assert self.state.workers.keys() == self._registered.keys()
        for node_id, worker in self.state.workers.items():
            assert (worker.draining is not None) == (node_id in self._draining), f"{node_id} has notice, or should have"
        self._look_at_spares()
        on_their_way = {found for event in self._late.values() if (found := _attempt_of(event)) is not None}
        self.pools.check(on_their_way, self._instructions)

    def _look_at_spares(self) -> None:
        """A gang on slices has the spares that it asked for, and replacements of slices that go.

        One that runs once, or that yields, has no replacements.
        """
        jobs = self.state.jobs
        have = Counter((held.job_id, held.purpose) for job in jobs.values() if (held := job.spec.spare_for))
        for job_id, job in jobs.items():
            runs = job.spec.is_one_gang and job.requirement.chips and job.gang.placed and not job.spec.spare_for
            spares = (other for other in jobs.values() if other.spec.spare_for == SpareFor(job_id, SparePurpose.SPARE))
            sound = sum(spare.gang.placed and not self._slices_that_go(spare) for spare in spares)
            replaced = runs and not (job.spec.runs_once or job.yields)
            replacements = max(0, self._slices_that_go(job) - sound) if replaced else 0
            needed = job.spec.spares if runs else 0, replacements
            assert needed == (have[job_id, SparePurpose.SPARE], have[job_id, SparePurpose.REPLACEMENT]), job_id

    def _slices_that_go(self, job: Job) -> int:
        tasks = job.gang.tasks
        each = len(tasks) // max(1, len(job.gang.groups))
        return len({number // each for number, task in enumerate(tasks) if task.node_id in self._draining})

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._loop.run_until_complete(coroutine)
        if self._store.killed:
            raise Killed


@contextlib.contextmanager
def stage() -> Iterator[asyncio.Runner]:
    """Within, worlds can be played: what needs Ray does nothing, records have small chunks, few jobs are kept."""
    with (
        asyncio.Runner() as runner,
        mock.patch.object(pool_registry, "remove_reservations"),
        mock.patch.object(Pool, "is_one", return_value=True),
        mock.patch.object(asyncio, "to_thread", _at_once),
        mock.patch.object(records, "GANGS_PER_CHUNK", 4),
        mock.patch.object(write_ahead_log, "MOST_ENTRIES", 7),
        mock.patch.object(job_table, "FINISHED_JOBS_KEPT", 10),
    ):
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield runner
        finally:
            logging.disable(before)


async def _at_once(function: Any, *args: Any) -> Any:
    return function(*args)


def _facts(host: WorkerRegisteredEvent) -> dict[str, Any]:
    return {name: getattr(host, name) for name in WorkerRegisteredEvent.__dataclass_fields__}


def _attempt_of(event: Event) -> AttemptId | None:
    return getattr(event, "attempt", None)


def _owner_of(event: Event, world: RandomWorld) -> str | None:
    """Return the pool that says so; None if it is none."""
    attempt = _attempt_of(event)
    job_id = event.spec.job_id if isinstance(event, JobSubmittedEvent) else getattr(event, "job_id", "")
    job_id = attempt.job_id if attempt is not None else job_id
    if isinstance(event, WorkerBlamedEvent | TaintedEvent):
        return None
    return next((owner for owner in world._owners if job_id in world._jobs_of(owner)), None)
