"""Sets of devices in the order of what room on them costs at least."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from iris_ray.slots.devices import DeviceSet, Runner
from iris_ray.slots.ranking import LONG_AGO, Key


def sum_of(keys: Iterable[Key]) -> Key:
    """Return a key that no plan for several devices is below, if none for one of them is below its key."""
    price, size, used = 0, 0, LONG_AGO
    for key in keys:
        price, size, used = price + key[0], size + key[1], max(used, key[2])
    return price, size, used


def cheapest_bound(keys: Iterable[Key | None], degree: int) -> Key | None:
    """Return a key that no plan for any ``degree`` devices is below; None: so many have no room.

    Args:
        keys: the bound of each device; None: it has no room.
    """
    best = sorted([key for key in keys if key is not None])[:degree]
    return sum_of(best) if len(best) == degree else None


def cheapest_sets(runner: Runner, keys: Sequence[Key | None], degree: int) -> Iterable[tuple[Key, DeviceSet]]:
    """Return the sets of devices that a slot can use together, each with its bound, the lowest bound first."""
    if runner.legal_sets is None:
        return _any_sets(keys, degree)
    bounds = ((devices, [keys[device] for device in devices]) for devices in runner.sets(degree))
    return sorted((sum_of(filter(None, found)), devices) for devices, found in bounds if None not in found)


def _any_sets(keys: Sequence[Key | None], degree: int) -> Iterator[tuple[Key, DeviceSet]]:
    """There may be too many sets to look at all: each follows from one that is not dearer."""
    order = sorted([(key, device) for device, key in enumerate(keys) if key is not None])
    if len(order) < degree:
        return
    first = tuple(range(degree))
    heap, seen = [(sum_of([order[place][0] for place in first]), first)], {first}
    while heap:
        bound, places = heappop(heap)
        yield bound, tuple(sorted([order[place][1] for place in places]))
        for more in _next(places, len(order)):
            if more not in seen:
                seen.add(more)
                heappush(heap, (sum_of([order[place][0] for place in more]), more))


def _next(places: DeviceSet, end: int) -> Iterator[DeviceSet]:
    """Yield the sets in which one place is the next one instead."""
    for number, (place, after) in enumerate(zip(places, (*places[1:], end), strict=True)):
        if place + 1 < after:
            yield (*places[:number], place + 1, *places[number + 1 :])
