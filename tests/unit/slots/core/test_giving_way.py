"""Slots and runners that give way to others, and what is not cut off for it."""

import pytest

from iris_ray.slots.core import events as ev
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.core.reconciler import idle_runners, needs_room
from iris_ray.slots.core.slot import SlotState
from tests.support.slot_world import A, B, SlotWorld, serving_world
from tests.support.slots import gpus, model

# -- slots ------------------------------------------------------------------------------------------------------------


def in_contention() -> SlotWorld:
    """A request of one model runs, and another model has waited for so long that the slot is to give way."""
    w = serving_world(A, B, policy=ServingPolicy())
    w.ask("long", A.name)
    w.settle(serve=False)
    w.ask("b0", B.name)
    w.run(40, serve=False)
    assert w.reconciler.fleet.slots["slot-1"].state is SlotState.DRAINING
    return w


def test_long_request_completes_beside_busy_model() -> None:
    w = in_contention()
    for second in range(600):
        w.ask(f"b{second + 1}", B.name)
        w.run(1, serve=False)
        for process in list(w.processes.values()):
            for request_id in sorted(process.requests):
                if request_id != "long" or second >= 500:
                    w.end_request(request_id, process.slot_id)
    assert w.answered["long"] == 1
    assert w.answered["b0"] == 1
    assert not w.requeued
    assert not w.refused


def test_slots_that_need_not_stay_serve_before_they_give_way() -> None:
    w = serving_world(A, B)
    w.ask("a", A.name)
    w.settle(serve=False)
    w.ask("b", B.name)
    w.run(40, serve=False)
    w.hear(ev.SlotEviction("slot-1"))  # cuts off its request, so that both wait for too long
    w.run(70, serve=False)
    assert w.processes["slot-2"].requests == {"b"}
    w.run(10)
    assert w.answered == {"a": 1, "b": 1}
    assert len(w.created) == 3


def test_cancelled_running_request_does_not_protect_yielding_slot() -> None:
    w = in_contention()
    for request_id in w.processes["slot-1"].requests:
        w.reconciler.handle(ev.RequestCancelled(request_id), w.now)  # a thread that nobody can stop
    w.run(70, serve=False)
    assert (w.ready("a"), w.ready("b")) == ([], ["slot-2"])


def test_leaving_runner_cuts_off_what_eviction_would_await() -> None:
    w = in_contention()
    w.hear(ev.RunnerClosed("a", reason="its host has to go"))
    w.run(50, serve=False)
    assert not w.requeued
    w.run(20, serve=False)
    assert [each.request_id for each in w.requeued] == ["long"]
    assert w.deleted == [("slot-1", "its host has to go")]


# -- runners ----------------------------------------------------------------------------------------------------------


M = model("a", 50)
STALE_S = 10.0


@pytest.fixture
def world() -> SlotWorld:
    """Two runners, each with room for one slot of the model."""
    world = SlotWorld(ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(STALE_S), min_residency_s=0.0)))
    for name in ("one", "two"):
        world.join(gpus(name, 1))
    world.hear(ev.ModelRegistered(M))
    world.settle()
    return world


def idle(world: SlotWorld) -> set[str]:
    return idle_runners(world.reconciler, world.now)


def runner_of(world: SlotWorld, slot_id: str) -> str:
    return world.reconciler.fleet.slots[slot_id].allocation.runner_id


def test_runners_without_slots_are_idle(world: SlotWorld) -> None:
    assert idle(world) == {"one", "two"}
    assert not needs_room(world.reconciler)


def test_runner_is_idle_once_its_slots_are_stale(world: SlotWorld) -> None:
    world.ask("r", M.name)
    busy = runner_of(world, "slot-1")
    assert idle(world) == {"one", "two"} - {busy}, "it loads"
    world.settle()
    assert idle(world) == {"one", "two"} - {busy}, "it has just answered"
    world.tick(STALE_S)
    assert idle(world) == {"one", "two"}


def test_kept_slots_keep_runners_and_missing_ones_need_room(world: SlotWorld) -> None:
    world.hear(ev.ModelRegistered(M, replicas=1))
    world.settle()
    world.tick(10 * STALE_S)
    assert len(idle(world)) == 1
    world.hear(ev.ModelRegistered(M, replicas=3))
    assert needs_room(world.reconciler)


def test_waiting_requests_need_room(world: SlotWorld) -> None:
    for name in ("one", "two"):
        world.lose(name)
    world.ask("r", M.name)
    assert needs_room(world.reconciler)
