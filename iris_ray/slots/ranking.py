"""A priority queue whose keys are lower bounds: exact keys are computed from the front, and no more than needed."""

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=str | tuple[str, int])
Key = tuple[int, int, float]
"""Smaller comes first. Of an eviction: its price, the bytes of what it evicts, and when one of them was last used."""

LONG_AGO = float("-inf")
NOTHING: Key = (0, 0, LONG_AGO)
"""The key of evicting nothing."""


class Ranking(Generic[Item]):
    """Items by bound. Changing a bound costs a push; entries that are out of date are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._bounds: dict[Item, Key] = {}

    def put(self, item: Item, bound: Key | None) -> None:
        """Set what an item's exact key is not below; None removes the item."""
        if bound is None:
            self._bounds.pop(item, None)
        elif self._bounds.get(item) != bound:
            self._bounds[item] = bound
            heappush(self._heap, (bound, item))
            if len(self._heap) > 4 * len(self._bounds) + 64:
                self._heap = [(bound, item) for item, bound in self._bounds.items()]
                heapify(self._heap)

    def clear(self) -> None:
        """Remove all items."""
        self._heap.clear()
        self._bounds.clear()

    def best(self, exact: Callable[[Item, Key], Key | None], most: float = math.inf) -> tuple[Key, Item] | None:
        """Return the item with the smallest exact key, or None.

        Args:
            exact: of an item and its bound: returns its key, or None if it is no candidate.
            most: after so many items the best of them is returned, though bounds of others are lower.
        """
        aside: list[tuple[Key, Item]] = []
        found: tuple[Key, Item] | None = None
        while (entry := self.first()) is not None and (found is None or entry[0] < found[0]):
            bound, item = entry
            key = exact(item, bound)
            if key is not None and (found is None or key < found[0]):
                found = key, item
            if key == bound:
                break
            aside.append(heappop(self._heap))
            if found is not None and len(aside) >= most:
                break
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def first(self) -> tuple[Key, Item] | None:
        """Return the item with the lowest bound, which comes first; None: there are no items."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if self._bounds.get(entry[1]) == entry[0]:
                return entry
            heappop(heap)
        return None
