"""Where measurements go: Ray's metrics, which Prometheus reads from every node."""

from collections.abc import Mapping
from typing import Protocol

from ray.util import metrics

from iris_ray.actors.controller.metric_definitions import METRICS, Kind, Metric

Labels = Mapping[str, str]


class Meter(Protocol):
    """Takes measurements."""

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        """Say what a gauge is now."""

    def add(self, metric: Metric, amount: float, labels: Labels) -> None:
        """Add to a counter."""

    def observe(self, metric: Metric, seconds: float, labels: Labels) -> None:
        """Add one duration to a histogram."""


class RayMeter:
    """Gives measurements to Ray. The node's agent exports them every ten seconds; without one they are lost."""

    def __init__(self) -> None:
        of = {kind: [metric for metric in METRICS if metric.kind is kind] for kind in Kind}
        self._gauges = {m: metrics.Gauge(m.name, m.meaning, tag_keys=m.labels) for m in of[Kind.GAUGE]}
        self._counters = {m: metrics.Counter(m.name, m.meaning, tag_keys=m.labels) for m in of[Kind.COUNTER]}
        self._histograms = {
            m: metrics.Histogram(m.name, m.meaning, boundaries=list(m.buckets), tag_keys=m.labels)
            for m in of[Kind.HISTOGRAM]
        }

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        self._gauges[metric].set(value, dict(labels))

    def add(self, metric: Metric, amount: float, labels: Labels) -> None:
        if amount > 0:
            self._counters[metric].inc(amount, dict(labels))

    def observe(self, metric: Metric, seconds: float, labels: Labels) -> None:
        self._histograms[metric].observe(seconds, dict(labels))
