"""Records: one per job, from which a restarted Controller rebuilds its state.

A record is written before anything follows from it, so everything that was acknowledged is recorded.
"""

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from iris_ray.errors import UnknownRecordError
from iris_ray.model.ids import AttemptId
from iris_ray.model.jobs import Allocation, Job

RECORD_VERSION = 4
"""Raise it whenever the fields of a class inside a record change; a test compares them with a list."""

_HEADER = b"iris_ray job record %d" % RECORD_VERSION


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job, and what its attempts hold."""

    job: Job
    allocations: Mapping[AttemptId, Allocation]

    def to_bytes(self) -> bytes:
        """Return the record as bytes: a few hundred, and some ten for every task."""
        return _HEADER + b"\n" + zlib.compress(pickle.dumps(self), 1)

    @staticmethod
    def from_bytes(data: bytes) -> "JobRecord":
        """Return the record that `to_bytes` wrote.

        Raises:
            UnknownRecordError: another version of iris_ray wrote it.
        """
        header, _, body = data.partition(b"\n")
        if header != _HEADER:
            raise UnknownRecordError(
                f"the cluster's job records begin with {header[:40]!r}, this version of iris_ray writes {_HEADER!r}:"
                " use the version that wrote them until its jobs have ended, or remove the records to go on without"
                " those jobs"
            )
        record: JobRecord = pickle.loads(zlib.decompress(body))
        record.job.requirement = record.job.spec.requirement  # so that equal requirements are the same object
        return record
