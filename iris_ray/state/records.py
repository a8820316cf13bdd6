"""Records: one per job, from which a restarted Controller rebuilds its state.

A record is written before any action follows from it, so everything that was acknowledged is recorded.

The record of a job with up to `GANGS_PER_CHUNK` gangs is a single value. A larger job has a head, with the data of the
whole job, and its gangs in chunks. A change rewrites only the head and the chunks with changed gangs, so its cost does
not depend on the size of the job.

All values of one point in time are written in one step. Values that derive from the gangs (counts, charges, the queue)
are recomputed. A job with a missing chunk is left out, and chunks without a head are ignored.
"""

import pickle
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from iris_ray.errors import CorruptRecordError, UnknownRecordError
from iris_ray.model.job_spec import FIELDS_OF_A_JOB
from iris_ray.model.jobs import Allocation, Gang, Job, Task
from iris_ray.model.lifecycle import AttemptId

RECORD_VERSION = 19
"""Increase this whenever the fields or the module of a class inside a record change; a test compares them with lists.
The header itself has a checksum of the fields of a `JobSpec`."""

GANGS_PER_CHUNK = 256

_ANY_HEADER = b"iris_ray job record "
HEADER = _ANY_HEADER + b"%d, specs %08x" % (RECORD_VERSION, zlib.crc32(" ".join(FIELDS_OF_A_JOB).encode()))
"""The first line of every value."""
_OVER = b", over"
"""Follows the header in the record of a job that has ended and holds nothing, so that every version can tell."""

# Records contain values without names and classes, which is faster and shorter.
_FROM_GANGS = {
    "kind",
    "members",
    "requirement",
    "gangs",
    "counts",
    "pending",
    "attempt",
    "requeues",
    "failures",
    "preemptions",
    "evictions",
}
_JOB = [field.name for field in fields(Job) if field.name not in _FROM_GANGS]
_values_of_job = attrgetter(*_JOB)
_values_of_gang = attrgetter(*(field.name for field in fields(Gang)[1:]))  # the fields after its tasks
_values_of_task = attrgetter(*(field.name for field in fields(Task)))


def chunk_of(position: int) -> int:
    """Return the number of the chunk with the gang at a position of a large job."""
    return position // GANGS_PER_CHUNK


def is_large(job: Job) -> bool:
    """Return whether the gangs of a job are recorded in chunks."""
    return len(job.gangs) > GANGS_PER_CHUNK


def chunks_in(job: Job) -> range:
    """Return the numbers of all chunks of a job's record; none for a small job."""
    return range(chunk_of(len(job.gangs) - 1) + 1 if is_large(job) else 0)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job with the resources that its attempts hold."""

    job: Job
    allocations: Mapping[AttemptId, Allocation]

    def to_bytes(self) -> bytes:
        """Return the whole record as one value: a few hundred bytes, plus some ten for each task."""
        return self._head(*self._part(self.job.gangs, self.allocations))

    def head(self) -> bytes:
        """Return the head: for a small job the whole record, for a large one the part without gangs."""
        return self._head([], []) if is_large(self.job) else self.to_bytes()

    def _head(self, gangs: list[Any], allocations: list[Any]) -> bytes:
        is_over = self.job.over is not None and not self.allocations
        return _packed((_values_of_job(self.job), gangs, allocations), _OVER if is_over else b"")

    def chunks(self, numbers: Iterable[int]) -> Iterator[tuple[int, bytes | None]]:
        """Yield the chunks of these numbers, with None for a chunk that the record does not have."""
        held: dict[int, dict[AttemptId, Allocation]] = {number: {} for number in numbers}
        for attempt, allocation in self.allocations.items() if held else ():
            if (in_chunk := held.get(attempt.gang // GANGS_PER_CHUNK)) is not None:
                in_chunk[attempt] = allocation
        for number in held:
            gangs = self.job.gangs[number * GANGS_PER_CHUNK : (number + 1) * GANGS_PER_CHUNK]
            there = number in chunks_in(self.job)
            yield number, _packed(self._part(gangs, held[number])) if there else None

    @staticmethod
    def joined(head: bytes, chunks: Iterable[bytes] = ()) -> "JobRecord":
        """Restore a record from the output of `head` and `chunks`, with the chunks in the order of their numbers.

        Raises:
            UnknownRecordError: another version of iris_ray wrote the record.
            CorruptRecordError: the header is damaged. Other damage can raise any exception.
        """
        values, gangs, allocations = _unpacked(head)
        for chunk in chunks:
            more_gangs, more_allocations = _unpacked(chunk)
            gangs += more_gangs
            allocations += more_allocations
        job = _job(dict(zip(_JOB, values, strict=True)), [_gang(*values) for values in gangs])
        return JobRecord(job, {AttemptId(job.spec.job_id, *attempt): held for *attempt, held in allocations})

    def _part(self, gangs: Iterable[Gang], allocations: Mapping[AttemptId, Allocation]) -> tuple[list[Any], list[Any]]:
        values = [(list(map(_values_of_task, gang.tasks)), *_values_of_gang(gang)) for gang in gangs]
        return values, [(*attempt[1:], allocation) for attempt, allocation in allocations.items()]


def may_be_forgotten(head: bytes) -> bool:
    """Return whether another version wrote a record, and its job has ended and holds nothing; ``head`` is its head."""
    header = head.partition(b"\n")[0]
    version = header.removesuffix(_OVER)
    return header.startswith(_ANY_HEADER) and HEADER != version != header


def _packed(values: object, mark: bytes = b"") -> bytes:
    return HEADER + mark + b"\n" + zlib.compress(pickle.dumps(values), 1)


def _unpacked(data: bytes) -> Any:
    header, _, body = data.partition(b"\n")
    if not header.startswith(_ANY_HEADER):
        raise CorruptRecordError(f"a job record begins with {header[:40]!r}: it is damaged")
    if header.removesuffix(_OVER) != HEADER:
        raise UnknownRecordError(
            f"the cluster's job records begin with {header[:40]!r}, this version of iris_ray writes {HEADER!r}:"
            " use the version that wrote them until its jobs have ended; or, with that version, `iris-ray cluster"
            " controller export FILE`, and import the file on a new head with this one"
        )
    return pickle.loads(zlib.decompress(body))


def _gang(tasks: list[tuple[Any, ...]], *values: Any) -> Gang:
    return Gang([Task(*task) for task in tasks], *values)


def _job(values: dict[str, Any], gangs: list[Gang]) -> Job:
    waiting = sorted((gang for gang in gangs if gang.pending), key=lambda gang: (gang.requeued, gang.position))
    return Job(
        **values,
        requirement=values["spec"].requirement,  # so that equal requirements are the same object
        gangs=gangs,
        counts=Counter(task.state for gang in gangs for task in gang.tasks),
        pending=dict.fromkeys(gang.position for gang in waiting),
        attempt=max((gang.attempt for gang in gangs), default=0),
        requeues=max((gang.requeued for gang in gangs), default=0),
        failures=sum(gang.failures for gang in gangs),
        preemptions=sum(gang.preemptions for gang in gangs),
        evictions=sum(gang.evictions for gang in gangs),
    )


# -- check -------------------------------------------------------------------------------------------------------------

_all_of_job = attrgetter(*(field.name for field in fields(Job)))


def require_whole(record: Any, job_id: str) -> JobRecord:
    """Return an unpickled value if it is a complete record of this job.

    Raises:
        CorruptRecordError: a part is missing, or the parts are inconsistent.
    """
    try:
        problem = _problem_of(record, job_id)
    except Exception as error:  # a field is missing, or of another type
        raise CorruptRecordError(f"the record of {job_id} is damaged: {type(error).__name__}: {error}") from error
    if problem is not None:
        raise CorruptRecordError(f"the record of {job_id} is damaged: {problem}")
    found: JobRecord = record
    return found


def _problem_of(record: Any, job_id: str) -> str | None:
    if not isinstance(record, JobRecord):
        return f"it is a {type(record).__name__}"
    job = record.job
    _all_of_job(job)
    for gang in job.gangs:
        _values_of_gang(gang)
        for task in gang.tasks:
            _values_of_task(task)
    if job.spec.job_id != job_id:
        return f"it is that of {job.spec.job_id}"
    sizes = {len(gang.tasks) for gang in job.gangs}
    if (
        len(job.gangs) != job.spec.num_gangs
        or len(sizes) != 1
        or [task.index for task in job.tasks] != list(range(len(job.tasks)))
    ):
        return "some of its tasks are missing"
    if job.counts != Counter(task.state for task in job.tasks):
        return "its counts are not those of its tasks"
    if job.state.finished and any(gang.placed or gang.pending for gang in job.gangs):
        return "it is over, and some of its tasks are not"
    return _problem_of_allocations(record)


def _problem_of_allocations(record: JobRecord) -> str | None:
    for attempt, allocation in record.allocations.items():
        if attempt.job_id != record.job.spec.job_id or not 0 <= attempt.gang < len(record.job.gangs):
            return f"{attempt} is not one of its attempts"
        for node_id, task_id, demand in allocation:
            if not isinstance(node_id, str) or not isinstance(task_id, str) or not sum(demand.values(), 0.0) >= 0:
                return f"{attempt} holds amounts or names of the wrong type"
    return None
