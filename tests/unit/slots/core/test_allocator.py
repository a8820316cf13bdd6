"""Where slots go, and what is evicted for them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.slots.core.allocator import (
    MOST_PLANS,
    Allocator,
    NoPlace,
    Place,
    SlotRequirement,
)
from iris_ray.slots.core.devices import Device, DeviceKind, Needs, Runner
from iris_ray.slots.core.eviction import EvictionPlan, RunnerView
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy
from iris_ray.slots.core.slot import Allocation, Slot, SlotState
from tests.support.proofs import examples
from tests.support.slot_reference import Snapshot, best_score, commit, decide, fleet_of, score_of
from tests.support.slots import GB, chips, gpus, model

NOW = 100.0
DEFAULT = PlacementPolicy()
NAMES = st.sampled_from("mmnopghx")
SPECIAL: dict[str, Any] = {"g": {"group": "one of both"}, "h": {"group": "one of both"}, "x": {"alone": True}}


def slot(name: str, gigabytes: int, *devices: int, runner: str = "a", of: str = "", **kw) -> Slot:
    """A slot that was ready at 0 and has been idle since, of a model of its own unless it is said which."""
    spec = model(of or f"model of {name}", memory={len(devices): gigabytes * GB}, **SPECIAL.get(of, {}))
    place = Allocation(runner, devices, (gigabytes * GB,) * len(devices))
    return Slot(name, spec, place, 0.0, **{"state": SlotState.READY, "ready_at": 0.0, **kw})


def world(*slots: Slot, runners: tuple[Runner, ...] = (gpus(),), **prices: int) -> Snapshot:
    """Slots, and what it costs to evict some of them."""
    models = {each.slot_id: each.model for each in slots}
    return Snapshot(runners, slots, prices={models[name]: price for name, price in prices.items()})


def place(
    snapshot: Snapshot, spec: ModelSpec, policy: PlacementPolicy = DEFAULT
) -> tuple[str, tuple[int, ...], set[str]]:
    decision = decide(snapshot, SlotRequirement(spec), policy, NOW)
    assert isinstance(decision, Place), decision
    return decision.allocation.runner_id, decision.allocation.devices, set(decision.evict)


def test_device_with_most_free_memory_is_taken() -> None:
    assert place(world(slot("s", 10, 0), slot("t", 5, 1)), model()) == ("a", (1,), set())
    two = (gpus("a"), gpus("b", gigabytes=81))
    assert place(world(runners=two), model()) == ("b", (0,), set())


def test_runner_that_loaded_the_model_before_comes_first() -> None:
    snapshot = world(slot("s", 30, 0, runner="b"), runners=(gpus("a", 1), gpus("b", 1)))
    for size, runner in ((40, "b"), (60, "a")):
        decision = decide(snapshot, SlotRequirement(model(gigabytes=size), prefer={"b"}), DEFAULT, NOW)
        assert isinstance(decision, Place)
        assert decision.allocation.runner_id == runner


def test_model_is_split_only_if_one_device_is_too_small() -> None:
    spec = model(memory={1: 60 * GB, 2: 35 * GB})
    assert place(world(), spec) == ("a", (0,), set())
    busy = world(slot("s", 30, 0), slot("t", 30, 1))
    decision = decide(busy, SlotRequirement(spec), PlacementPolicy(), NOW)
    assert decision == Place(Allocation("a", (0, 1), (35 * GB, 35 * GB)))


def test_chips_are_exclusive_and_combined_as_neighbours() -> None:
    held = world(slot("s", 16, 1, runner="t"), runners=(chips(),))
    assert place(held, model(gigabytes=1, kind=DeviceKind.TPU)) == ("t", (0,), set())
    assert place(held, model(memory={2: GB}, kind=DeviceKind.TPU)) == ("t", (2, 3), set())
    decision = decide(held, SlotRequirement(model(memory={2: GB}, kind=DeviceKind.TPU)), PlacementPolicy(), NOW)
    assert isinstance(decision, Place)
    assert decision.allocation.bytes_each == (16 * GB, 16 * GB)


def test_cheapest_then_smallest_then_stalest_slot_is_evicted() -> None:
    assert place(world(slot("s", 60, 0), slot("t", 70, 1), s=5, t=4), model())[2] == {"t"}
    assert place(world(slot("s", 60, 0), slot("t", 70, 1), s=5, t=5), model())[2] == {"s"}
    assert place(world(slot("s", 60, 0, last_activity=9.0), slot("t", 60, 1)), model())[2] == {"t"}


@pytest.mark.parametrize(
    "kept",
    [
        {"state": SlotState.STARTING, "ready_at": None},
        {"active": {"r": 0.0}},
        {"claimed": True},
        {"ready_at": NOW - 5},
        {"last_activity": NOW - 5},
        {"of": "m"},
    ],
    ids=["loading", "active", "claimed", "just ready", "just used", "of the same model"],
)
def test_protected_slots_are_never_evicted(kept) -> None:
    name = "model of s" if "of" not in kept else "m"
    snapshot = world(slot("s", 60, 0, **kept), runners=(gpus(count=1),))
    assert isinstance(decide(snapshot, SlotRequirement(model("m")), PlacementPolicy(), NOW), NoPlace), name


def test_model_fitting_no_empty_host_is_refused_with_numbers() -> None:
    decision = decide(world(), SlotRequirement(model(memory={1: 90 * GB, 4: 30 * GB})), PlacementPolicy(), NOW)
    assert isinstance(decision, NoPlace)
    assert decision.for_ever
    assert "90,000,000,000 bytes on 1 or 30,000,000,000 bytes on each of 4 gpu devices" in decision.reason
    assert "a runner has 80,000,000,000 bytes on each of 2. Give" in decision.reason


def test_answer_without_any_matching_runner_is_not_final() -> None:
    decision = decide(world(), SlotRequirement(model(kind=DeviceKind.CPU)), PlacementPolicy(), NOW)
    assert decision == NoPlace("no runner with cpu devices satisfies the constraints of m")


def uneven(name: str, *gigabytes: int) -> Runner:
    return Runner(name, tuple(Device(DeviceKind.GPU, each * GB) for each in gigabytes))


@pytest.mark.parametrize(
    ("there", "needs", "devices"),
    [
        ((12, 6), (12, 6), (0, 1)),
        ((6, 12), (12, 6), (1, 0)),
        ((12, 6), (6, 12), (1, 0)),
        ((6, 24, 12), (12, 6), (1, 2)),
        ((4, 8, 6, 2), (2, 8, 6), (0, 1, 2)),
        ((8, 8), (6, 4), (0, 1)),
    ],
)
def test_largest_part_of_a_model_goes_to_the_roomiest_device(
    there: tuple[int, ...], needs: tuple[int, ...], devices: tuple[int, ...]
) -> None:
    spec = model(memory={len(needs): [each * GB for each in needs]})
    decision = decide(world(runners=(uneven("a", *there),)), SlotRequirement(spec), DEFAULT, NOW)
    assert decision == Place(Allocation("a", devices, tuple(each * GB for each in needs)))


def test_uneven_model_evicts_only_where_its_parts_need_room() -> None:
    spec = model(memory={2: (12 * GB, 6 * GB)})
    snapshot = world(slot("s", 6, 0), slot("t", 6, 1), slot("u", 1, 2), runners=(uneven("a", 12, 12, 6),), s=1, t=2)
    assert place(snapshot, spec) == ("a", (0, 1), {"s"})
    assert place(snapshot, model(memory={2: (6 * GB, 12 * GB)})) == ("a", (1, 0), {"s"})


def test_uneven_model_of_many_devices_finds_its_room_among_many() -> None:
    """There are 10^13 ways to give 16 devices to these sizes, and one fits: that of the sorted sizes."""
    sizes = [*range(40, 24, -1)]
    slots = [slot(f"s{number}", size, number) for number, size in enumerate(sizes)]
    spec = model(memory={16: [each * GB for each in sizes[::-1]]})
    found = place(world(*slots, runners=(uneven("a", *sizes),)), spec)
    assert found == ("a", tuple(range(15, -1, -1)), {each.slot_id for each in slots})
    never = decide(world(runners=(uneven("a", *sizes[:-1], 24),)), SlotRequirement(spec), DEFAULT, NOW)
    assert isinstance(never, NoPlace)
    assert never.for_ever


def test_uneven_model_that_fits_nowhere_is_refused_with_all_sizes() -> None:
    hosts = (uneven("a", 8, 10), uneven("b", 8, 10), gpus("c", count=1, gigabytes=24))
    spec = model(memory={1: 30 * GB, 2: (6 * GB, 12 * GB)})
    decision = decide(world(runners=hosts), SlotRequirement(spec), DEFAULT, NOW)
    assert decision == NoPlace(
        "m fits on no runner, not even on an empty one. It needs 30,000,000,000 bytes on 1 or 12,000,000,000 +"
        " 6,000,000,000 bytes on 2 gpu devices of one runner; a runner has 10,000,000,000 + 8,000,000,000 bytes on 2;"
        " or 24,000,000,000 bytes on 1. Give it less memory, allow it to be split over more devices, or add"
        " larger runners.",
        for_ever=True,
    )


def test_chips_are_alike_so_each_has_room_for_the_largest_part() -> None:
    spec = model(memory={2: (4 * GB, 2 * GB)}, kind=DeviceKind.TPU)
    assert place(world(slot("s", 16, 1, runner="t"), runners=(chips(),)), spec) == ("t", (2, 3), set())


def test_closed_avoided_and_unsuitable_runners_get_nothing() -> None:
    labelled = Runner("l", (Device(DeviceKind.GPU, 80 * GB),), {"zone": AttributeValue("us-a")})
    spec = model(constraints=(Constraint("zone", ConstraintOp.EQ, "us-a"),))
    assert place(world(runners=(gpus(), labelled)), spec)[0] == "l"
    two = (gpus("a"), gpus("b"))
    assert place(Snapshot(two, closed=frozenset({"a"})), model())[0] == "b"
    avoiding = decide(Snapshot(two), SlotRequirement(model(), frozenset({"a"})), PlacementPolicy(), NOW)
    assert isinstance(avoiding, Place)
    assert avoiding.allocation.runner_id == "b"


def test_slot_becomes_evictable_by_time_alone() -> None:
    allocator = Allocator(fleet_of(world(slot("s", 60, 0, ready_at=95.0), runners=(gpus(count=1),))), PlacementPolicy())
    assert isinstance(allocator.decide(SlotRequirement(model()), 100.0), NoPlace)
    assert isinstance(allocator.decide(SlotRequirement(model()), 105.0), Place)


def test_model_is_split_over_many_devices_of_a_host() -> None:
    """There are 5 × 10^14 sets of 16 among 64 devices."""
    runner = gpus(count=64)
    slots = [slot(f"s{number}", 60, number, **{"of": f"m{number % 40}"}) for number in range(64)]
    snapshot = world(*slots, runners=(runner,), **{f"s{number}": number for number in range(40)})
    runner_id, devices, evicted = place(snapshot, model(memory={16: 40 * GB}))
    assert (runner_id, devices) == ("a", (*range(8), *range(40, 48)))
    assert evicted == {f"s{number}" for number in devices}
    never = decide(snapshot, SlotRequirement(model(memory={16: 90 * GB})), DEFAULT, NOW)
    assert isinstance(never, NoPlace)
    assert never.for_ever


def test_equal_slots_on_many_devices_are_not_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an idle time, when nothing is in demand. There are 10^19 sets of slots on each runner."""
    searched: list[RunnerView] = []
    plan = RunnerView.plan

    def noted(view: RunnerView, needs: Needs) -> EvictionPlan | None:
        searched.append(view)
        return plan(view, needs)

    monkeypatch.setattr(RunnerView, "plan", noted)
    runners = tuple(gpus(f"r{number}", count=8) for number in range(50))
    slots = [
        slot(f"{runner.runner_id}-{device}-{part}", 10, device, runner=runner.runner_id)
        for runner in runners
        for device in range(len(runner.devices))
        for part in range(8)
    ]
    decision = decide(Snapshot(runners, tuple(slots)), SlotRequirement(model("m", 15)), DEFAULT, NOW)
    assert isinstance(decision, Place)
    assert len(decision.evict) == 2
    assert 0 < len(searched) <= MOST_PLANS


def test_more_wide_slots_give_way_than_are_compared_in_all_combinations() -> None:
    pairs = [slot(f"s{number}", 20, *((0, 1) if number < 4 else (2, 3))) for number in range(8)]
    found = place(world(*pairs, runners=(gpus(count=4),)), model("wide", memory={4: 60 * GB}))
    assert (found[1], len(found[2])) == ((0, 1, 2, 3), 6)


# -- against the reference -------------------------------------------------------------------------------------------

SIZES = st.sampled_from([10, 20, 30, 40, 60])


@st.composite
def snapshots(draw) -> Snapshot:
    kind = draw(st.sampled_from([DeviceKind.GPU, DeviceKind.TPU]))
    count = draw(st.sampled_from([1, 2, 3] if kind is DeviceKind.GPU else [1, 4]))
    alike = kind is DeviceKind.TPU or draw(st.booleans())
    gigabytes = [80] * count if alike else draw(st.lists(st.sampled_from([30, 60, 80]), min_size=count, max_size=count))
    devices_of_each = tuple(Device(kind, each * GB) for each in gigabytes)
    snapshot = Snapshot(tuple(Runner(f"r{number}", devices_of_each) for number in range(draw(st.integers(1, 2)))))
    fleet = fleet_of(snapshot)
    for number in range(draw(st.integers(0, 8))):
        runner = draw(st.sampled_from(snapshot.runners))
        devices = draw(st.sampled_from([s for degree in (1, 2) for s in runner.sets(degree)] or [(0,)]))
        size = draw(SIZES)
        each = tuple(runner.devices[device].charge(size * GB) for device in devices)
        state = draw(st.sampled_from([SlotState.READY] * 4 + [SlotState.STARTING, SlotState.DRAINING]))
        made = slot(f"s{number}", size, *devices, runner=runner.runner_id, of=draw(NAMES))
        fits = all(fleet.books[runner.runner_id].free_now()[n] >= need for n, need in zip(devices, each, strict=True))
        if fits and not fleet.excluded(runner.runner_id, made.spec):
            made.allocation = Allocation(runner.runner_id, devices, each)
            made.state = state
            made.last_activity = draw(st.sampled_from([0.0, 1.0, 95.0]))
            made.active |= {"r": 0.0} if draw(st.integers(0, 5)) == 0 else {}
            fleet.adopt(made)
    prices = {each.model: draw(st.integers(0, 3)) for each in fleet.slots.values()}
    closed = frozenset({"r0"}) if draw(st.integers(0, 6)) == 0 else frozenset()
    return Snapshot(snapshot.runners, tuple(fleet.slots.values()), closed, prices)


@st.composite
def requirements(draw, kind: DeviceKind) -> SlotRequirement:
    memory = dict[int, int | list[int]]()
    for degree in sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4]), min_size=1))):
        sizes = [draw(SIZES) * GB for _ in range(degree if draw(st.booleans()) else 1)]
        memory[degree] = sizes if len(sizes) == degree else sizes[0]
    name = draw(NAMES)
    return SlotRequirement(model(name, memory=memory, kind=kind, **SPECIAL.get(name, {})))


@settings(max_examples=examples(60))
@given(st.data(), snapshots(), st.booleans())
def test_chosen_plan_is_the_best_of_all(data, snapshot: Snapshot, spread: bool) -> None:
    policy = PlacementPolicy(spread_before_evicting=spread)
    requirement = data.draw(requirements(snapshot.runners[0].kind))
    decision = decide(snapshot, requirement, policy, NOW)
    best = best_score(snapshot, requirement, policy, NOW)
    if best is None:
        assert not isinstance(decision, Place)
    else:
        assert isinstance(decision, Place), decision
        assert score_of(decision, snapshot, requirement, policy, NOW) == best


@settings(max_examples=examples(40))
@given(st.data(), snapshots())
def test_remembering_allocator_decides_as_a_new_one(data, snapshot: Snapshot) -> None:
    fleet = fleet_of(snapshot)
    policy = PlacementPolicy(stale_at=IdleFor(5.0))
    allocator = Allocator(fleet, policy)
    for number in range(data.draw(st.integers(1, 8))):
        requirement, now = data.draw(requirements(snapshot.runners[0].kind)), NOW + 4 * number
        decision = allocator.decide(requirement, now)
        same = Snapshot(
            tuple(fleet.runners.values()), tuple(fleet.slots.values()), frozenset(fleet.closed), fleet.prices
        )
        best = best_score(same, requirement, policy, now)
        assert (best is None) is not isinstance(decision, Place)
        if isinstance(decision, Place):
            assert score_of(decision, same, requirement, policy, now) == best
            commit(allocator, f"new {number}", requirement.spec, decision, now)
        for each in list(fleet.slots.values()):
            if each.state is SlotState.STARTING and data.draw(st.booleans()):
                fleet.set_ready(each.slot_id, now)
            elif each.state is SlotState.DRAINING and data.draw(st.booleans()):
                fleet.end(each.slot_id)
            elif each.state is SlotState.PLANNED:
                fleet.start(each.slot_id, now)
        change_a_runner(data, fleet)
        fleet.check()


def change_a_runner(data, fleet: SlotFleet) -> None:
    """One is lost, closes, opens or comes, the price of a model changes, or nothing happens."""
    runner = data.draw(st.sampled_from(list(fleet.runners.values())))
    match data.draw(st.sampled_from(["nothing", "lose", "close", "open", "come", "expect", "price"])):
        case "lose" if len(fleet.runners) > 1:
            fleet.remove_runner(runner.runner_id)
        case "close" | "open" as what:
            fleet.set_open(runner.runner_id, what == "open")
        case "price":
            fleet.set_prices({each.model: data.draw(st.integers(0, 3)) for each in list(fleet.slots.values())[:2]})
        case "come":
            fleet.add_runner(replace(runner, runner_id=f"runner {len(fleet.runners)} of {fleet.runner_changes}"))
        case "expect":
            fleet.expect([replace(runner, runner_id="expected")], {})
