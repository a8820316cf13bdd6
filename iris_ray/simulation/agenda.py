"""What is going to happen, in the order of time."""

import heapq
import math
from collections.abc import Callable
from typing import Any


class Agenda:
    """A virtual clock, and the actions that wait for their time. At the same time, what was planned first runs first.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []  # a heap
        self._planned = 0

    def at(self, when: float, action: Callable[..., object], *args: Any) -> None:
        """Have an action run at a time; at once if the time has passed; never if it is infinite."""
        if when < math.inf:
            self._planned += 1
            heapq.heappush(self._waiting, (max(when, self.now), self._planned, action, args))

    def after(self, seconds: float, action: Callable[..., object], *args: Any) -> None:
        """Have an action run after so many seconds."""
        self.at(self.now + seconds, action, *args)

    @property
    def next_at(self) -> float:
        """When the next action runs; infinite if none waits."""
        return self._waiting[0][0] if self._waiting else math.inf

    def run_until(self, end: float) -> None:
        """Run what is due by then, also what is planned meanwhile; then it is that late."""
        while self._waiting and self._waiting[0][0] <= end:
            self.now, _, action, args = heapq.heappop(self._waiting)
            action(*args)
        self.now = end
