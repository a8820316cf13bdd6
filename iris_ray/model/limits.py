"""Limits on what each user may hold at a time, by priority band."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from iris_ray.model.checks import Number, Whole, require

EVERYBODY = "*"
"""The user name whose limits apply to all users without their own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for all jobs of a user in one band. None means that a limit is not set here.

    Attributes:
        chips: chips and GPUs held by tasks, including spares. Jobs beyond the limit wait.
        running_jobs: jobs that have hosts. Jobs beyond the limit wait.
        queued_jobs: jobs without hosts. Jobs beyond the limit are refused.
        tasks: tasks of unfinished jobs. Jobs beyond the limit are refused.

    Raises:
        InvalidRequestError: a limit is negative or not a number.
    """

    chips: float | None = None
    running_jobs: int | None = None
    queued_jobs: int | None = None
    tasks: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.items():
            require(f"the limit {name}", value, Number(or_none=True) if name == "chips" else Whole(or_none=True))

    def items(self) -> Iterator[tuple[str, float | None]]:
        """Iterate over the names and values of all limits."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def is_empty(self) -> bool:
        """Whether no limit is set."""
        return all(value is None for _, value in self.items())

    def over(self, others: "Limits") -> "Limits":
        """Return these limits, with other limits in place of those that are not set."""
        return Limits(
            others.chips if self.chips is None else self.chips,
            others.running_jobs if self.running_jobs is None else self.running_jobs,
            others.queued_jobs if self.queued_jobs is None else self.queued_jobs,
            others.tasks if self.tasks is None else self.tasks,
        )


DEFAULT_LIMITS = Limits(chips=1_000_000, running_jobs=100_000, queued_jobs=20_000, tasks=500_000)
"""The limits where operators have set none, which only protect the Controller from overload."""
