"""The metrics of the Controller: names, labels and meanings. Ray exports each with ``ray_`` before its name."""

from dataclasses import dataclass
from enum import Enum

WAIT_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)
"""Limits of the buckets of waits in the queue, in seconds."""
START_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)
"""The same of launches and recoveries."""


class Kind(Enum):
    """What a metric counts: what there is now, what there has been in all, or how long things took."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without Ray's prefix.
        kind: what it counts.
        labels: the names of its labels.
        meaning: in words.
        buckets: the limits of a histogram's buckets, in seconds.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

PENDING_JOBS = Metric("iris_pending_jobs", _G, ("band", "tpu_type"), "jobs that wait, or of which tasks wait")
RUNNING_JOBS = Metric("iris_running_jobs", _G, ("band", "tpu_type"), "jobs that have hosts")
ADMISSION_WAIT = Metric(
    "iris_admission_wait_seconds",
    _H,
    ("band", "tpu_type"),
    "in the queue, for each attempt",
    WAIT_S,
)
LAUNCH = Metric("iris_launch_seconds", _H, ("tpu_type",), "from hosts to the first task that runs", START_S)
RECOVERY = Metric(
    "iris_recovery_seconds", _H, ("tpu_type", "cause"), "from an attempt's end to the next one's first task", WAIT_S
)
ATTEMPTS_ENDED = Metric("iris_attempts_ended_total", _C, ("band", "tpu_type", "cause"), "attempts that ended early")
JOBS_FINISHED = Metric("iris_jobs_finished_total", _C, ("band", "tpu_type", "state"), "jobs that ended, by their state")
HOSTS = Metric("iris_hosts", _G, ("tpu_type", "condition"), "hosts by condition")
USER_CHIPS = Metric("iris_user_chips", _G, ("user",), "chips and GPUs that the jobs of a user hold")
USER_CHIP_SECONDS = Metric("iris_user_chip_seconds_total", _C, ("user",), "the same, added up over time")
FINISHED_CHIP_SECONDS = Metric(
    "iris_finished_chip_seconds_total",
    _C,
    ("user", "kind"),
    "chip-seconds of gangs that have ended, by their use",
)

METRICS = (
    PENDING_JOBS,
    RUNNING_JOBS,
    ADMISSION_WAIT,
    LAUNCH,
    RECOVERY,
    ATTEMPTS_ENDED,
    JOBS_FINISHED,
    HOSTS,
    USER_CHIPS,
    USER_CHIP_SECONDS,
    FINISHED_CHIP_SECONDS,
)
