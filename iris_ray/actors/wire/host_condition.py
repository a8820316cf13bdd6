"""How a host stands, in one word."""

from collections.abc import Callable
from enum import Enum

from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.ids import job_of
from iris_ray.state.quarantine import QUARANTINE


class HostCondition(Enum):
    """How a host stands, the most telling first."""

    LOST = "lost"
    SUSPECTED = "suspected"
    DRAINING = "draining"
    SPARE = "spare"
    BUSY = "busy"
    QUARANTINED = "quarantined"
    CLOSED = "closed"
    ELSEWHERE = "elsewhere"
    UNUSABLE = "unusable"
    WARM = "warm"
    FREE = "free"


def condition_of(host: WorkerStatus, is_spare: Callable[[str], bool]) -> HostCondition:
    """Return how a live host stands.

    Args:
        host: which.
        is_spare: whether a job, by its id, only holds slices ready for another one.
    """
    taints = {name.removeprefix(TAINT_PREFIX) for name in host.attributes if name.startswith(TAINT_PREFIX)}
    found = (
        (HostCondition.SUSPECTED, host.suspected),
        (HostCondition.DRAINING, host.draining),
        (HostCondition.SPARE, host.tasks and all(is_spare(job_of(task)) for task in host.tasks)),
        (HostCondition.BUSY, host.tasks),
        (HostCondition.QUARANTINED, QUARANTINE in taints),
        (HostCondition.CLOSED, taints),
        (HostCondition.ELSEWHERE, host.foreign),
        (HostCondition.UNUSABLE, host.unavailable),
        (HostCondition.WARM, host.holder),
    )
    return next((condition for condition, holds in found if holds), HostCondition.FREE)
