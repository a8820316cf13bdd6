"""What has changed for those who watch the whole cluster: the answer to a question that is asked twice a second."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from iris_ray.actors.protocol.status import JobStatus, LimitStatus, WorkerStatus
from iris_ray.model.constraints import AttributeValue, Constraint
from iris_ray.scheduler.pending_reason import PendingReason

QUEUE_SHOWN = 200
"""So many jobs that wait come with their reasons, the first in the queue."""


class Position(NamedTuple):
    """Up to where somebody has followed a Controller.

    Attributes:
        epoch: which Controller; 0: none yet.
        fleet, jobs: how many changes of its hosts and of its jobs have been read.
    """

    epoch: int = 0
    fleet: int = 0
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class UserShare:
    """What a user has of the cluster.

    Attributes:
        user: who.
        now: the largest part of any resource of the cluster that the user's jobs hold, from 0 to 1.
        counted: the same with what they have held in the past hours, as the queue counts it; 1 for the whole cluster
            during an hour.
        chip_hours: what they have held in the past hours; what was held four hours ago counts half.
    """

    user: str
    now: float
    counted: float
    chip_hours: float


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """One job of the queue.

    Attributes:
        job_id: which.
        why: the reason in a sentence.
        kind: the name of its `PendingKind`.
        since: when it came into the queue; seconds since the epoch.
    """

    job_id: str
    why: str
    kind: str
    since: float


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since a position.

    Attributes:
        position: up to where this goes.
        begin_anew: whether the position is too old, or another Controller's. There are no changes then: list all jobs
            and hosts, and go on from ``position``.
        more: whether there are further changes; ask again.
        workers: the hosts that have changed; and all that no job can get, since they are few.
        lost: node ids of hosts that are gone.
        jobs: the jobs that have changed, without the reasons why they wait.
        forgotten: ids of jobs that are known no more.
        queue: the first `QUEUE_SHOWN` jobs that wait, in their order.
        waiting: how many jobs wait.
        limits: what each user has and may have.
        shares: of the users who hold something, or have lately.
    """

    position: Position
    begin_anew: bool = False
    more: bool = False
    workers: tuple[WorkerStatus, ...] = ()
    lost: tuple[str, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    forgotten: tuple[str, ...] = ()
    queue: tuple[WaitingJob, ...] = ()
    waiting: int = 0
    limits: tuple[LimitStatus, ...] = ()
    shares: tuple[UserShare, ...] = ()


# -- json values -------------------------------------------------------------------------------------------------------
# Our data as JSON knows it.


def as_json(value: Any) -> Any:
    """Return our data as the types of JSON: enums by name, constraints as people write them."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Constraint):
        return str(value)
    if isinstance(value, AttributeValue):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: as_json(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
        return (
            {"sentence": str(value), "summary": value.summary, **found} if isinstance(value, PendingReason) else found
        )
    if isinstance(value, Mapping):
        return {as_json(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(as_json, value))
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value
