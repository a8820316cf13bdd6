"""Calls of goodput."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from iris_ray.actors.protocol.marks import in_pages
from iris_ray.actors.protocol.services import calls_of
from iris_ray.model.lifecycle import JobState
from iris_ray.model.time_lost import Failure, FailureCause, TimeLost


@dataclass(frozen=True, slots=True)
class JobGoodput:
    """The time of a job until now, or until its end, by its use.

    Attributes:
        number, job_id, user, state, team: see `JobStatus`.
        submitted_at, ended_at: seconds since the epoch; None while it has not ended.
        attempts: how many it has had.
        seconds: by the values of `iris_ray.model.goodput.TimeKind`.
        chip_seconds: these seconds, times the chips that it held meanwhile.
        goodput: the productive share of the time since user code began, from 0 to 1; None if user code has not begun,
            or its tasks call no ``heartbeat(step)``.
        measured: the share of the time with user code whose use is known; None if no user code ran.
        time_lost: what its failures have cost, by cause.
        elastic_seconds: that time in Google's elastic kinds of badput.
        last_failure: what the latest of them has cost until now; None if there was none, or it is not known.
        chip_hour: the price of a chip-hour of its type now and the currency; None if no provisioner has told one.
    """

    number: int
    job_id: str
    user: str
    state: JobState
    submitted_at: float
    ended_at: float | None
    attempts: int
    seconds: Mapping[str, float]
    chip_seconds: Mapping[str, float]
    goodput: float | None
    measured: float | None
    time_lost: Mapping[FailureCause, TimeLost]
    elastic_seconds: Mapping[str, float]
    last_failure: Failure | None
    chip_hour: tuple[float, str] | None
    team: str = ""


@dataclass(frozen=True, slots=True)
class UserDay:
    """Jobs of a user in a team that ended on one day.

    Attributes:
        day: counts the days since the epoch, in UTC.
        user: the user.
        team: the team; empty for none.
        jobs: how many jobs.
        seconds, chip_seconds: the jobs' time, in seconds and in chip-seconds, by kind, such as ``productive``.
    """

    day: int
    user: str
    jobs: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    chip_seconds: Mapping[str, float] = field(default_factory=dict)
    team: str = ""


@calls_of("goodput")
class GoodputCalls(Protocol):
    """Calls of people, and of the service ``handover``."""

    @in_pages(by="number")
    async def list_goodput(self, after: int = 0) -> list[JobGoodput]:
        """Return a page of the goodput of gangs, the oldest first: those after the job with this number."""

    async def job_goodput(self, job_id: str) -> JobGoodput:
        """Return the goodput of one job.

        Raises:
            UnknownNameError: there is no such job.
            InvalidRequestError: it is not a gang.
        """

    async def user_times(self, since: float) -> list[UserDay]:
        """Return the time of forgotten jobs by its use, per user and day of the job's end, since a time."""

    async def fleet_times(self, since: str) -> dict[str, dict[str, float]]:
        """Return the chip-seconds of the cluster by day and state, since a day in UTC, such as 2026-11-23."""

    async def take_over(self, lines: bytes, user: str) -> None:
        """Take over the sums of another Controller's export: all or none. The same export counts once.

        Args:
            lines: a JSON list of the lines of `Sums.lines`, and of lines of finished jobs.
            user: imports them.

        Raises:
            InvalidRequestError: a line makes no sense, or there are sums here already.
            NotPermittedError: the user is not an operator.
        """
