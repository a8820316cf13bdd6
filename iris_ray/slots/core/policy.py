"""What operators can choose: how slots are placed, kept and served."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import require_amount
from iris_ray.slots.core.slot import Slot

StalenessFunction = Callable[[str, float], float]
"""Of a runner's id and the time of a slot's last activity: from when on the idle slot is stale. Times in seconds."""


@dataclass(frozen=True, slots=True)
class IdleFor:
    """A slot is stale once it has been idle for so many seconds, on every runner alike."""

    seconds: float

    def __call__(self, runner_id: str, last_activity: float) -> float:
        return last_activity + self.seconds


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """How slots are placed and evicted.

    Args:
        stale_at: from when on an idle slot may be evicted. While it raises, or returns NaN, the slot is not stale.
        min_residency_s: for how many seconds a slot is kept after it was ready, whatever happens.
        spread_before_evicting: take free devices for a model that can be split over them, before a slot is evicted so
            that one device is enough.
    """

    stale_at: StalenessFunction = IdleFor(10.0)
    min_residency_s: float = 10.0
    spread_before_evicting: bool = True

    def __post_init__(self) -> None:
        require_amount("min_residency_s", self.min_residency_s, InvalidSlotError)


# -- serving policy ----------------------------------------------------------------------------------------------------
# What operators can choose about serving, and how often everything is checked again as a safety net.

REPORT_S: Final = 5.0
"""How often runners are asked what is there."""
RECHECK_S: Final = 5.0
"""How often the queue is looked at, and slots are created, started and deleted anew, although nothing was heard."""
ACTIVITY_S: Final = 30.0
"""How often idle slots are looked for, and demand is counted."""


@dataclass(frozen=True, slots=True)
class ServingPolicy:
    """How requests are served. Times are in seconds.

    Args:
        placement: where slots go, and which may be evicted.
        most_waiting: requests that may wait at once.
        most_waiting_bytes: what those may ask, together. One request may always wait, whatever its size.
        ageing_s: how long a request waits before a slot of another model takes no more requests for its sake, or a
            session that has had its seat for as long gives it back.
        drain_s: how long a slot that ends may finish its requests; then they are cut off and wait again. One that ends
            for the sake of another model finishes them however long they take. What was told to stop, such as a
            session that is over, may go on for as long; then it keeps nobody waiting any more.
        load_s: how long a model may load before the load counts as failed.
        late_factor: a load that takes so many times as long as the last one is late: it no longer keeps others from
            being tried elsewhere. So is a slot that waits for so long until its place is free: it is planned elsewhere.
        late_s: but a load is not late before so long.
        idle_s: how long a slot may be idle before it ends although nobody needs its memory.
        most_load_failures: loads in a row that may fail before those who wait are told.
        most_attempts: how often a request may be given to slots that are lost.
        longest_pause_s: between loads that fail.
        avoid_runner_s: how long a runner gets no slot of a model that failed to load there.
        silence_s: how long nothing may be heard of a client before its requests and sessions end.
    """

    placement: PlacementPolicy = field(default_factory=PlacementPolicy)
    most_waiting: int = 10_000
    most_waiting_bytes: int = 2**30
    ageing_s: float = 30.0
    drain_s: float = 60.0
    load_s: float = 600.0
    late_factor: float = 3.0
    late_s: float = 30.0
    idle_s: float = 600.0
    most_load_failures: int = 4
    most_attempts: int = 4
    longest_pause_s: float = 60.0
    avoid_runner_s: float = 120.0
    silence_s: float = 30.0

    def pause_after(self, failures: int) -> float:
        """Return how long to wait after so many failed loads: 1, 2, 4, … seconds."""
        return float(min(2.0 ** min(failures - 1, 20), self.longest_pause_s))


# -- staleness ---------------------------------------------------------------------------------------------------------
# From when on slots are stale, as the policy's function says. One that fails makes no slot stale, and is reported.


@dataclass(slots=True, eq=False)
class Staleness:
    """Asks `PlacementPolicy.stale_at`, a function of users, which may raise or return what is no time.

    Attributes:
        problem: what was wrong last, or "".
    """

    policy: PlacementPolicy
    problem: str = ""

    def evictable_at(self, slot: Slot) -> float:
        """Return from when on a ready slot may be evicted if it stays idle; infinity if its runner's rule fails."""
        return max(self.resident_until(slot), self._stale_at(slot))

    def resident_until(self, slot: Slot) -> float:
        """Return how long a ready slot is kept, whatever happens."""
        assert slot.ready_at is not None, f"slot {slot.slot_id} is not ready"
        return slot.ready_at + self.policy.min_residency_s

    def _stale_at(self, slot: Slot) -> float:
        runner_id = slot.allocation.runner_id
        try:
            when = float(self.policy.stale_at(runner_id, slot.last_activity))
        except Exception as error:
            self._note(runner_id, f"raised {type(error).__name__}: {error}")
            return math.inf
        if math.isnan(when):
            self._note(runner_id, "returned NaN")
            return math.inf
        return when

    def _note(self, runner_id: str, what: str) -> None:
        self.problem = (
            f"PlacementPolicy.stale_at {what}, for a slot on runner {runner_id}. The slot is not stale until the"
            f" function returns a time. Only a request that has waited for long evicts it."
        )

    def take_problem(self) -> str:
        """Return what was wrong since this was last asked, or ""."""
        problem, self.problem = self.problem, ""
        return problem
