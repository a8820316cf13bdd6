"""A priority queue whose keys may be estimates: what comes first is computed exactly, and no more than that."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=str | tuple[str, int])
Key = tuple[int, int, float]
"""Smaller comes first. Of an eviction: its price, the bytes of what it evicts, and when one of them was last used."""

LONG_AGO = float("-inf")
NOTHING: Key = (0, 0, LONG_AGO)
"""The key of evicting nothing."""

Refine = Callable[[Item], Key | None]
"""Returns an item's exact key, which is at least its estimate, or None if it is no candidate after all."""


class Ranking(Generic[Item]):
    """Items by key. Changing a key costs a push; entries that are out of date are dropped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Item]] = []
        self._keys: dict[Item, Key] = {}
        self._exact: set[Item] = set()

    def put(self, item: Item, key: Key, exact: bool = False) -> None:
        """Set an item's key, or an estimate that its exact key is not below."""
        (self._exact.add if exact else self._exact.discard)(item)
        if self._keys.get(item) != key:
            self._keys[item] = key
            heappush(self._heap, (key, item))
            if len(self._heap) > 4 * len(self._keys) + 64:
                self._heap = [(key, item) for item, key in self._keys.items()]
                heapify(self._heap)

    def drop(self, item: Item) -> None:
        """Remove an item, if it is there."""
        self._keys.pop(item, None)
        self._exact.discard(item)

    def clear(self) -> None:
        """Remove all items."""
        self._heap.clear()
        self._keys.clear()
        self._exact.clear()

    def best(self, refine: Refine[Item], skip: Callable[[Item], bool]) -> tuple[Key, Item] | None:
        """Return the item with the smallest exact key among those that are not to be skipped, or None."""
        aside: list[tuple[Key, Item]] = []
        found = None
        while self._heap and found is None:
            key, item = entry = self._heap[0]
            if self._keys.get(item) != key:
                heappop(self._heap)
            elif skip(item):
                aside.append(heappop(self._heap))
            elif item in self._exact:
                found = entry
            else:
                self._settle(item, refine(item))
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def _settle(self, item: Item, exact: Key | None) -> None:
        if exact is None:
            self.drop(item)
        else:
            self.put(item, exact, exact=True)
