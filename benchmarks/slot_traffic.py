"""How often models are loaded for a stream of requests, beside the fewest loads that were possible. Needs no Ray.

    python benchmarks/slot_traffic.py          # virtual time; about a minute

1,000 requests come at random times. *zipf*: the n-th model gets a share in proportion to 1 / n. *turns*: the models
take turns, which is the worst case for evicting the least recently used slot (*LRU*). Models load in 5 s and answer in
0.2 s, four requests at a time. The *optimum* knows all requests beforehand, and serves each one before the next. Slots
may need fewer loads: a request may wait until its model's turn comes.
"""

import statistics
from collections import OrderedDict
from collections.abc import Sequence

from iris_ray.slots.core.devices import Device, DeviceKind, Runner
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.slots.traffic import Arrival, least_loads, play, zipf_arrivals

GB = 10**9
REQUESTS = 1_000
POLICIES = {
    "usual": ServingPolicy(),
    "eager": ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0)),
}


def lru_loads(models: Sequence[str], room: int) -> int:
    """Loads if what was used longest ago gives way."""
    loaded: OrderedDict[str, None] = OrderedDict()
    loads = 0
    for model in models:
        loads += model not in loaded
        loaded[model] = None
        loaded.move_to_end(model)
        if len(loaded) > room:
            loaded.popitem(last=False)
    return loads


def row(pattern: str, room: int, number: int, per_second: float, policy: str) -> None:
    """Print one line of the table."""
    specs = [ModelSpec(f"model-{place}", {1: 40 * GB}, concurrency=4) for place in range(number)]
    arrivals: list[Arrival] = zipf_arrivals([spec.name for spec in specs], REQUESTS, per_second)
    if pattern == "turns":
        arrivals = [(when, specs[place % number].name) for place, (when, _) in enumerate(arrivals)]
    runners = [Runner(f"runner-{place}", (Device(DeviceKind.GPU, 80 * GB),)) for place in range(room // 2)]
    played = play(arrivals, specs, runners, POLICIES[policy])
    models = [model for _, model in arrivals]
    optimum, waits = least_loads(models, room), sorted(played.waits)
    p50, p99 = statistics.median(waits), waits[len(waits) * 99 // 100]
    print(
        f"{pattern:>8} {room:>5} {number:>7} {per_second:>11} {policy:>7} {played.loads:>6} {played.evictions:>10} "
        f"{optimum:>8} {lru_loads(models, room):>5} {played.loads / optimum:>6.2f} × {p50:>7.1f} s "
        f"{p99:>7.1f} s",
        flush=True,
    )


def main() -> None:
    print(" pattern  room  models  per second  policy  loads  evictions  optimum   LRU    ratio  wait p50  wait p99")
    for pattern in ("zipf", "turns"):
        for policy in POLICIES:
            for room, number in ((8, 16), (8, 40), (2, 3)):
                for per_second in (0.2, 1.0, 5.0):
                    row(pattern, room, number, per_second, policy)


if __name__ == "__main__":
    main()
