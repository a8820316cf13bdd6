"""Limits by user and band, and the usage that counts towards them: chips, running and queued jobs, and tasks.

GPUs count as chips.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from iris_ray.errors import LimitReachedError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Allocation, Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.limits import DEFAULT_LIMITS, EVERYBODY, Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import accelerators, rounded

Account = tuple[str, PriorityBand]
"""A user and a band."""


@dataclass(slots=True)
class BandUse:
    """The usage of a user's jobs in one band.

    Attributes:
        chips: chips that attempts, including those of spares, hold until their end is confirmed.
        running: ids of unfinished jobs that hold hosts, except spares, which belong to their job.
        queued: ids of the other unfinished jobs.
        tasks: the largest number of tasks that all these jobs can have.
    """

    chips: float = 0.0
    running: set[str] = field(default_factory=set)
    queued: set[str] = field(default_factory=set)
    tasks: int = 0


class UserLimits:
    """All limits that were set, and each user's usage, for the scheduler.

    Attributes:
        version: the number of changes to the limits.
        table: the limits that operators have set, by user (or `EVERYBODY`) and band.
    """

    def __init__(self) -> None:
        self.version = 0
        self.table: dict[Account, Limits] = {}
        self._of_everybody: dict[PriorityBand, Limits] = {}  # computed when first read
        self._held: dict[Account, BandUse] = {}

    # -- the limits ------------------------------------------------------------------------------------------------

    def set(self, user: str, band: PriorityBand, limits: Limits) -> None:
        """Replace the limits of a user (or `EVERYBODY`) in a band. Empty limits fall back to everybody's."""
        self.version += 1
        self._of_everybody.clear()
        self.table[user, band] = limits
        if limits.is_empty:
            del self.table[user, band]

    def of(self, user: str, band: PriorityBand) -> Limits:
        """Return a user's limits in a band, completed from everybody's and the defaults, so that none is None."""
        everybody = self._of_everybody.get(band)
        if everybody is None:
            everybody = self._of_everybody[band] = self.table.get((EVERYBODY, band), Limits()).over(DEFAULT_LIMITS)
        own = self.table.get((user, band))
        return everybody if own is None else own.over(everybody)

    def held(self, user: str, band: PriorityBand) -> BandUse:
        """Return a user's usage in a band."""
        return self._held.get((user, band)) or BandUse()

    @property
    def accounts(self) -> Collection[Account]:
        """All pairs of user and band with limits of their own or with jobs."""
        return self._held.keys() | self.table.keys()

    def require_room(self, spec: JobSpec) -> None:
        """Refuse a new job of a user with too many queued jobs or tasks.

        Raises:
            LimitReachedError: the message has the limit, the current count and the number that the job would add.
        """
        limits, held = self.of(spec.user, spec.priority), self.held(spec.user, spec.priority)
        for what, limit, have, more in (
            ("queued jobs", limits.queued_jobs, len(held.queued), 1),
            ("tasks", limits.tasks, held.tasks, spec.most_tasks),
        ):
            assert limit is not None
            if have + more > limit:
                raise LimitReachedError(
                    f"job {spec.job_id} is refused: the limit of {spec.user} in band {spec.priority.name.lower()} is"
                    f" {limit:,} {what}; there are {have:,}, and the job adds {more:,}. Wait until some have ended, or"
                    " ask an operator for more: iris-ray cluster limits"
                )

    # -- usage -------------------------------------------------------------------------------------------------------

    def submitted(self, spec: JobSpec) -> None:
        """Count an unfinished job. Spares don't count as separate jobs."""
        if spec.spare_for is None:
            held = self._account(spec)
            held.queued.add(spec.job_id)
            held.tasks += spec.most_tasks

    def ended(self, spec: JobSpec) -> None:
        """Stop counting a job, but not the chips of its attempts."""
        held = self._account(spec)
        if spec.job_id in held.queued or spec.job_id in held.running:
            held.queued.discard(spec.job_id)
            held.running.discard(spec.job_id)
            held.tasks -= spec.most_tasks
        self._forget_if_empty(spec)

    def took(self, spec: JobSpec, demands: Iterable[Mapping[str, float]]) -> None:
        """Count resources that an attempt gets."""
        held = self._account(spec)
        if chips := _chips(demands):
            held.chips = rounded(held.chips + chips)
        if spec.job_id in held.queued:
            held.queued.discard(spec.job_id)
            held.running.add(spec.job_id)
        self._forget_if_empty(spec)  # the attempt may have held lost hosts only

    def gave_back(self, spec: JobSpec, demands: Iterable[Mapping[str, float]], holds_more: bool) -> None:
        """Stop counting freed resources; ``holds_more``: whether the job's attempts still hold others."""
        held = self._account(spec)
        held.chips = rounded(held.chips - _chips(demands))
        if not holds_more and spec.job_id in held.running:
            held.running.discard(spec.job_id)
            held.queued.add(spec.job_id)
        self._forget_if_empty(spec)

    def _account(self, spec: JobSpec) -> BandUse:
        return self._held.setdefault((spec.user, spec.priority), BandUse())

    def _forget_if_empty(self, spec: JobSpec) -> None:
        key = spec.user, spec.priority
        held = self._held[key]
        if not (held.queued or held.running or held.chips):
            del self._held[key]

    # -- checking ----------------------------------------------------------------------------------------------------

    def check(self, jobs: Mapping[str, Job], allocations: Mapping[str, Mapping[AttemptId, Allocation]]) -> None:
        """Raise AssertionError if the counts disagree with the jobs. For tests."""
        fresh = UserLimits()
        for job_id, job in jobs.items():
            if not job.state.finished:
                fresh.submitted(job.spec)
            for allocation in allocations.get(job_id, {}).values():
                fresh.took(job.spec, (demand for _, _, demand in allocation))
        assert self._held == fresh._held, f"users hold {self._held}, by the jobs it is {fresh._held}"
        assert not any(limits.is_empty for limits in self.table.values()), "limits that are none"


def _chips(demands: Iterable[Mapping[str, float]]) -> float:
    return sum(map(accelerators, demands))


# -- past usage --------------------------------------------------------------------------------------------------------

HALF_LIFE_S = 4 * 3600.0
"""The age at which past usage counts half, in seconds."""

_HOUR_S = 3600.0
_MEAN_LIFE_S = HALF_LIFE_S / math.log(2)
_NEGLIGIBLE = 1e-3
_USERS = 1000
"""Beyond this number of users, and whenever their number has doubled since, users with negligible usage are dropped."""


class PastUsage:
    """Each user's past usage in amount-hours of each resource, with exponential decay, for fair share.

    Usage four hours ago counts half, a day ago 1/64.

    Args:
        usage: each user's current usage, by Ray's resource names; read only.

    Attributes:
        now: the time of the latest event.
    """

    def __init__(self, usage: Mapping[str, Mapping[str, float]]) -> None:
        self._usage = usage
        self.now = 0.0
        self._past: dict[str, tuple[float, dict[str, float]]] = {}  # user → when it was computed, amount-hours
        self._most = _USERS

    def settle(self, user: str) -> None:
        """Update a user's past usage up to now. Call this before the user's current usage changes."""
        if user in self._past and self._past[user][0] == self.now:
            return
        self._past[user] = self.now, self.hours(user, self.now)
        if len(self._past) > self._most:
            self._forget_old()

    def hours(self, user: str, now: float) -> dict[str, float]:
        """Return the amount-hours of a user until a time, by Ray's resource names."""
        at, before = self._past.get(user, (now, {}))
        left = 0.5 ** (max(0.0, now - at) / HALF_LIFE_S)
        hours = {resource: amount * left for resource, amount in before.items()}
        if left < 1.0:
            for resource, amount in self._usage.get(user, {}).items():
                hours[resource] = hours.get(resource, 0.0) + amount * (1.0 - left) * _MEAN_LIFE_S / _HOUR_S
        return hours

    def mean(self, user: str, resource: str, now: float) -> float:
        """Return a user's average usage of a resource over the past hours."""
        return self.hours(user, now).get(resource, 0.0) * _HOUR_S / _MEAN_LIFE_S

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the amount-hours of all users with more than negligible past usage."""
        found = ((user, self.hours(user, self.now)) for user in self._past)
        return {
            user: {resource: round(amount, 4) for resource, amount in hours.items()}
            for user, hours in found
            if any(amount > _NEGLIGIBLE for amount in hours.values())
        }

    def restore(self, hours: Mapping[str, Mapping[str, float]], at: float) -> None:
        """Restore an earlier Controller's sums as of a time. Usage since then is unknown."""
        self._past |= {user: (at, dict(amounts)) for user, amounts in hours.items()}

    def _forget_old(self) -> None:
        left = self.snapshot()
        self._past = {user: past for user, past in self._past.items() if user in left or user in self._usage}
        self._most = max(_USERS, 2 * len(self._past))
