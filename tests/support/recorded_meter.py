"""A meter that keeps what it is given."""

from collections import defaultdict
from collections.abc import Mapping

from iris_ray.actors.controller.metrics import Kind, Metric

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

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        self.now[_series(metric, Kind.GAUGE, labels)] = value

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        assert amount >= 0
        self.total[_series(metric, Kind.COUNTER, labels)] += amount

    def observe(self, metric: Metric, seconds: float, labels: Mapping[str, str]) -> None:
        self.seen[_series(metric, Kind.HISTOGRAM, labels)].append(round(seconds, 6))

    def shown(self, name: str) -> dict[str, float]:
        """Return the values of a gauge that are not 0, by labels."""
        return {labels: value for (known, labels), value in self.now.items() if known == name and value}


def _series(metric: Metric, kind: Kind, labels: Mapping[str, str]) -> Series:
    assert metric.kind is kind
    assert set(labels) == set(metric.labels)
    return metric.name, ",".join(f"{name}={labels[name]}" for name in metric.labels)
