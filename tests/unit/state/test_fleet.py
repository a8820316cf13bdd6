"""Taints that end by themselves."""

from typing import Any, NoReturn

import pytest

from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.state.events import TaintedEvent, TaintLiftedEvent, TimePassedEvent
from tests.support.worlds import World


@pytest.fixture
def slices() -> str:
    return "a"


def taint(world: World, until: float | None, target: str = "a-0", name: str = "bad") -> None:
    world.do(TaintedEvent(target, name, "an operator says so", until))


def tainted_at(world: World, now: float) -> set[str]:
    """Hosts that have the taint once it is so late."""
    world.state.handle_event(TimePassedEvent(now))
    world.state.check()
    found = {w.node_id for w in world.state.workers.values() if TAINT_PREFIX + "bad" in w.attributes}
    assert bool(found) == bool(world.state.fleet.taints)
    return found


@pytest.mark.parametrize(("target", "hosts"), [("a-0", {"a-0"}), ("a", {"a-0", "a-1"})])
def test_taint_ends_exactly_at_its_time(world: World, target: str, hosts: set[str]) -> None:
    taint(world, 200.0, target)
    assert tainted_at(world, 199.9) == hosts
    assert tainted_at(world, 200.0) == set()


@pytest.mark.parametrize(("second", "ends"), [(300.0, 300.0), (150.0, 150.0), (200.0, 200.0), (None, 1e9)])
def test_renewed_taint_ends_at_new_time(world: World, second: float | None, ends: float) -> None:
    taint(world, 200.0)
    taint(world, second)
    assert tainted_at(world, ends - 0.1) == {"a-0"}
    assert tainted_at(world, ends) == ({"a-0"} if second is None else set())


def test_taint_lifted_and_renewed_ends_at_new_time(world: World) -> None:
    taint(world, 200.0)
    world.do(TaintLiftedEvent("a-0", "bad"))
    assert tainted_at(world, 150.0) == set()
    taint(world, 300.0)
    assert tainted_at(world, 250.0) == {"a-0"}
    assert tainted_at(world, 300.0) == set()


def test_taint_of_gone_host_ends_too(world: World) -> None:
    taint(world, 200.0)
    world.lose("a-0")
    world.state.handle_event(TimePassedEvent(200.0))
    assert world.state.fleet.taints == {}


class NotToBeLookedThrough(dict[str, Any]):
    """Hundreds of thousands of taints may be in it."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("somebody looks at all taints")

    items = keys = values = __iter__


def test_expired_taints_are_found_without_full_scan(world: World) -> None:
    taint(world, None, "a-0")
    taint(world, 200.0, "a-1")
    world.state.fleet.taints = NotToBeLookedThrough(world.state.fleet.taints)
    world.state.handle_event(TimePassedEvent(150.0))
    world.state.handle_event(TimePassedEvent(250.0))
    assert len(world.state.fleet.taints) == 1
