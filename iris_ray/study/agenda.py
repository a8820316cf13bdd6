"""What is going to happen, in the order of time."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
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


# -- timings -----------------------------------------------------------------------------------------------------------
# How long what pools and hosts do takes.


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds.

    Attributes:
        launch: from an order to running tasks, on hosts where the pool has no processes yet.
        warm_launch: the same on slices that the pool keeps warm.
        failed_launch: from an order to the report that the launch failed.
        stop: until no process of a gang is left that is stopped, or has failed.
        exit: the same after success.
        reclaim: until a pool has released a slice that it keeps warm.
        keep_warm: how long a pool keeps the slices that a job left which goes on elsewhere.
    """

    launch: float = 10.0
    warm_launch: float = 0.2
    failed_launch: float = 30.0
    stop: float = 5.0
    exit: float = 1.0
    reclaim: float = 1.0
    keep_warm: float = 60.0


# -- hazards -----------------------------------------------------------------------------------------------------------
# What happens to hosts at random, from seeded generators.


def strike_at_random(
    agenda: Agenda, targets: Sequence[str], every_s: float, strike: Callable[[str], object], chance: Random
) -> None:
    """Have something happen to one of the targets, again and again, independently of what happened before.

    Args:
        agenda: the clock.
        targets: names of what it may happen to.
        every_s: the mean time between two strikes at the same target, in seconds.
        strike: what happens; gets the target.
        chance: decides when and to which.
    """
    if not targets:
        return

    def happen() -> None:
        strike(chance.choice(targets))
        plan()

    def plan() -> None:
        agenda.after(chance.expovariate(len(targets) / every_s), happen)

    plan()
