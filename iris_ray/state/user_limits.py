"""Limits by user and band, and what counts towards them: chips, jobs that have hosts, jobs that wait, tasks.

GPUs count as chips.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from iris_ray.errors import LimitReachedError
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import JobSpec, PriorityBand
from iris_ray.model.jobs import Allocation, Job
from iris_ray.model.limits import DEFAULT_LIMITS, EVERYBODY, Limits
from iris_ray.model.workers import accelerators, rounded

Account = tuple[str, PriorityBand]
"""A user and a band."""


@dataclass(slots=True)
class Held:
    """What the jobs of a user in one band have.

    Attributes:
        chips: what their attempts, and spares, hold until their end is confirmed.
        running: ids of unfinished jobs that hold hosts; without spares, which are a part of their job.
        queued: ids of the other unfinished jobs.
        tasks: how many tasks all of these may have.
    """

    chips: float = 0.0
    running: set[str] = field(default_factory=set)
    queued: set[str] = field(default_factory=set)
    tasks: int = 0


class UserLimits:
    """All limits that were set, and what each user holds. The scheduler reads it.

    Attributes:
        version: counts the changes to the limits.
        table: what operators have set, by user, or `EVERYBODY`, and band.
    """

    def __init__(self) -> None:
        self.version = 0
        self.table: dict[Account, Limits] = {}
        self._of_everybody: dict[PriorityBand, Limits] = {}  # worked out when first read
        self._held: dict[Account, Held] = {}

    # -- the limits ------------------------------------------------------------------------------------------------

    def set(self, user: str, band: PriorityBand, limits: Limits) -> None:
        """Replace the limits of a user, or of everybody, in a band. Empty ones are those of everybody again."""
        self.version += 1
        self._of_everybody.clear()
        self.table[user, band] = limits
        if limits.is_empty:
            del self.table[user, band]

    def of(self, user: str, band: PriorityBand) -> Limits:
        """Return the limits that hold for a user in a band; all of them are set."""
        everybody = self._of_everybody.get(band)
        if everybody is None:
            everybody = self._of_everybody[band] = self.table.get((EVERYBODY, band), Limits()).over(DEFAULT_LIMITS)
        own = self.table.get((user, band))
        return everybody if own is None else own.over(everybody)

    def held(self, user: str, band: PriorityBand) -> Held:
        """Return what a user holds in a band."""
        return self._held.get((user, band)) or Held()

    @property
    def accounts(self) -> Collection[Account]:
        """All users with limits of their own, or with jobs, each with the band."""
        return self._held.keys() | self.table.keys()

    def require_room(self, spec: JobSpec) -> None:
        """Refuse a new job of a user who has too many jobs that wait, or too many tasks.

        Raises:
            LimitReachedError: which limit, what there is and what the job would add.
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
                    " ask an operator for more: iris-ray limit"
                )

    # -- what counts towards them ------------------------------------------------------------------------------------

    def submitted(self, spec: JobSpec) -> None:
        """Count a job that has not ended. Spares are no jobs of their own."""
        if spec.spare_for is None:
            held = self._account(spec)
            held.queued.add(spec.job_id)
            held.tasks += spec.most_tasks

    def ended(self, spec: JobSpec) -> None:
        """Count a job no more. What its attempts hold still counts."""
        held = self._account(spec)
        if spec.job_id in held.queued or spec.job_id in held.running:
            held.queued.discard(spec.job_id)
            held.running.discard(spec.job_id)
            held.tasks -= spec.most_tasks
        self._forget_if_empty(spec)

    def took(self, spec: JobSpec, demands: Iterable[Mapping[str, float]]) -> None:
        """Count what an attempt holds from now on."""
        held = self._account(spec)
        held.chips = rounded(held.chips + _chips(demands))
        if spec.job_id in held.queued:
            held.queued.discard(spec.job_id)
            held.running.add(spec.job_id)
        self._forget_if_empty(spec)  # what an attempt has held of lost hosts only

    def gave_back(self, spec: JobSpec, demands: Iterable[Mapping[str, float]], holds_more: bool) -> None:
        """Count some of what an attempt held no more.

        Args:
            spec: its job.
            demands: what is free now.
            holds_more: whether any attempt of the job holds something still.
        """
        held = self._account(spec)
        held.chips = rounded(held.chips - _chips(demands))
        if not holds_more and spec.job_id in held.running:
            held.running.discard(spec.job_id)
            held.queued.add(spec.job_id)
        self._forget_if_empty(spec)

    def _account(self, spec: JobSpec) -> Held:
        key = spec.user, spec.priority
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held()
        return held

    def _forget_if_empty(self, spec: JobSpec) -> None:
        key = spec.user, spec.priority
        held = self._held[key]
        if not (held.queued or held.running or held.chips):
            del self._held[key]

    # -- checking ----------------------------------------------------------------------------------------------------

    def check(self, jobs: Mapping[str, Job], allocations: Mapping[str, Mapping[AttemptId, Allocation]]) -> None:
        """Raise AssertionError if what is counted differs from what there is. For tests."""
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
