"""Which files go: a pure function of what there is, its age and the limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

DAY_S: Final = 86_400.0
LEAST_AGE_S: Final = 3600.0
"""Nothing that was changed within this time goes, however full the disk is."""
JUMP_S: Final = 600.0
"""The wall clock has been set if it went on by more or less than the time since boot, beyond this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may stay.

    Attributes:
        days: the age at which unused files go; None: they stay.
        bytes: the size at which the oldest unused ones go; None: there is none.
    """

    days: float | None
    bytes: int | None

    @property
    def keep_all(self) -> bool:
        return self.days is None and self.bytes is None


@dataclass(frozen=True, slots=True)
class Item(Generic[Key]):
    """A file, or a directory that goes as a whole.

    Attributes:
        key: which one.
        changed_at: when it was changed last, in seconds since the epoch.
        bytes: what it takes.
        used: whether a living process uses it, or may.
    """

    key: Key
    changed_at: float
    bytes: int
    used: bool = False


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A machine's clocks at one moment.

    Attributes:
        boot: the kernel's id of this boot.
        wall: seconds since the epoch.
        uptime: seconds since boot, with the time of suspension.
        set_at: when the wall clock was seen to have been set, in seconds since the epoch; 0: never.
    """

    boot: str
    wall: float
    uptime: float
    set_at: float = 0.0

    def after(self, earlier: "ClockReading | None") -> "ClockReading":
        """Return this reading with what an earlier one tells of the wall clock."""
        if earlier is None:
            return self
        went_on = self.wall - earlier.wall
        passed = self.uptime - earlier.uptime if earlier.boot == self.boot else max(0.0, went_on)
        was_set = abs(went_on - passed) > JUMP_S
        return ClockReading(self.boot, self.wall, self.uptime, self.wall if was_set else earlier.set_at)


def to_remove(items: Sequence[Item[Key]], clock: ClockReading, limits: Limits) -> list[Item[Key]]:
    """Return what goes, the oldest first.

    A file is never older than the time since the wall clock was set: no jump of the clock makes a new file old. One
    from the future was changed before the clock was set back.
    """
    total = sum(item.bytes for item in items)
    found = []
    for item in sorted(items, key=lambda item: item.changed_at):
        changed_at = item.changed_at if item.changed_at <= clock.wall or not clock.set_at else 0.0
        age = clock.wall - max(changed_at, clock.set_at)
        too_old = limits.days is not None and age >= limits.days * DAY_S
        too_much = limits.bytes is not None and total > limits.bytes
        if not item.used and age >= LEAST_AGE_S and (too_old or too_much):
            found.append(item)
            total -= item.bytes
    return found
