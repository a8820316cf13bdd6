"""What happens to hosts: they come, go, change, move and are repaired, and a successor of the Controller takes over."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from iris_ray.model.constraints import AttributeValue, Scalar
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import NoticeKind
from iris_ray.model.outcomes import Fault
from iris_ray.model.workers import TPU_NAME
from iris_ray.state import ControllerState, records
from iris_ray.state.events import (
    Event,
    JobRestoredEvent,
    LimitsSetEvent,
    MaintenanceCalledOffEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    TimePassedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from iris_ray.state.instructions import Instructions
from tests.proofs.state_machine.account import Account
from tests.proofs.state_machine.oracle import Oracle
from tests.proofs.state_machine.strategies import (
    ODDITIES,
    OWNERS,
    PICK,
    PLACES,
    RACK_PLACES,
    SOUND,
    TPU_PLACES,
    TROUBLE,
)
from tests.proofs.state_machine.views import view_all
from tests.support.recorded import Recorded
from tests.support.worlds import World, host


class HostRules(RuleBasedStateMachine):
    """Random events of hosts, and what every rule needs."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.places: dict[str, tuple[str, int]] = {}  # node id → where it stands
        self.oracle = Oracle(self.world, self.places)
        self.history: list[Event] = []
        self.unsent: list[Event] = []  # what the scheduler decided a while ago
        self.joined = 0
        self.looks_often = True
        self.recorded = Recorded()
        self.small_chunks = mock.patch.object(records, "GANGS_PER_CHUNK", 2)
        self.small_chunks.start()
        for place in PLACES:
            self.join(place)

    @property
    def state(self) -> ControllerState:
        return self.world.state

    @property
    def account(self) -> Account:
        return self.oracle.account

    def apply(self, event: Event) -> Instructions | None:
        """Apply an event and check all that it may change; None if it is refused."""
        instructions = self.oracle.apply(event)
        self.recorded.write_all(self.state)
        if instructions is not None:
            self.history.append(event)
        return instructions

    @rule(pick=st.integers(0, 200), count=st.integers(1, 3))
    def the_past_comes_again(self, pick: int, count: int) -> None:
        """Events that were delivered before are delivered again."""
        for event in deepcopy(self.history[pick % len(self.history) :][:count]):
            if not isinstance(event, WorkerRegisteredEvent) or self.is_of_its_place(event):
                self.apply(event)

    @precondition(lambda self: self.state.workers)
    @rule(troubles=st.lists(st.tuples(PICK, TROUBLE), min_size=1, max_size=3))
    def some_trouble(self, troubles: list[tuple[int, str]]) -> None:
        for pick, trouble in troubles:
            if self.state.workers:
                self.trouble(self.worker(pick), pick, trouble)

    def trouble(self, node_id: str, pick: int, trouble: str) -> None:
        match trouble:
            case "lost":
                for _ in range(2):
                    self.apply(WorkerFailedEvent(node_id, "the host died"))
            case "drain":
                kind = list(NoticeKind)[pick % 2]
                deadline = (None, self.world.now + 10.0, self.world.now + 3600.0)[pick % 3]
                for _ in range(2):
                    self.apply(WorkerDrainedEvent(node_id, "notice", kind, deadline))
            case "call off":
                known = self.account.notices.items()
                announced = [host for host, (kind, _) in known if kind is NoticeKind.MAINTENANCE] or [node_id]
                for _ in range(2):
                    self.apply(MaintenanceCalledOffEvent(announced[pick % len(announced)]))
            case "drain by itself":  # Ray's node table says so
                deadline = (None, self.world.now + 20.0)[pick % 2]
                event = replace(self.registration(node_id), draining="Ray drains it", deadline=deadline)
                self.apply(event)
                assert self.state.knows(event)
            case "blamed":
                for number in range(1 + pick % 4):
                    job_id = f"job-{(pick + (number if pick > 6 else 0)) % 2}"
                    self.apply(WorkerBlamedEvent(node_id, job_id, "boom", list(Fault)[pick % len(Fault)]))
            case "tainted":
                target = (node_id, self.places[node_id][0])[pick % 2]
                name, until = ("bad", "quarantined")[pick % 3 > 1], (None, self.world.now + 5.0)[pick % 4 > 0]
                self.apply(TaintedEvent(target, name, "an operator says so", until))
                if pick > 11:
                    self.apply(TaintLiftedEvent(target, name))
            case "silent":
                self.apply(WorkerSuspectedEvent(node_id, "no answer", self.world.now))
            case "foreign":
                self.apply(replace(self.registration(node_id), foreign="a stranger"))
            case "early":  # it is replaced before its death is known: then two have the same number
                self.join(self.places[node_id])
            case "moved":  # it registers in another slice, or another rack, whatever runs there
                self.move(node_id, pick)
            case "odd":
                self.change(node_id, ODDITIES[pick % len(ODDITIES)])
            case "all odd":
                for member in self.oracle.members(self.places[node_id][0]):
                    self.change(member.node_id, ODDITIES[pick % len(ODDITIES)])

    def move(self, node_id: str, pick: int) -> None:
        """The host registers at another place of its kind."""
        kinds: tuple[list[tuple[str, int]], ...] = list(TPU_PLACES), RACK_PLACES
        for kind in kinds:
            if self.places[node_id] in kind:
                place = kind[pick % len(kind)]
                event = self.registration(node_id, place=place)
                if TPU_PLACES.get(place) == TPU_PLACES.get(self.places[node_id]):
                    self.apply(event)
                    self.places[node_id] = place
                return

    def change(self, node_id: str, oddity: Mapping[str, Scalar | None]) -> None:
        """Another registration of the same host."""
        event = self.registration(node_id, oddity)
        for _ in range(2):
            self.apply(event)
            assert self.state.knows(event)

    @rule()
    def repair(self) -> None:
        """Every place gets one sound host, and all taints are lifted."""
        for target, name in list(self.account.taints):
            self.apply(TaintLiftedEvent(target, name))
        for place in PLACES:
            there = [worker for i, worker in self.state.workers.items() if self.places[i] == place]
            there.sort(key=lambda worker: worker.draining is not None)
            for superfluous in [worker for worker in there if worker.draining or worker is not there[0]]:
                self.apply(WorkerFailedEvent(superfluous.node_id, "the host died"))
            if not there or there[0].draining:
                self.join(place)
            elif not self.state.knows(event := self.registration(there[0].node_id)):
                self.apply(event)

    @rule()
    def a_successor_takes_over(self) -> None:
        """What comes back from the records is what was there; attempts that are over are stopped once more."""
        self.apply(TimePassedEvent(self.world.now))  # taints whose time is over are not left behind
        old, new = self.state, ControllerState()
        self.oracle.latest = (0, 0, 0), 0.0, {}  # its fleet counts its changes anew
        new.handle_event(TimePassedEvent(self.account.now))
        for (user, band), limits in old.limits.table.items():
            new.handle_event(LimitsSetEvent(user, band, limits))
        for target, taints in old.fleet.taints.items():
            for name, taint in taints.items():
                new.handle_event(TaintedEvent(target, name, taint.reason, taint.until))
        for worker in old.workers.values():
            facts = worker.node_id, worker.address, worker.reported, dict(worker.resources)
            new.handle_event(WorkerRegisteredEvent(*facts, foreign=worker.foreign))
            for draining, notice in ((worker.draining, worker.notice), worker.final or (None, None)):
                if draining is not None and notice is not None:
                    new.handle_event(WorkerDrainedEvent(worker.node_id, draining, notice.kind, notice.deadline))
            if worker.suspected:
                since = worker.suspected_until - SUSPICION_S
                new.handle_event(WorkerSuspectedEvent(worker.node_id, worker.suspected, since))
        for name, owner in old.holders.items():
            new.handle_event(SliceHeldEvent(name, owner))
        stopped: set[AttemptId] = set()
        told: dict[AttemptId, tuple[NoticeKind, float]] = {}
        written = self.recorded.records()
        assert [record.job.spec.job_id for record in written] == list(old.jobs)
        for record in written:
            instructions = new.handle_event(JobRestoredEvent(record))
            assert not instructions.finished
            assert not instructions.dropped
            told |= {n.attempt: (n.notice.kind, n.notice.deadline) for n in instructions.notices}
            stopped |= {stop.attempt for stop in instructions.stop}
        assert stopped == {attempt for attempt in self.account.held if not self.oracle.is_live(attempt)}
        assert told == self.account.told, "they may not have heard of it"
        assert view_all(new) == view_all(old)
        new.handle_event(TimePassedEvent(self.account.now))
        assert view_all(new) == view_all(old)
        self.account.blames.clear()
        self.account.set_aside.clear()
        self.account.avoided.clear()
        self.world.state = new

    @rule(name=st.sampled_from(["a", "b", "c", "Large"]), owner=st.sampled_from(OWNERS))
    def release(self, name: str, owner: str) -> None:
        self.apply(SliceReleasedEvent(name, owner))

    def join(self, place: tuple[str, int]) -> None:
        """A new worker at a place."""
        self.joined += 1
        node_id = f"{place[0]}-{place[1]}-{self.joined}"
        self.places[node_id] = place
        self.apply(self.registration(node_id))

    def registration(
        self,
        node_id: str,
        oddity: Mapping[str, Scalar | None] | None = None,
        place: tuple[str, int] | None = None,
    ) -> WorkerRegisteredEvent:
        """That of a sound host in its place, or in another one, but for an oddity."""
        name, number = place or self.places[node_id]
        if (name, number) in TPU_PLACES:
            event = host(name, number, TPU_PLACES[name, number], node_id=node_id)
        else:
            event = WorkerRegisteredEvent(node_id, "10.0.0.9", {}, {"CPU": 8.0})
        if (name, number) in RACK_PLACES:
            rack = {"rack": AttributeValue(name)}
            event = replace(event, attributes=rack, resources={"TPU": 4.0, "CPU": 8.0})
        reported = {key: value.value for key, value in event.attributes.items()}
        attributes: dict[str, Scalar | None] = {**reported, **SOUND, **(oddity or {})}
        kept = {key: AttributeValue(value) for key, value in attributes.items() if value is not None}
        without_chips = "TPU" in (oddity or {})
        return replace(event, attributes=kept, resources={"CPU": 8.0} if without_chips else event.resources)

    def is_of_its_place(self, event: WorkerRegisteredEvent) -> bool:
        """Whether the host still stands where it did when it registered so."""
        name = event.attributes.get(TPU_NAME) or event.attributes.get("rack")
        return name is None or name.value == self.places[event.node_id][0]

    def worker(self, pick: int) -> str:
        return list(self.state.workers)[pick % len(self.state.workers)]

    @invariant()
    def state_is_whole(self) -> None:
        self.state.check()

    @invariant()
    def every_host_has_the_tasks_that_it_should_have(self) -> None:
        self.oracle.check_hosts()

    @invariant()
    def holds_are_as_the_events_say(self) -> None:
        self.oracle.check_holds()

    @invariant()
    def jobs_are_counted_right(self) -> None:
        self.oracle.check_jobs()
