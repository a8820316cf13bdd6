"""Boxes: the ranges of indices that a shard has of an array, and how shards make up another box.

A box of a global array depends on no mesh, process or host. So a state that one mesh has saved can be put together for
another.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Box: TypeAlias = tuple[tuple[int, int], ...]
"""For each dimension the first index and the one after the last. ``()`` is the only box of a scalar."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole array."""
    return tuple((0, length) for length in shape)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box that an index of slices without steps selects, as JAX's shardings give it."""
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def volume(box: Box) -> int:
    """Return how many elements a box has."""
    return math.prod(shape_of(box))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the box of the elements that two boxes share; None if there are none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < end for start, end in shared) else None


def without(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes with the elements of a box outside ``hole``, which is a box within it."""
    left, core = [], list(box)
    for axis, ((start, end), (first, last)) in enumerate(zip(box, hole, strict=True)):
        sides = [(a, b) for a, b in ((start, first), (last, end)) if a < b]
        left += [(*core[:axis], side, *core[axis + 1 :]) for side in sides]
        core[axis] = (first, last)
    return left


def pieces(wanted: Box, sources: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Cut a box into disjoint boxes, each with the number of the first source that has it, and boxes without one."""
    found, missing = [], [wanted] if volume(wanted) else []
    for number, source in enumerate(sources):
        if not missing:
            break
        still = []
        for box in missing:
            if (shared := overlap(box, source)) is None:
                still.append(box)
            else:
                found.append((number, shared))
                still += without(box, shared)
        missing = still
    return found, missing


def covers(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Return whether boxes have every element of an array of that shape."""
    return not pieces(whole(shape), sorted(set(boxes)))[1]


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of a box in the array of a box around it."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def span(inner: Box, outer: Box) -> tuple[int, int]:
    """Return the range from the first element of ``inner`` to its last, in the C order of ``outer``."""
    first = last = 0
    for (start, end), (origin, limit) in zip(inner, outer, strict=True):
        length = limit - origin
        first, last = first * length + start - origin, last * length + end - 1 - origin
    return first, last + 1
