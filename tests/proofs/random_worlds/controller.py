"""What is real of a Controller beside its state and planner: the journal, the recovery, the registry of pools."""

import asyncio
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ray.exceptions import ActorDiedError

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.pool_registry import Pool, PoolRegistry
from iris_ray.actors.protocol.messages import AttemptOrder, PoolView
from iris_ray.model.jobs import Gang, Job
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.scheduler.planner import PlacedGang
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    GangMovedEvent,
    PoolRestartedEvent,
    TaskStateChangedEvent,
    TimePassedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
)
from iris_ray.state.instructions import Instructions
from tests.proofs.random_worlds.pools import Pools
from tests.support.ray_in_process import Store


class Killed(BaseException):
    """The Controller's process is killed."""


class FatalStore(Store):
    """A key-value store whose writer may be killed before any write.

    Attributes:
        writes_left: so many writes before the kill; None: no kill.
        killed: whether its writer was killed.
        added: the latest key that was written because it was free.
    """

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self._chance = chance
        self.writes_left: int | None = None
        self.killed = False
        self.added = ""
        self.before_write = self._count

    async def set(self, key: str, value: bytes | None) -> None:
        if self.writes_left is not None and self._chance.random() < 0.3:
            await asyncio.sleep(0)  # others overtake it
        await super().set(key, value)

    async def add(self, key: str, value: bytes) -> bool:
        is_new = await super().add(key, value)
        self.added = key if is_new else self.added
        return is_new

    def _count(self) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                self.killed = True
                raise Killed
            self.writes_left -= 1


class WatchedState(ControllerState):
    """A state that counts the events that it handles. No event charges more attempts than it can have ended.

    Args:
        count: called for each.
    """

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self._count = count

    def handle_event(self, event: Event) -> Instructions:
        self._count()
        most, before = self._may_charge(event), self._charged()
        instructions = super().handle_event(event)
        charged = {job_id: count - before[job_id] for job_id, count in self._charged().items() if job_id in before}
        assert sum(charged.values()) <= most, f"{event} charges {charged}"
        return instructions

    def _charged(self) -> dict[str, int]:
        return {job_id: job.failures + job.preemptions for job_id, job in self.jobs.items()}

    def _may_charge(self, event: Event) -> int:
        """Return how many attempts an event can end that had begun. Moves, evictions and failed launches are free.

        The evictions of jobs that run once are not.
        """
        match event:
            case GangMovedEvent(attempt) if attempt.job_id in self.jobs:
                return int(self.jobs[attempt.job_id].spec.runs_once)
            case TimePassedEvent():
                return sum(self.jobs[attempt.job_id].spec.runs_once for attempt in self.evicted)
            case TaskStateChangedEvent(new_state=TaskState.FAILED | TaskState.WORKER_FAILED):
                return 1
            case WorkerFailedEvent(node_id) | WorkerRegisteredEvent(node_id) if node_id in self.workers:
                return len({attempt for _, attempt in self.workers[node_id].occupants if self._has_begun(attempt)})
            case PoolRestartedEvent(owner):
                return sum(len(job.gangs) for job in self.jobs.values() if job.spec.owner == owner)
        return 0

    def _has_begun(self, attempt: AttemptId) -> bool:
        gang = self.jobs[attempt.job_id].gangs[attempt.gang]
        return gang.attempt == attempt.number and any(task.state is not TaskState.ASSIGNED for task in gang.tasks)


class GonePool:
    """A pool whose process has ended for good."""

    async def call(self, method: object) -> None:
        raise ActorDiedError


class Background:
    """Keeps coroutines until they are run, in order."""

    def __init__(self) -> None:
        self._queued: list[Any] = []

    def start(self, coroutine: Any, what: str) -> None:
        self._queued.append(coroutine)

    async def run(self) -> None:
        while self._queued:
            await self._queued.pop(0)

    def forget(self) -> None:
        while self._queued:
            self._queued.pop().close()


class Registry(PoolRegistry):
    """The pools that the Controller knows; the processes are simulated ones."""

    def __init__(self, pools: Pools, restored: Callable[[], None], *args: Any) -> None:
        super().__init__(*args)
        self._pools = pools
        self._restored = restored

    def is_met(self, owner: str) -> None:
        """Know a pool from now on."""
        if owner not in self:
            self._note(owner, Pool(owner), self._process_of(owner))

    async def ends(self, owner: str) -> None:
        """Do what the end of a pool requires."""
        if owner in self:
            await self._watch(owner, GonePool(), seen=True)  # type: ignore[arg-type]

    async def process_is(self, owner: str, incarnation: int) -> None:
        self._restored()
        await super().process_is(owner, incarnation)

    def watch(self, seen: Iterable[str]) -> None:
        self._restored()
        for owner in self.keys() - self._pools.incarnations.keys():
            self._background.start(self.ends(owner), "the end of a pool")

    async def _view_of(self, owner: str, pool: Pool) -> PoolView | None:
        if owner not in self._pools.incarnations:
            return None
        return PoolView(self._process_of(owner), tuple(self._pools.held_by(owner)))

    def _process_of(self, owner: str) -> int:
        return self._pools.incarnations[owner]


class Orders(Dispatcher):
    """Gives orders to simulated pools, at once."""

    def __init__(self, pools: Pools, *args: Any) -> None:
        super().__init__(*args)
        self._simulated = pools

    def dispatch(self, order: AttemptOrder, placement: PlacedGang) -> None:
        self._simulated.carry_out(Instructions(), [placement])

    def carry_out(self, instructions: Instructions) -> None:
        self._simulated.forget_unknown()
        self._simulated.carry_out(instructions, ())


@dataclass
class Nodes:
    """What Ray's node table, and what hosts say by themselves, would tell: the hosts that really are there."""

    state: ControllerState
    registered: dict[str, WorkerRegisteredEvent]
    draining: dict[str, list[WorkerDrainedEvent]]

    def events_of(self, _: object) -> list[Event]:
        hosts = [host for host in self.registered.values() if not self.state.knows(host)]
        told = (self.draining.get(host.node_id, []) for host in hosts)
        return [*hosts, *(event for events in told for event in events)]


class VirtualClock(Clock):
    """A Controller's clock that shows virtual time."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._virtual_now = now

    def now(self) -> float:
        return self._virtual_now()

    def look(self) -> None:
        """Nobody sets the wall clock."""

    def go_on_from(self, recorded: bytes) -> None:
        assert json.loads(recorded)[0] <= self.now()


def new_journal(store: FatalStore, now: Callable[[], float]) -> Journal:
    journal = Journal()
    journal.clock = VirtualClock(now)
    journal._store, journal.contained = store, Containment(store, journal.clock)  # type: ignore[assignment, arg-type]
    return journal


@dataclass(frozen=True)
class Kept:
    """All that a record keeps of a job, but for hosts that are gone."""

    gangs: tuple[tuple[object, ...], ...]
    rest: tuple[object, ...]
    held: frozenset[tuple[object, str]]
    runs_on: frozenset[str]

    @staticmethod
    def of(state: ControllerState, job: Job) -> "Kept":
        record = state.record(job.spec.job_id)
        assert record is not None
        held = {(attempt, place[0]) for attempt, places in record.allocations.items() for place in places}
        rest = (
            job.spec.job_id,
            job.number,
            job.state,
            job.failures,
            job.preemptions,
            job.started,
            job.error,
            job.yields,
            job.over,
        )
        runs_on = frozenset(task.node_id or "" for gang in job.gangs if gang.placed for task in gang.tasks)
        return Kept(tuple(map(_kept_of, job.gangs)), rest, frozenset(held), runs_on)

    @property
    def is_over(self) -> bool:
        return self.rest[-1] is not None

    def on(self, hosts: Collection[str]) -> "Kept":
        """The same without what is held of other hosts."""
        return replace(self, held=frozenset(held for held in self.held if held[1] in hosts))

    def is_on(self, hosts: Collection[str]) -> bool:
        """Whether all hosts of its live gangs are there."""
        return all(node_id in hosts for node_id in self.runs_on)


def _kept_of(gang: Gang) -> tuple[object, ...]:
    """Return what a record keeps of a gang, but for its notice: its hosts bring that back."""
    return (
        tuple((task.state, task.node_id, task.started_at, task.ended_at, task.exit_code) for task in gang.tasks),
        *(gang.attempt, gang.failures, gang.preemptions, gang.evictions, gang.dispatch_failures, gang.quick_ends),
        *(gang.not_before, gang.waiting_since, gang.returning_until, gang.running_since, gang.end_confirmed),
        *(gang.groups, gang.groups_wanted, gang.requeued, gang.error, gang.past, gang.eviction),
    )


class Written:
    """What the Controller has written of its jobs, to compare what its successor restores with it."""

    def __init__(self, store: FatalStore) -> None:
        self.jobs: dict[str, Kept] = {}
        self._store = store

    def turn(self, state: ControllerState) -> Callable[[], None]:
        """Return what notes the changes if their writing, which may be cut short, was done."""
        before = self._store.added
        changed = {job_id: Kept.of(state, state.jobs[job_id]) for job_id in state.unrecorded if job_id in state.jobs}
        gone = state.unrecorded.keys() - changed.keys()

        def note() -> None:
            if self._store.added != before:
                self.jobs |= changed
                self.jobs = {job_id: kept for job_id, kept in self.jobs.items() if job_id not in gone}

        return note

    def all_of(self, state: ControllerState) -> None:
        """Note that everything was written."""
        self.jobs = {job_id: Kept.of(state, job) for job_id, job in state.jobs.items()}

    def compare(self, state: ControllerState, hosts: Collection[str]) -> None:
        """A successor has the jobs that were written, as they were; those that have lost a host have lost attempts."""
        made_up = state.jobs.keys() - self.jobs.keys()
        lost = {job_id for job_id in self.jobs.keys() - state.jobs.keys() if not self.jobs[job_id].is_over}
        assert not made_up, f"{sorted(made_up)} came back though they were not written"
        assert not lost, f"{sorted(lost)} did not come back"
        for job_id, kept in self.jobs.items():
            if job_id in state.jobs and kept.is_on(hosts):  # else it is forgotten, since others ended
                found = Kept.of(state, state.jobs[job_id])
                assert found.on(hosts) == kept.on(hosts), f"{job_id} came back changed:\n{found}\n{kept}"


def fates(chance: Random, often: float, writes: int) -> int | None:
    """Return after how many writes the Controller is killed, or None."""
    return chance.randrange(writes) if chance.random() < often else None


async def nothing(*_: object) -> None:
    """Instead of what needs Ray."""
    await asyncio.sleep(0)
