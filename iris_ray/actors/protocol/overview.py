"""The changes of the whole cluster for programs that watch it and ask twice a second, and our data as JSON."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from iris_ray.actors.protocol.status import JobStatus, LimitStatus, WorkerStatus
from iris_ray.model.constraints import AttributeValue, Constraint
from iris_ray.scheduler.pending_reason import PendingReason

QUEUE_SHOWN = 200
"""The number of jobs at the head of the queue that come with their reasons."""


class Position(NamedTuple):
    """The position of a watcher in the changes of a Controller.

    Attributes:
        epoch: of the Controller; 0: none yet.
        fleet, jobs: how many changes of its hosts and of its jobs the watcher has read.
    """

    epoch: int = 0
    fleet: int = 0
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class UserShare:
    """A user's share of the cluster.

    Attributes:
        now: the largest share of any resource that the user's jobs hold, from 0 to 1.
        counted: the same including past usage, as the queue counts it; 1 for the whole cluster during an hour.
        chip_hours: past usage of chips; usage of four hours ago counts half.
    """

    user: str
    now: float
    counted: float
    chip_hours: float


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """One waiting job.

    Attributes:
        why: the reason in a sentence.
        kind: the name of the reason's `PendingKind`.
        since: when it came into the queue; seconds since the epoch.
    """

    job_id: str
    why: str
    kind: str
    since: float


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes since a position.

    Attributes:
        position: the position after these changes.
        begin_anew: whether the asked position is too old, or another Controller's. Then there are no changes: list all
            jobs and hosts, and go on from ``position``.
        more: whether there are further changes; ask again.
        workers: the hosts that have changed, and all hosts that no job can get, since these are few.
        lost: node ids of hosts that are gone.
        jobs: the jobs that have changed, without the reasons why they wait.
        forgotten: ids of jobs that the Controller has forgotten.
        queue: the first `QUEUE_SHOWN` waiting jobs, in the order of the queue.
        waiting: how many jobs wait.
        limits: the limits and the usage of each user.
        shares: of the users who hold resources now or did lately.
        tables: rows of the services' tables, by table and by the row's key.
        failing: the services that are failing now, each with its last error.
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
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    failing: tuple[str, ...] = ()


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
