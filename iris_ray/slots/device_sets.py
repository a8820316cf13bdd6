"""Sets of devices in the order of what room on them costs at least."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from iris_ray.slots.devices import DeviceSet, Runner
from iris_ray.slots.ranking import NOTHING, Key

Bound = tuple[Key, int]
"""A key that no plan for a device is below, and the device's number."""


def sum_of(keys: Iterable[Key]) -> Key:
    """Return a key that no plan for several devices is below, if none for one of them is below its key."""
    price, size, used = NOTHING
    for more, bytes_more, when in keys:
        price, size = price + more, size + bytes_more
        if when > used:
            used = when
    return price, size, used


def cheapest_bound(order: Sequence[Bound], degree: int) -> Key | None:
    """Return a key that no plan for any ``degree`` of these devices is below; None: there are not so many."""
    return sum_of([key for key, _ in order[:degree]]) if len(order) >= degree else None


def cheapest_sets(runner: Runner, order: Sequence[Bound], degree: int) -> Iterable[tuple[Key, DeviceSet]]:
    """Return the sets of devices that a slot can use together, each with its bound, the lowest bound first.

    Args:
        runner: whose devices they are.
        order: its devices that have room, the lowest bound first.
        degree: how many devices a slot has.
    """
    if runner.legal_sets is None:
        return _any_sets(order, degree)
    keys = {device: key for key, device in order}
    sets = [devices for devices in runner.sets(degree) if keys.keys() >= set(devices)]
    return sorted((sum_of([keys[device] for device in devices]), devices) for devices in sets)


def _any_sets(order: Sequence[Bound], degree: int) -> Iterator[tuple[Key, DeviceSet]]:
    """There may be too many sets to look at all: each follows from one that is not dearer."""
    first = cheapest_bound(order, degree)
    if first is None:
        return
    yield first, tuple(sorted([device for _, device in order[:degree]]))  # nearly always nothing more is asked for
    places = tuple(range(degree))
    heap: list[tuple[Key, DeviceSet]] = []
    seen = {places}
    while True:
        for more in _next(places, len(order)):
            if more not in seen:
                seen.add(more)
                heappush(heap, (sum_of([order[place][0] for place in more]), more))
        if not heap:
            return
        bound, places = heappop(heap)
        yield bound, tuple(sorted([order[place][1] for place in places]))


def _next(places: DeviceSet, end: int) -> Iterator[DeviceSet]:
    """Yield the sets in which one place is the next one instead."""
    for number, (place, after) in enumerate(zip(places, (*places[1:], end), strict=True)):
        if place + 1 < after:
            yield (*places[:number], place + 1, *places[number + 1 :])
