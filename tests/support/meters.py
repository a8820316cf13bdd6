"""A meter that keeps what is measured."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Series = tuple[str, str]
"""The name of a metric, and its labels as Prometheus writes them."""


class RecordedMeter:
    """Keeps measurements, and refuses those that do not fit their metrics.

    Attributes:
        now: what gauges were last set to.
        total: what was added to counters.
        seen: what histograms observed.
    """

    def __init__(self) -> None:
        self.now: dict[Series, float] = {}
        self.total: defaultdict[Series, float] = defaultdict(float)
        self.seen: defaultdict[Series, list[float]] = defaultdict(list)

    def set(self, metric: Any, value: float, labels: Mapping[str, str]) -> None:
        self.now[_series(metric, "gauge", labels)] = value

    def add(self, metric: Any, amount: float, labels: Mapping[str, str]) -> None:
        assert amount >= 0
        self.total[_series(metric, "counter", labels)] += amount

    def observe(self, metric: Any, seconds: float, labels: Mapping[str, str]) -> None:
        self.seen[_series(metric, "histogram", labels)].append(round(seconds, 6))

    def shown(self, name: str) -> dict[str, float]:
        """Return the values of a gauge that are not 0, by labels."""
        return {labels: value for (known, labels), value in self.now.items() if known == name and value}


def _series(metric: Any, kind: str, labels: Mapping[str, str]) -> Series:
    assert metric.kind.value == kind
    assert set(labels) == set(metric.labels)
    return metric.name, ",".join(f"{name}={labels[name]}" for name in metric.labels)
