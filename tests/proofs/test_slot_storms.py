"""Requests, sessions, loads, losses and reports in random order, late and doubled: no device is over-committed after
any step, nobody is forgotten, and everybody is answered once the storm is over."""

from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from tests.support.proofs import EXAMPLES, examples, in_proofs
from tests.support.slot_world import SlotWorld
from tests.support.slots import GB, chips, gpus, model

MODELS = (
    model("small", 20, concurrency=2),
    model("large", 60),
    model("wide", memory={1: 75 * GB, 2: 45 * GB}, concurrency=4),
    model("pair", memory={2: 30 * GB}),
    model("one", 30, group="g"),
    model("two", 30, group="g", concurrency=2),
    model("alone", memory={1: 30 * GB, 2: 15 * GB}, alone=True),
    model("chips", memory={1: 10 * GB, 2: 8 * GB}, kind=DeviceKind.TPU),
)
POLICY = ServingPolicy(
    placement=PlacementPolicy(stale_at=IdleFor(2.0), min_residency_s=1.0),
    most_waiting=12,
    ageing_s=10.0,
    drain_s=8.0,
    load_s=30.0,
    late_s=10.0,
    idle_s=60.0,
    longest_pause_s=4.0,
    avoid_runner_s=10.0,
    silence_s=15.0,
)
SPECS = st.sampled_from(MODELS)
ANY = st.integers(0, 99)


class SlotStorm(RuleBasedStateMachine):
    """One world, and what may happen in it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = SlotWorld(POLICY)
        self.asked: set[str] = set()
        self.cancelled: set[str] = set()
        self.joined = 0
        self.steps = 0

    @initialize(sessions=st.lists(SPECS, max_size=4))
    def begin(self, sessions) -> None:
        self.join(2)
        for spec in MODELS:
            self.world.hear(ev.ModelRegistered(spec))
        for spec in sessions:
            self.open(spec, 20.0, None)
        self.world.settle()
        for session_id in self.world.open_sessions():
            self.world.begin_call(session_id)

    @rule(count=st.sampled_from([1, 2, 4]))
    def join(self, count: int) -> None:
        if len(self.world.runners) < 3:
            self.joined += 1
            made = chips(f"t{self.joined}", 4) if self.joined % 3 == 0 else gpus(f"g{self.joined}", count)
            self.world.join(made)

    @rule(spec=SPECS, priority=st.booleans(), patience=st.sampled_from([None, None, 20.0]))
    def ask(self, spec, priority: bool, patience: float | None) -> None:
        name = f"r{len(self.asked)}"
        self.asked.add(name)
        deadline = None if patience is None else self.world.now + patience
        self.world.ask(name, spec.name, priority=priority, deadline=deadline)

    @rule(spec=SPECS, idle_s=st.sampled_from([3.0, 20.0, 1000.0]), patience=st.sampled_from([None, 20.0]))
    def open(self, spec, idle_s: float, patience: float | None) -> None:
        name = f"s{len(self.asked)}"
        self.asked.add(name)
        deadline = None if patience is None else self.world.now + patience
        self.world.open(name, spec.name, idle_s, deadline=deadline)

    @rule(n=ANY, ago=st.sampled_from([0.0, 2.0, 10.0]))
    def renew(self, n: int, ago: float) -> None:
        sessions = sorted(self.world.open_sessions())
        self.world.renew(*sessions[n % (len(sessions) + 1) :], ago=ago)

    @rule(n=ANY)
    def call(self, n: int) -> None:
        if sessions := sorted(self.world.open_sessions()):
            self.world.begin_call(sessions[n % len(sessions)])

    @rule(n=ANY)
    def end_call(self, n: int) -> None:
        if calls := sorted(name for each in self.world.processes.values() for name in each.calls):
            self.world.end_call(calls[n % len(calls)])

    @rule(n=ANY)
    def cancel(self, n: int) -> None:
        if self.asked:
            name = sorted(self.asked)[n % len(self.asked)]
            self.cancelled.add(name)
            self.world.hear(ev.RequestCancelled(name))

    @rule(n=ANY, orders=st.integers(1, 5))
    def carry_out(self, n: int, orders: int) -> None:
        for _ in range(orders):
            busy = [runner_id for runner_id, waiting in self.world.orders.items() if waiting]
            if busy:
                self.world.carry_out(busy[n % len(busy)])

    @rule(n=ANY)
    def load(self, n: int) -> None:
        if self.world.processes:
            self.world.load(sorted(self.world.processes)[n % len(self.world.processes)])

    @rule(n=ANY)
    def answer(self, n: int) -> None:
        running = [(r, each.slot_id) for each in self.world.processes.values() if each.ready for r in each.requests]
        if running:
            self.world.end_request(*sorted(running)[n % len(running)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(n=ANY)
    def lose_runner(self, n: int) -> None:
        if len(self.world.runners) > 1:
            self.world.lose(sorted(self.world.runners)[n % len(self.world.runners)])

    @rule(n=ANY, heard=st.booleans())
    def lose_process(self, n: int, heard: bool) -> None:
        if self.world.processes:
            slot_id = sorted(self.world.processes)[n % len(self.world.processes)]
            del self.world.processes[slot_id]
            if heard:
                self.world.hear(ev.SlotEnded(slot_id))

    @rule(n=ANY)
    def fail_load(self, n: int) -> None:
        loading = sorted(name for name, each in self.world.processes.items() if not each.ready)
        if loading:
            self.world.hear(ev.SlotFailed(loading[n % len(loading)], "no such file"))

    @rule(n=ANY, closed=st.booleans())
    def close_runner(self, n: int, closed: bool) -> None:
        self.world.hear(ev.RunnerClosed(sorted(self.world.runners)[n % len(self.world.runners)], closed))

    @rule(spec=SPECS, replicas=st.integers(0, 2), prewarm=st.booleans())
    def register(self, spec, replicas: int, prewarm: bool) -> None:
        self.world.hear(ev.ModelRegistered(spec, replicas, prewarm))

    @invariant()
    def nobody_is_forgotten(self) -> None:
        core = self.world.reconciler
        waiting = {request.request_id for request in core.queue}
        told = set(self.world.answered) | set(self.world.refused) | set(self.world.ended)
        known = waiting | set(core.active.by_id) | told | self.cancelled
        assert known >= self.asked, self.asked - known

    @invariant()
    def looking_at_all_models_finds_nothing_more_to_do(self) -> None:
        self.steps += 1
        if self.steps % 5:  # it takes long
            return
        core = deepcopy(self.world.reconciler)
        for _ in range(20):
            if not core.handle(ev.Tick(), self.world.now):
                break
        core._planner.look_at_all()
        more = core.handle(ev.Tick(), self.world.now)
        assert not more, more

    def teardown(self) -> None:
        """The storm is over: there are runners for everything, and all who still wait are answered."""
        world = self.world
        for runner_id in list(world.runners):
            world.hear(ev.RunnerClosed(runner_id, closed=False))
        for spec in MODELS:
            world.hear(ev.ModelRegistered(spec))
        world.join(gpus("last", 2))
        world.join(chips("last chips", 4))
        for process in list(world.processes.values()):
            for session_id in sorted(process.calls):
                world.end_call(session_id)
        world.run(160)
        missing = self.asked - set(world.answered) - set(world.refused) - set(world.ended) - self.cancelled
        assert not missing, missing
        assert len(world.reconciler.queue) == 0
        assert not world.reconciler.active.by_id
        super().teardown()


@pytest.mark.timeout(900 * max(1.0, EXAMPLES))
@pytest.mark.parametrize(("part", "storms"), [("some", 25), *in_proofs(*((f"part {n}", 250) for n in range(2)))])
def test_storms_over_commit_nothing_and_leave_nobody_behind(part: str, storms: int) -> None:
    machine = type(f"SlotStorm of {part}", (SlotStorm,), {})  # fixed seeds come from the name
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(storms), stateful_step_count=40))
