"""Metrics of the HTTP server, for Prometheus."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from iris_ray.slots.front.openai_words import error_answer

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
OTHER = "other"
"""The label of all models that are not served, so that callers can't make up series."""
REFUSED = frozenset({400, 403, 404})
"""The statuses of requests whose models may not be served."""
LONGEST_NAME = 200
"""The limit for the characters of a model's name in a label."""
MOST_MODELS = 1000
"""The limit for models with series of their own: while the SlotManager is gone, nobody knows its models."""


class Measured:
    """A request that is measured.

    Attributes:
        model: the model's name, once it is known.
        status: the HTTP status of the answer.
    """

    def __init__(self) -> None:
        self.model = OTHER
        self.status = 0


class FrontMetrics:
    """Counts requests by model, route, key and status, and the seconds that they took."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._models = {OTHER}
        labels = ("model", "route", "key", "status")
        self._requests = Counter("iris_front_requests", "requests that were answered", labels, registry=self._registry)
        self._seconds = Histogram(
            "iris_front_request_seconds", "their time", ("model",), buckets=BUCKETS, registry=self._registry
        )
        self._running = Gauge("iris_front_running_requests", "requests that run or wait", registry=self._registry)
        self._slots = Gauge("iris_front_ready_slots", "ready slots", ("model",), registry=self._registry)
        self._waiting = Gauge("iris_front_waiting_requests", "requests in queue", ("model",), registry=self._registry)

    @contextmanager
    def request(self, route: str, key: str) -> Iterator[Measured]:
        """Measure a request."""
        measured, began = Measured(), time.monotonic()
        self._running.inc()
        try:
            yield measured
        except Exception as error:
            measured.status = error_answer(error)[0]
            raise
        finally:
            self._running.dec()
            model = self._label(measured)
            status = str(measured.status or "cancelled")
            self._requests.labels(model, route, key, status).inc()
            self._seconds.labels(model).observe(time.monotonic() - began)

    def _label(self, measured: Measured) -> str:
        """Return the model's name if it may be one that is served."""
        model = measured.model
        if measured.status in REFUSED or not model.isprintable() or len(model) > LONGEST_NAME:
            return OTHER
        if len(self._models) < MOST_MODELS:
            self._models.add(model)
        return model if model in self._models else OTHER

    def page(self, rows: list[Any]) -> bytes:
        """Return the text that Prometheus reads.

        Args:
            rows: the state of each model, a `ModelRow`.
        """
        for gauge, values in (
            (self._slots, {row.model: row.slots for row in rows}),
            (self._waiting, {row.model: row.waiting for row in rows}),
        ):
            gauge.clear()
            for model, value in values.items():
                gauge.labels(model).set(value)
        return generate_latest(self._registry)
