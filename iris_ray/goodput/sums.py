"""Sums of jobs' time by user, team and day, and of chips' time by state and day. They outlive the jobs."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.goodput.calls import UserDay
from iris_ray.model.goodput import ForgottenJob, Totals
from iris_ray.model.plain_values import plain

ENTRIES_KEPT = 300
"""The limit for the sums of a day, user and team: the latest ones are kept, together below 100 KB."""
DAY_S = 86400.0


class UserTimes:
    """The sums of forgotten jobs."""

    def __init__(self) -> None:
        self._days: dict[tuple[int, str, str], UserDay] = {}

    def add(self, job: ForgottenJob) -> None:
        """Add one job."""
        totals = job.totals
        self.include(UserDay(int(job.ended_at // DAY_S), job.user, 1, totals.seconds, totals.chip_seconds, job.team))

    def include(self, day: UserDay) -> None:
        """Add the sums of a user, team and day from elsewhere."""
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


def day_of(wall: float) -> str:
    """Return the day in UTC of a time in seconds since the epoch."""
    return datetime.fromtimestamp(wall, UTC).date().isoformat()


# -- both together -----------------------------------------------------------------------------------------------------

Line = dict[str, Any]


class Sums:
    """The sums of a cluster, in its record and in an export's lines.

    Attributes:
        users: the time of forgotten jobs by its use.
        fleet: the time of the chips by state.
        included: the digest of the export that is part of them, or "".
    """

    def __init__(self) -> None:
        self.users = UserTimes()
        self.fleet = FleetTimes()
        self.included = ""

    def to_json(self) -> bytes:
        """Return the record of all sums."""
        return json.dumps([{"kind": "included", "digest": self.included}, *self.lines()]).encode()

    @staticmethod
    def read(recorded: bytes) -> "Sums":
        """Return the sums of a record. A damaged record may raise any error."""
        sums = Sums()
        for line in json.loads(recorded):
            sums.add_line(line)
        return sums

    @staticmethod
    def of_export(lines: bytes) -> "Sums":
        """Return the sums in a JSON list of lines, see `add_line`.

        Raises:
            InvalidRequestError: it is no such list, or a line makes no sense.
        """
        try:
            found = json.loads(lines)
        except (ValueError, RecursionError):
            raise InvalidRequestError("the lines are not JSON") from None
        sums = Sums()
        for line in found if isinstance(found, list) else [found]:
            sums.add_line(line)
        return sums

    def include(self, others: "Sums") -> None:
        """Add other sums to these."""
        for line in others.lines():
            self.add_line(line)

    def lines(self) -> list[Line]:
        """Return the lines of an export."""
        of_users = [{"kind": "user_day", **asdict(one)} for one in self.users.since(0.0)]
        of_fleet = [{"kind": "fleet_day", "day": day, "chip_seconds": of} for day, of in self.fleet.since("").items()]
        return [
            {name: _rounded(value) if isinstance(value, dict) else value for name, value in line.items()}
            for line in (*of_users, *of_fleet)
        ]

    def add_line(self, line: Line) -> None:
        """Add a line of `lines`, or that of a finished job. Lines of other kinds are left out.

        Raises:
            InvalidRequestError: the line makes no sense.
        """
        try:
            self._add(line)
        except (IrisError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = str(error) if isinstance(error, IrisError) else f"{type(error).__name__}: {error}"
            raise InvalidRequestError(f"the line {json.dumps(line)[:200]} can't be read: {why}") from None

    def _add(self, line: Line) -> None:
        team = plain(str, line.get("team") or "", "team")
        match line["kind"]:
            case "user_day":
                amounts = _numbers(line["seconds"]), _numbers(line["chip_seconds"])
                day = UserDay(int(line["day"]), str(line["user"]), int(line["jobs"]), *amounts, team)
                self.users.include(plain(UserDay, day, "it"))
            case "included":
                self.included = str(line["digest"])
            case "fleet_day":
                chips = {ChipState(state): amount for state, amount in _numbers(line["chip_seconds"]).items()}
                self.fleet.add(plain(str, line["day"], "day"), chips, 1.0)
            case "finished" if line["seconds"] and line["ended_at"] is not None:
                totals = Totals(_numbers(line["seconds"]), _numbers(line["chip_seconds"]))
                ended_at = plain(float, line["ended_at"], "ended_at")
                self.users.add(ForgottenJob(plain(str, line["user"], "user"), ended_at, totals, team))


def _rounded(amounts: Mapping[str, float]) -> dict[str, float]:
    return {name: round(amount, 1) for name, amount in amounts.items()}


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = plain(Mapping[str, float], line, "an amount")
    return found
