"""Sums of what the time of jobs went into."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from iris_ray.goodput.kinds import TimeKind
from iris_ray.goodput.measure import Span

NOT_TRAINING = frozenset({TimeKind.QUEUEING.value, TimeKind.LAUNCH.value, TimeKind.UNMEASURED.value})
"""Kinds that are no part of the time of which goodput is a share: Google's definition begins when user code does."""


@dataclass(slots=True)
class Totals:
    """Time of some jobs, by the value of its `TimeKind`.

    Attributes:
        seconds: how long it took.
        chip_seconds: the same, times the chips that were held meanwhile.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    chip_seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(spans: Iterable[Span]) -> "Totals":
        """Return the sums of one job."""
        totals = Totals()
        for span in spans:
            totals.add({span.kind.value: span.seconds}, {span.kind.value: span.seconds * span.chips})
        return totals

    def add(self, seconds: Mapping[str, float], chip_seconds: Mapping[str, float]) -> None:
        """Add the time of another job."""
        for totals, more in ((self.seconds, seconds), (self.chip_seconds, chip_seconds)):
            for kind, amount in more.items():
                totals[kind] = totals.get(kind, 0.0) + amount

    @property
    def goodput(self) -> float | None:
        """The productive share of the time since user code began, from 0 to 1; None if jobs did not measure any."""
        return productive_share(self.seconds)

    @property
    def measured(self) -> float | None:
        """The share of the time with user code of which is known what it went into; None if no user code ran."""
        ran = sum(amount for kind, amount in self.seconds.items() if kind not in ("queueing", "launch"))
        return 1.0 - self.seconds.get("unmeasured", 0.0) / ran if ran else None


def productive_share(amounts: Mapping[str, float]) -> float | None:
    """Return the productive share of seconds or chip-seconds; None if jobs did not measure any."""
    training = sum(amount for kind, amount in amounts.items() if kind not in NOT_TRAINING)
    return amounts.get(TimeKind.PRODUCTIVE.value, 0.0) / training if training else None
