"""Limits on how much a user may have at a time, in each priority band."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from iris_ray.model.checks import is_amount, is_count, require

EVERYBODY = "*"
"""The user whose limits hold for all users without limits of their own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the jobs of a user in one band may have together. None: not set here.

    Attributes:
        chips: chips and GPUs that their tasks hold, spares included. A job over it waits.
        running_jobs: jobs that have hosts. A job over it waits.
        queued_jobs: jobs that have none. A job over it is refused.
        tasks: tasks of jobs that have not ended. A job over it is refused.

    Raises:
        InvalidRequestError: a limit is negative, or no number.
    """

    chips: float | None = None
    running_jobs: int | None = None
    queued_jobs: int | None = None
    tasks: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.items():
            is_limit = is_amount if name == "chips" else is_count
            require(value is None or is_limit(value), f"the limit {name}", value, "a number of 0 or more")

    def items(self) -> Iterator[tuple[str, float | None]]:
        """Iterate over the names of all limits and their values."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def is_empty(self) -> bool:
        """Whether no limit is set."""
        return all(value is None for _, value in self.items())

    def over(self, others: "Limits") -> "Limits":
        """Return these limits, completed by those of others."""
        return Limits(
            others.chips if self.chips is None else self.chips,
            others.running_jobs if self.running_jobs is None else self.running_jobs,
            others.queued_jobs if self.queued_jobs is None else self.queued_jobs,
            others.tasks if self.tasks is None else self.tasks,
        )


DEFAULT_LIMITS = Limits(chips=1_000_000, running_jobs=100_000, queued_jobs=20_000, tasks=500_000)
"""The limits where operators have set none. They only keep the Controller from drowning."""
