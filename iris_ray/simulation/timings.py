"""How long what pools and hosts do takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds.

    Attributes:
        launch: from an order to running tasks, on hosts where the pool has no processes yet.
        warm_launch: the same on slices that the pool keeps warm.
        failed_launch: from an order to the report that the launch failed.
        stop: until no process of a gang is left that is stopped, or has failed.
        exit: the same after success.
        reclaim: until a pool has released a slice that it keeps warm.
        keep_warm: how long a pool keeps the slices that a job left which goes on elsewhere.
    """

    launch: float = 10.0
    warm_launch: float = 0.2
    failed_launch: float = 30.0
    stop: float = 5.0
    exit: float = 1.0
    reclaim: float = 1.0
    keep_warm: float = 60.0
