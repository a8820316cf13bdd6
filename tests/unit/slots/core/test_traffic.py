"""Popular models stay loaded: how many loads a stream of requests takes, beside the fewest that were possible."""

import importlib
from itertools import product
from typing import Any

import pytest

from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from tests.support.slots import gpus, model

traffic: Any = importlib.import_module("benchmarks.slot_traffic")
EAGER, USUAL = traffic.POLICIES["eager"], traffic.POLICIES["usual"]


def models(number: int) -> list[ModelSpec]:
    """Two of them fit on a device."""
    return [model(f"m{place}", 40, concurrency=4) for place in range(number)]


@pytest.mark.parametrize("policy", [EAGER, USUAL], ids=["eager", "usual"])
@pytest.mark.parametrize("per_second", [0.2, 1.0, 5.0])
@pytest.mark.parametrize(("room", "number"), [(8, 16), (8, 40), (2, 3)])
def test_zipf_traffic_needs_at_most_twice_the_optimal_loads(
    room: int, number: int, per_second: float, policy: ServingPolicy
) -> None:
    specs = models(number)
    arrivals = traffic.zipf_arrivals([spec.name for spec in specs], 1_000, per_second)
    played = traffic.play(arrivals, specs, [gpus(f"r{place}", 1) for place in range(room // 2)], policy)
    assert (len(played.waits), played.refused) == (1_000, [])
    assert played.loads <= 2 * traffic.least_loads([name for _, name in arrivals], room)


@pytest.mark.parametrize(("number", "most"), [(3, 60), (16, 450)])
def test_alternating_models_are_kept_instead_of_thrashing(number: int, most: int) -> None:
    """One more than fits, or twice as many: the one that was used last is needed last. Who evicts that loads always."""
    specs = models(number)
    turns: list[tuple[float, str]] = [(float(second), specs[second % number].name) for second in range(1_000)]
    played = traffic.play(turns, specs, [gpus(f"r{place}", 1) for place in range(number // 4 or 1)], USUAL)
    assert len(played.waits) == 1_000
    assert played.loads <= most
    assert max(played.waits) < 60


def test_offline_optimum_equals_exhaustive_search() -> None:
    for asked in product("abcd", repeat=6):
        assert traffic.least_loads(asked, 2) == fewest(asked, frozenset(), 2)


def fewest(asked: tuple[str, ...], loaded: frozenset[str], room: int) -> int:
    """The same, slow and obvious: whichever model gives way."""
    if not asked:
        return 0
    first, rest = asked[0], asked[1:]
    if first in loaded:
        return fewest(rest, loaded, room)
    if len(loaded) < room:
        return 1 + fewest(rest, loaded | {first}, room)
    return 1 + min(fewest(rest, loaded - {out} | {first}, room) for out in loaded)
