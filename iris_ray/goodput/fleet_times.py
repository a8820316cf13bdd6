"""What the chips of a cluster were in, day by day."""

import json
from collections.abc import Mapping
from enum import Enum

DAYS_KEPT = 90


class ChipState(Enum):
    """What a chip is in: exactly one of these.

    BUSY: a job has it, see `iris_ray.goodput.kinds.TimeKind`.
    SPARE: it is held ready to replace a lost slice, or to let a job grow.
    WARM: a pool keeps it for its next run.
    QUARANTINED: its host was quarantined because of failures.
    UNAVAILABLE: its host takes nothing new for another reason: it drains, is tainted, or others use its chips.
    FREE: nothing has it.
    """

    BUSY = "busy"
    SPARE = "spare"
    WARM = "warm"
    QUARANTINED = "quarantined"
    UNAVAILABLE = "unavailable"
    FREE = "free"


class FleetTimes:
    """Chip-seconds by day and state, of the latest `DAYS_KEPT` days on which there was a Controller."""

    def __init__(self) -> None:
        self._days: dict[str, dict[str, float]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added yet."""
        return not self._days

    def add(self, day: str, chips: Mapping[ChipState, float], seconds: float) -> None:
        """Add that so many chips were in these states for so long.

        Args:
            day: as ``2026-11-23``, in UTC.
            chips: how many are in each state.
            seconds: for how long.
        """
        of_day = self._days.setdefault(day, {})
        for state, count in chips.items():
            of_day[state.value] = of_day.get(state.value, 0.0) + count * seconds
        while len(self._days) > DAYS_KEPT:
            del self._days[min(self._days)]

    def since(self, day: str) -> dict[str, dict[str, float]]:
        """Return the chip-seconds by day and state, of that day and the later ones."""
        return {known: dict(of_day) for known, of_day in sorted(self._days.items()) if known >= day}

    def to_json(self) -> bytes:
        """Return all of it, to be recorded."""
        rounded = {day: {state: round(amount) for state, amount in of.items()} for day, of in self._days.items()}
        return json.dumps(rounded).encode()

    def restore(self, recorded: bytes) -> None:
        """Take up what an earlier Controller has recorded; raises anything if that is damaged."""
        found = json.loads(recorded)
        self._days = {
            str(day): {ChipState(state).value: float(amount) for state, amount in of.items()}
            for day, of in found.items()
        }
