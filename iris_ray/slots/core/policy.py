"""What operators can choose: how slots are placed and evicted, and how requests are served."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import FLAG, Check, Holds, Number, Seconds, Whole, require, require_fields
from iris_ray.slots.core.slot import Slot

StalenessFunction = Callable[[str, float], float]
"""Takes a runner's id and the time of a slot's last activity, and returns when the idle slot is stale; in seconds."""


@dataclass(frozen=True, slots=True)
class IdleFor:
    """A slot is stale after it has been idle for some seconds, on any runner."""

    seconds: float

    def __call__(self, runner_id: str, last_activity: float) -> float:
        return last_activity + self.seconds


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """How slots are placed and evicted.

    Args:
        stale_at: a function that says when an idle slot becomes stale. A stale slot that is not a replica may be
            evicted for a model that needs its memory. A slot that is not stale gives way only to a request that has
            waited for `ServingPolicy.ageing_s`. The function is called with the runner's id and the time when the slot
            was last active, and returns a time; both in seconds on the same clock. By default a slot is stale after 10
            idle seconds. If the function raises or returns NaN, the slot is not stale.
        min_residency_s: seconds for which a slot is not evicted for other models after it became ready.
        spread_before_evicting: split a model over several free devices rather than evict a slot to make room on one.
    """

    stale_at: StalenessFunction = IdleFor(10.0)
    min_residency_s: float = 10.0
    spread_before_evicting: bool = True

    def __post_init__(self) -> None:
        require("min_residency_s", self.min_residency_s, Seconds(), InvalidSlotError)
        function = Holds(callable, "a function of a runner's id and the time of a slot's last activity")
        require("stale_at", self.stale_at, function, InvalidSlotError)
        require("spread_before_evicting", self.spread_before_evicting, FLAG, InvalidSlotError)


# -- serving policy ----------------------------------------------------------------------------------------------------

REPORT_S: Final = 5.0
"""How often runners are asked for their slots."""
RENEW_S: Final = 5.0
"""How often a client reports that it is alive."""
RECHECK_S: Final = 5.0
"""How often all models are looked at, and unconfirmed deletions ordered again, even without events: a safety net."""
ACTIVITY_S: Final = 30.0
"""How often idle slots are ended, those of models with a limit of their own excepted, and demand is averaged."""


@dataclass(frozen=True, slots=True)
class ServingPolicy:
    """How requests are served. Times are in seconds.

    Args:
        placement: where slots go, and which may be evicted.
        most_waiting: requests and sessions that may wait at once. Those that wait again, because their slot was lost,
            are always accepted.
        most_waiting_bytes: bytes of their payloads together. A request that would wait alone is accepted, whatever its
            size.
        ageing_s: how long a request waits before its model starves, if no slot of it has a free seat or will have one.
            Then any slot of another model but a replica may have to give way to it, and its room is kept for it, unless
            a model that has waited longer needs it. If there is no room, a session of its model that has had its seat
            for as long has to give it back.
        drain_s: how long a slot that ends may finish its requests. Then they are cut off, and wait again if they may be
            repeated. A slot that ends for another model, or whose model was changed or removed, finishes its requests
            however long they take. If all requests and sessions on a slot have been told to stop, they also have this
            time, or that of a load of the model if it is longer; after that, the slot may be ended for requests that
            wait.
        load_s: how long a model may load before the load counts as failed, unless `ModelSpec.load_s` says otherwise.
        late_factor: how many times as long as the model's last load a load may take before it counts as late. If
            requests wait and there is room, the model is then loaded elsewhere as well. A slot that waits this long for
            its place is planned elsewhere if there is room.
        late_s: the least number of seconds before a load counts as late.
        idle_s: how long a slot may be idle before it ends even if no other slot needs its memory, unless
            `ModelSpec.idle_s` says otherwise; it ends about 30 s later at most. Replicas stay.
        most_load_failures: loads in a row that may fail before the waiting requests are refused, unless a slot of the
            model is ready.
        most_attempts: how often a request is given to a slot, at most, if slots are lost. After as many crashes of a
            model's slots in a row, its loads pause.
        longest_pause_s: the longest pause after failed loads or crashes.
        avoid_runner_s: how long a model that failed to load on a runner is loaded on other runners if they have room.
        silence_s: how long a client may be silent before its requests and sessions end; ten seconds more at most.
            At least 10, since clients report every five seconds.

    Raises:
        InvalidSlotError: a value can't work; the message names it.
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

    def __post_init__(self) -> None:
        own: Mapping[str, Check] = {"placement": Holds(PlacementPolicy, "a PlacementPolicy"), "late_factor": Number()}
        seconds = dict.fromkeys((each.name for each in fields(self) if each.name.endswith("_s")), Seconds(endless=True))
        counts = dict.fromkeys((each.name for each in fields(self) if each.name.startswith("most_")), Whole(1))
        seconds["silence_s"] = Seconds(2 * RENEW_S, endless=True)
        require_fields("", self, {**own, **seconds, **counts}, InvalidSlotError)

    def pause_after(self, failures: int) -> float:
        """Return the pause after a number of failed loads: 1, 2, 4, … seconds, at most ``longest_pause_s``."""
        return float(min(2.0 ** min(failures - 1, 20), self.longest_pause_s))


# -- staleness ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Staleness:
    """Asks `PlacementPolicy.stale_at`. If it raises or returns NaN, no slot is stale; `problem` says why."""

    policy: PlacementPolicy
    problem: str = ""

    def evictable_at(self, slot: Slot) -> float:
        """Return from when on a ready slot may be evicted if it stays idle; infinity if the user's function fails."""
        return max(self.resident_until(slot), self._stale_at(slot))

    def resident_until(self, slot: Slot) -> float:
        """Return until when a ready slot is never evicted."""
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
        """Return what went wrong since the last call, or ""."""
        problem, self.problem = self.problem, ""
        return problem
