"""Sums of jobs' time by user, team and day, and of chips' time by state and day. They outlive the jobs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from iris_ray.model.goodput import TimeKind, Totals

ENTRIES_KEPT = 300
"""How many sums of a day, user and team are kept, the latest ones: together they stay below 100 KB."""
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class ForgottenJob:
    """A job that is forgotten.

    Attributes:
        user: its user.
        ended_at: when it ended; by the clock of the events in the state, by the wall clock in sums.
        totals: its time by use.
        team: its team; empty for none.
    """

    user: str
    ended_at: float
    totals: Totals
    team: str = ""


@dataclass(frozen=True, slots=True)
class UserDay:
    """Jobs of a user in a team that ended on one day.

    Attributes:
        day: counts the days since the epoch, in UTC.
        user, team: the user, and the team, empty for none.
        jobs: how many jobs.
        seconds, chip_seconds: see `Totals`.
    """

    day: int
    user: str
    jobs: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    chip_seconds: Mapping[str, float] = field(default_factory=dict)
    team: str = ""


class UserTimes:
    """The sums of forgotten jobs. ``version`` counts the changes."""

    def __init__(self) -> None:
        self.version = 0
        self._days: dict[tuple[int, str, str], UserDay] = {}

    def add(self, job: ForgottenJob) -> None:
        """Add one job."""
        totals = job.totals
        self.include(UserDay(int(job.ended_at // DAY_S), job.user, 1, totals.seconds, totals.chip_seconds, job.team))

    def include(self, day: UserDay) -> None:
        """Add the sums of a user, team and day from elsewhere."""
        self.version += 1
        key = day.day, day.user, day.team
        known = self._days.get(key, UserDay(day.day, day.user, team=day.team))
        totals = Totals(dict(known.seconds), dict(known.chip_seconds))
        totals.add(day.seconds, day.chip_seconds)
        jobs = known.jobs + day.jobs
        self._days[key] = UserDay(day.day, day.user, jobs, totals.seconds, totals.chip_seconds, day.team)
        while len(self._days) > ENTRIES_KEPT:
            del self._days[min(self._days)]

    def since(self, at: float) -> list[UserDay]:
        """Return the sums of the day at a time, in seconds since the epoch, and of later days."""
        return [self._days[key] for key in sorted(self._days) if key[0] >= at // DAY_S]

    def to_json(self) -> bytes:
        """Return the record of all sums."""
        values = [
            (one.day, one.user, one.jobs, _rounded(one.seconds), _rounded(one.chip_seconds), one.team)
            for one in self._days.values()
        ]
        return json.dumps(values).encode()

    def restore(self, recorded: bytes) -> None:
        """Take up the record of an earlier Controller. A damaged record may raise any error."""
        days = [
            UserDay(int(day), str(user), int(jobs), _amounts(seconds), _amounts(chip_seconds), *map(str, team))
            for day, user, jobs, seconds, chip_seconds, *team in json.loads(recorded)
        ]
        self._days = {(one.day, one.user, one.team): one for one in days}


def _rounded(amounts: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(amount, 1) for kind, amount in amounts.items()}


def _amounts(recorded: Mapping[str, float]) -> dict[str, float]:
    return {TimeKind(kind).value: float(amount) for kind, amount in recorded.items()}


# -- fleet times -------------------------------------------------------------------------------------------------------

DAYS_KEPT = 90


class ChipState(Enum):
    """The state of a chip, always exactly one.

    BUSY: a job has it; `TimeKind` says what the job does.
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
        """Add some time to a day.

        Args:
            day: as ``2026-11-23``, in UTC.
            chips: how many chips were in each state.
            seconds: for how long.
        """
        of_day = self._days.setdefault(day, {})
        for state, count in chips.items():
            of_day[state.value] = of_day.get(state.value, 0.0) + count * seconds
        while len(self._days) > DAYS_KEPT:
            del self._days[min(self._days)]

    def since(self, day: str) -> dict[str, dict[str, float]]:
        """Return the chip-seconds by day and state, from a day on."""
        return {known: dict(of_day) for known, of_day in sorted(self._days.items()) if known >= day}

    def to_json(self) -> bytes:
        """Return the record of all sums."""
        rounded = {day: {state: round(amount) for state, amount in of.items()} for day, of in self._days.items()}
        return json.dumps(rounded).encode()

    def restore(self, recorded: bytes) -> None:
        """Take up the record of an earlier Controller. A damaged record may raise any error."""
        found = json.loads(recorded)
        self._days = {
            str(day): {ChipState(state).value: float(amount) for state, amount in of.items()}
            for day, of in found.items()
        }
