"""Which runners can be given to others: those whose slots nobody needs."""

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.core.reconciler import idle_runners, needs_room
from tests.support.slot_world import SlotWorld
from tests.support.slots import gpus, model

A = model("a", 50)
STALE_S = 10.0


@pytest.fixture
def world() -> SlotWorld:
    """Two runners, each with room for one slot of the model."""
    world = SlotWorld(ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(STALE_S), min_residency_s=0.0)))
    for name in ("one", "two"):
        world.join(gpus(name, 1))
    world.hear(ev.ModelRegistered(A))
    world.settle()
    return world


def idle(world: SlotWorld) -> set[str]:
    return idle_runners(world.reconciler, world.now)


def runner_of(world: SlotWorld, slot_id: str) -> str:
    return world.reconciler.fleet.slots[slot_id].allocation.runner_id


def test_runners_without_slots_are_idle(world: SlotWorld) -> None:
    assert idle(world) == {"one", "two"}
    assert not needs_room(world.reconciler)


def test_a_runner_is_idle_once_its_slots_are_stale(world: SlotWorld) -> None:
    world.ask("r", A.identity)
    busy = runner_of(world, "slot-1")
    assert idle(world) == {"one", "two"} - {busy}, "it loads"
    world.settle()
    assert idle(world) == {"one", "two"} - {busy}, "it has just answered"
    world.tick(STALE_S)
    assert idle(world) == {"one", "two"}


def test_a_slot_that_serves_keeps_its_runner_however_long_it_takes(world: SlotWorld) -> None:
    world.ask("r", A.identity)
    world.settle(serve=False)
    world.tick(10 * STALE_S)
    assert idle(world) == {"one", "two"} - {runner_of(world, "slot-1")}


def test_slots_that_are_to_be_kept_keep_their_runner_and_missing_ones_need_room(world: SlotWorld) -> None:
    world.hear(ev.ModelRegistered(A, replicas=1))
    world.settle()
    world.tick(10 * STALE_S)
    assert len(idle(world)) == 1
    world.hear(ev.ModelRegistered(A, replicas=3))
    assert needs_room(world.reconciler)


def test_requests_that_wait_need_room(world: SlotWorld) -> None:
    for name in ("one", "two"):
        world.lose(name)
    world.ask("r", A.identity)
    assert needs_room(world.reconciler)


def test_a_closed_runner_is_idle_when_its_requests_have_ended(world: SlotWorld) -> None:
    world.ask("r", A.identity)
    world.settle(serve=False)
    runner = runner_of(world, "slot-1")
    world.hear(ev.RunnerClosed(runner))
    assert runner not in idle(world)
    world.end_request("r", "slot-1")
    assert runner in idle(world)


def test_a_rule_that_fails_keeps_the_runners_with_slots(world: SlotWorld) -> None:
    world.ask("r", A.identity)
    world.settle()
    busy = runner_of(world, "slot-1")

    def fails(runner_id: str, last_activity: float) -> float:
        raise KeyError(runner_id)

    world.reconciler.allocator.staleness.policy = PlacementPolicy(stale_at=fails)
    world.tick(10 * STALE_S)
    assert idle(world) == {"one", "two"} - {busy}
