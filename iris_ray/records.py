"""What outlives the Controller's process: one small record per job, from which the state comes back.

A record is written before anything is done that it speaks of, so whatever was acknowledged is in it.
"""

import pickle
import zlib
from dataclasses import dataclass

from iris_ray.errors import UnknownRecordError
from iris_ray.jobs import JobSpec
from iris_ray.lifecycle import TaskState

RECORD_VERSION = 1
"""To be raised whenever the classes below, or any that they hold, change so that old records can't be read."""

_HEADER = b"iris_ray job record %d\n"


@dataclass(frozen=True, slots=True)
class Lease:
    """What an attempt holds until its end is confirmed.

    Args:
        position: of its gang among those of the job.
        attempt: its number.
        places: (worker id, task id) of every task.
    """

    position: int
    attempt: int
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class GangRecord:
    """The fields of a `Gang`, with nothing of its tasks but their states."""

    states: tuple[TaskState, ...]
    attempt: int
    failures: int
    preemptions: int
    dispatch_failures: int
    not_before: float
    groups: tuple[str, ...]
    started: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The fields of a `Job`, and what its attempts hold."""

    spec: JobSpec
    number: int
    submitted_at: float
    gangs: tuple[GangRecord, ...]
    error: str | None
    leases: tuple[Lease, ...]

    def to_bytes(self) -> bytes:
        return _HEADER % RECORD_VERSION + zlib.compress(pickle.dumps(self), 1)

    @staticmethod
    def from_bytes(data: bytes) -> "JobRecord":
        """The record.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        header, _, body = data.partition(b"\n")
        if header + b"\n" != _HEADER % RECORD_VERSION:
            raise UnknownRecordError(
                f"the cluster's job records begin with {header[:60]!r}, this version of iris_ray writes"
                f" {_HEADER % RECORD_VERSION!r}: use the version that wrote them until its jobs have ended, or remove"
                " the records to start without those jobs"
            )
        record: JobRecord = pickle.loads(zlib.decompress(body))
        return record
