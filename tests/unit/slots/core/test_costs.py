"""What an event costs, counted in calls: nothing grows with the slots of a model, or with models that wait."""

from functools import partial

import pytest

from iris_ray.slots.core import allocator
from iris_ray.slots.core import events as ev
from iris_ray.slots.core.allocator import Allocator, Place, SlotRequirement, fits_when_empty
from iris_ray.slots.core.devices import Runner
from iris_ray.slots.core.models import ModelSpec, Request
from iris_ray.slots.core.policy import PlacementPolicy, ServingPolicy
from iris_ray.slots.core.reconciler import Reconciler
from iris_ray.slots.core.slot import Allocation, Slot, SlotState
from tests.support.costs import calls
from tests.support.slot_reference import Snapshot, fleet_of
from tests.support.slots import GB, gpus, in_state, model

M = model("m", 80)


def warm(slots: int, running: int = 0, waiting: int = 0) -> Reconciler:
    """A reconciler of GPUs that have a slot of the same model each, and requests that run or have waited long."""
    core = Reconciler(ServingPolicy(), iter(map(str, range(10**6))).__next__)
    for number in range(-(-slots // 4)):
        core.handle(ev.RunnerJoined(gpus(f"r{number}", 4)), 0.0)
        core.handle(ev.RunnerReported(f"r{number}", 0.0, {}), 0.0)
    core.handle(ev.ModelRegistered(M), 0.0)
    for number in range(slots):
        place = Allocation(f"r{number // 4}", (number % 4,), (80 * GB,))
        core.fleet.adopt(Slot(f"warm {number}", M, place, 0.0, SlotState.READY, 0.0, 0.0))
    for number in range(running + waiting):
        core.handle(ev.RequestArrived(Request(f"before {number}", M.name, 0.0)), 0.0)
    core.handle(ev.Tick(), 60.0)
    request_calls(core, "first", "before 0" if running else "first")
    return core


def request_calls(core: Reconciler, new: str, ended: str) -> int:
    """The calls of a request's arrival, and of the end of one."""

    def come_and_end() -> None:
        core.handle(ev.RequestArrived(Request(new, M.name, 60.0)), 60.0)
        core.handle(ev.RequestEnded(ended, core.active.by_id[ended].slot_id), 60.0)

    return calls(come_and_end)


def test_request_costs_the_same_with_more_slots() -> None:
    few, many = (request_calls(warm(slots), "new", "new") for slots in (20, 400))
    assert many <= 1.05 * few


def test_request_beside_waiting_ones_costs_the_same() -> None:
    few, many = (request_calls(warm(slots, slots, waiting=9), "new", "before 1") for slots in (20, 400))
    assert many <= 1.05 * few


def waiting_core(models: int) -> Reconciler:
    """Many models wait for room, and there is none: of few different sizes."""
    core = warm(40, running=40)
    core.handle(ev.RequestCancelled("first"), 60.0)
    for number in range(models):
        spec = model(f"w{number}", 50 + number % 5)
        core.handle(ev.ModelRegistered(spec), 60.0)
        core.handle(ev.RequestArrived(Request(f"w{number}", spec.name, 60.0)), 60.0)
    return core


def test_lost_runner_costs_the_same_however_many_models_wait() -> None:
    few, many = (calls(partial(waiting_core(models).handle, ev.RunnerLost("r0"), 60.0)) for models in (1, 200))
    assert many <= 1.2 * few


@pytest.mark.parametrize("models", [200])
def test_joining_runner_costs_few_calls_per_waiting_model(models: int) -> None:
    core = waiting_core(models)
    core.handle(ev.RunnerJoined(gpus("new", 4)), 60.0)
    assert calls(lambda: core.handle(ev.RunnerReported("new", 60.0, {}), 60.0)) <= 100 * models
    assert len(in_state(core.fleet, SlotState.STARTING)) == 4


def test_models_of_one_shape_share_reason_for_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    core, looks = waiting_core(50), list[str]()

    def counted(runner: Runner, spec: ModelSpec) -> bool:
        looks.append(spec.name)
        return fits_when_empty(runner, spec)

    monkeypatch.setattr(allocator, "fits_when_empty", counted)
    core.handle(ev.RunnerLost("r0"), 60.0)
    for number, name in enumerate(list(core.models)):
        core.handle(ev.RequestArrived(Request(f"more {number}", name, 60.0)), 60.0)
    assert 1 <= len(looks) <= 6, "51 models have six shapes, and all runners are alike"


def test_list_of_what_has_gained_room_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "MOST_GAINS", 20)
    core = waiting_core(5)
    for number in range(100):  # the last runner comes and goes
        core.handle(ev.RunnerJoined(gpus("last", 1)), 61.0 + number)
        core.handle(ev.RunnerReported("last", 61.2 + number, {}), 61.2 + number)
        core.handle(ev.RunnerLost("last"), 61.5 + number)
        assert all(len(views.gains) <= 20 + 11 for views in core.allocator._views.values())
    core.handle(ev.RunnerJoined(gpus("last", 4)), 200.0)
    core.handle(ev.RunnerReported("last", 200.0, {}), 200.0)
    assert len(in_state(core.fleet, SlotState.STARTING)) == 4, "and what waits gets what it has gained"


def eviction_calls(pairs: int) -> int:
    """The calls of a decision on eight GPUs full of slots with two GPUs each: models of uneven parts, too."""
    slots = list[Slot]()
    for number in range(pairs):
        place = Allocation("a", (number % 8, (number + 1 + number // 8 % 7) % 8), (320 * GB // pairs,) * 2)
        spec = model(f"m{number}", memory={2: 320 * GB // pairs})
        slots.append(Slot(f"s{number}", spec, place, 0.0, SlotState.READY, 0.0, 0.0))
    prices = {slot.model: number * 37 % 101 for number, slot in enumerate(slots)}
    allocator = Allocator(fleet_of(Snapshot((gpus(count=8),), tuple(slots), prices=prices)), PlacementPolicy())
    needed = SlotRequirement(model("new", memory={4: [70 * GB, 60 * GB, 50 * GB, 40 * GB]}))
    found = list[object]()
    cost = calls(lambda: found.append(allocator.decide(needed, 100.0)))
    assert isinstance(found[0], Place)
    return cost


def test_eviction_of_slots_with_several_devices_does_not_cost_their_square() -> None:
    few, many = eviction_calls(56), eviction_calls(224)
    assert many <= 8 * few
