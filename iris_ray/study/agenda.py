"""The virtual clock of a simulation: planned actions, how long they take, and random ones."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


class Agenda:
    """A virtual clock, and the actions that wait for their time. Actions of the same time run in the planned order.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []  # a heap
        self._planned = 0

    def at(self, when: float, action: Callable[..., object], *args: Any) -> None:
        """Plan an action for a time; for now if the time has passed; never if it is infinite."""
        if when < math.inf:
            self._planned += 1
            heapq.heappush(self._waiting, (max(when, self.now), self._planned, action, args))

    def after(self, seconds: float, action: Callable[..., object], *args: Any) -> None:
        """Plan an action for a time that is ``seconds`` from now."""
        self.at(self.now + seconds, action, *args)

    @property
    def next_at(self) -> float:
        """The time of the next action; infinite if none waits."""
        return self._waiting[0][0] if self._waiting else math.inf

    def run_until(self, end: float) -> None:
        """Run all actions that are due by ``end``, also those planned meanwhile, and set the clock to it."""
        while self._waiting and self._waiting[0][0] <= end:
            self.now, _, action, args = heapq.heappop(self._waiting)
            action(*args)
        self.now = end


@dataclass(frozen=True, slots=True)
class Timings:
    """How long the actions of pools, hosts and the provider take, in seconds.

    Attributes:
        launch: from an order to running tasks, on hosts where the pool has no processes yet.
        warm_launch: from an order to running tasks, on slices that the pool keeps warm.
        failed_launch: from an order to the report that the launch failed.
        stop: from the stop or failure of a gang to the end of its last process.
        exit: from the success of a gang to the end of its last process.
        reclaim: until a pool has released a slice that it keeps warm.
        keep_warm: how long a pool keeps the slices of a job that moves elsewhere.
        make_slice: from the request of a slice of a reservation to its hosts.
        delete_slice: from the order to delete a slice of a reservation until its chips are free.
    """

    launch: float = 10.0
    warm_launch: float = 0.2
    failed_launch: float = 30.0
    stop: float = 5.0
    exit: float = 1.0
    reclaim: float = 1.0
    keep_warm: float = 60.0
    make_slice: float = 300.0
    delete_slice: float = 180.0


def strike_at_random(
    agenda: Agenda, targets: Sequence[str], every_s: float, strike: Callable[[str], object], chance: Random
) -> None:
    """Strike random targets at random times, each strike independent of those before (a Poisson process).

    Args:
        agenda: the clock.
        targets: names of hosts or slices.
        every_s: the mean time between two strikes at the same target, in seconds.
        strike: gets the target.
        chance: decides the times and the targets.
    """
    if not targets:
        return

    def happen() -> None:
        strike(chance.choice(targets))
        plan()

    def plan() -> None:
        agenda.after(chance.expovariate(len(targets) / every_s), happen)

    plan()
