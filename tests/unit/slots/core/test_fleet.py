"""Runners, slots and the ledger: what is booked, and when it is free."""

import pytest

from iris_ray.errors import IllegalTransitionError, InvalidSlotError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.slots.core.devices import Device, DeviceKind, Runner, tpu_sets
from iris_ray.slots.core.fleet import FleetChanges, SlotFleet
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.slot import SLOT_TRANSITIONS, Allocation, Slot, SlotState
from tests.support.slots import GB, chips, gpus, model


def fleet_of(*runners: Runner) -> SlotFleet:
    fleet = SlotFleet()
    for runner in runners:
        fleet.add_runner(runner)
    return fleet


def ready(fleet: SlotFleet, name: str, spec: ModelSpec, *devices: int) -> Slot:
    """A slot that serves, on runner a."""
    slot = fleet.plan(name, spec, Allocation("a", devices, (spec.memory[len(devices)],) * len(devices)), now=0.0)
    assert fleet.start(name, now=0.0)
    fleet.set_ready(name, now=1.0)
    return slot


# -- what runs where -----------------------------------------------------------------------------------------------


def test_process_uses_one_two_or_four_neighbouring_chips() -> None:
    assert list(chips(count=4).sets(1)) == [(0,), (1,), (2,), (3,)]
    assert list(chips(count=4).sets(2)) == [(0, 1), (2, 3)]
    assert list(chips(count=4).sets(3)) == []
    assert list(chips(count=4).sets(4)) == [(0, 1, 2, 3)]
    assert tpu_sets(1) == ((0,),)


def test_gpus_combine_freely() -> None:
    assert list(gpus(count=3).sets(2)) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("runtime", "concurrency", "seats"), [("vllm", None, 256), ("ollama", None, 2), ("actor", None, 1), ("vllm", 8, 8)]
)
def test_concurrency_comes_from_runtime_by_default(runtime: str, concurrency: int | None, seats: int) -> None:
    assert model(runtime=runtime, concurrency=concurrency).requests_at_a_time == seats


def test_mixed_runner_and_missing_devices_are_refused() -> None:
    with pytest.raises(InvalidSlotError, match="all of one kind"):
        Runner("a", (Device(DeviceKind.GPU, 1), Device(DeviceKind.CPU, 1)))
    with pytest.raises(InvalidSlotError, match="are not devices"):
        Runner("a", (Device(DeviceKind.TPU, 1),), legal_sets=((0, 1),))
    with pytest.raises(InvalidSlotError, match="only TPU chips have sets"):
        Runner("a", (Device(DeviceKind.GPU, 1),), legal_sets=((0,),))


def test_unevaluable_constraint_is_not_satisfied() -> None:
    runner = Runner("a", (Device(DeviceKind.CPU, 1),), {"zone": AttributeValue("us-a")})
    assert runner.satisfies([Constraint("zone", ConstraintOp.EQ, "us-a")])
    assert not runner.satisfies([Constraint("zone", ConstraintOp.GT, 4)])


# -- the life of a slot ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", SlotState)
def test_slot_changes_only_as_table_allows(state: SlotState) -> None:
    for to in SlotState:
        slot = Slot("s", model(), Allocation("a", (0,), (1,)), 0.0, state)
        if to in SLOT_TRANSITIONS[state]:
            slot.move_to(to)
            assert slot.state is to
        else:
            with pytest.raises(IllegalTransitionError, match=f"is {state.value}"):
                slot.move_to(to)


def test_memory_is_promised_early_and_freed_at_confirmed_end() -> None:
    fleet = fleet_of(gpus(count=1))
    ready(fleet, "s", model(gigabytes=50), 0)
    assert fleet.books["a"].free_now() == [30 * GB]
    fleet.retire("s", SlotState.DRAINING)
    assert fleet.books["a"].unpromised() == [80 * GB]
    assert fleet.books["a"].free_now() == [30 * GB]
    fleet.end("s")
    assert fleet.books["a"].free_now() == [80 * GB]
    fleet.check()


def test_request_needs_a_seat() -> None:
    fleet = fleet_of(gpus())
    ready(fleet, "s", model(concurrency=1), 0)
    fleet.begin_request("s", "r", now=2.0)
    with pytest.raises(IllegalTransitionError, match="no seat"):
        fleet.begin_request("s", "q", now=2.0)
    fleet.end_request("s", "r", now=3.0)
    fleet.begin_request("s", "q", now=4.0)


def test_watchers_hear_of_every_changed_runner() -> None:
    fleet = fleet_of(gpus("a"), gpus("b"))
    heard = FleetChanges()
    fleet.watchers.append(heard)
    ready(fleet, "s", model(), 1)
    assert list(heard.runners) == ["a"]
    fleet.begin_request("s", "r", now=2.0)
    assert list(heard.used) == ["s"]
    heard.idle.clear()
    fleet.end_request("s", "r", now=3.0)
    assert list(heard.idle) == ["s"]
    for change in (
        lambda: fleet.claim("s", True),
        lambda: fleet.set_prices({model().name: 7}),
        lambda: fleet.retire("s", SlotState.DRAINING),
        lambda: fleet.end("s"),
        lambda: fleet.remove_runner("a"),
    ):
        heard.runners.clear()
        change()
        assert list(heard.runners) == ["a"]


def test_slot_that_was_to_leave_or_end_stays() -> None:
    fleet = fleet_of(gpus(count=1))
    ready(fleet, "s", model(gigabytes=50), 0)
    fleet.leave("s", now=2.0)
    assert fleet.books["a"].unpromised() == [80 * GB]
    fleet.stay("s")
    fleet.retire("s", SlotState.DRAINING)
    fleet.stay("s")
    assert fleet.slots["s"].state is SlotState.READY
    assert fleet.books["a"].unpromised() == [30 * GB]
    fleet.check()
    fleet.leave("s", now=2.0)
    fleet.plan("t", model("n", 60), Allocation("a", (0,), (60 * GB,)), now=2.0)
    with pytest.raises(IllegalTransitionError, match="can't be booked"):
        fleet.stay("s")


def test_observed_memory_raises_alarms_and_frees_nothing() -> None:
    fleet = fleet_of(gpus())
    ready(fleet, "s", model(gigabytes=50), 0)
    assert list(fleet.books["a"].alarms({0: 53 * GB, 1: 0})) == []
    assert list(fleet.books["a"].alarms({0: 60 * GB, 1: 9 * GB})) == [
        "runner a: device 0 uses 60,000,000,000 bytes, but slots have only 50,000,000,000 booked",
        "runner a: device 1 uses 9,000,000,000 bytes, but slots have only 0 booked",
    ]
    assert fleet.books["a"].free_now() == [30 * GB, 80 * GB]
