"""Where the Controller looks up what a task has printed: on its host, through a small actor there, or in its memory.

Clients that follow a job ask it only where to read, and read on the hosts themselves.
"""

import asyncio
import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import ray
from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Actor, answer
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.host.output.log_files import LogPiece
from iris_ray.actors.host.output.log_reader import (
    IDLE_S,
    READ_TIMEOUT_S,
    LogQuestion,
    LogReader,
    start_log_reader,
    with_piece,
)
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder
from iris_ray.actors.protocol.task_log import LastLines, LogId, LogPlace, LogPosition, TaskLog
from iris_ray.model.checks import unknown_number
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import Worker
from iris_ray.state import ControllerState

# -- log memory --------------------------------------------------------------------------------------------------------
# What the Controller remembers of tasks' output, for when a host is gone.

ATTEMPT_BYTES = 240
"""What an attempt takes besides its lines: its key, where it ran, and its share of a dictionary that has room left."""
JOB_BYTES = 400
"""What a job takes besides its attempts."""

_Attempt = tuple[str, int, bytes]
"""Node id, how many bytes it has printed in all, the last of them."""


@dataclass(slots=True)
class _JobMemory:
    """The attempts of one job's tasks, the one that was heard of last at the end, by `_key`."""

    attempts: dict[int, _Attempt] = field(default_factory=dict)
    held_bytes: int = JOB_BYTES

    def put(self, key: int, attempt: _Attempt) -> None:
        self.forget(key)
        self.attempts[key] = attempt
        self.held_bytes += ATTEMPT_BYTES + len(attempt[2])

    def forget(self, key: int) -> None:
        if (attempt := self.attempts.pop(key, None)) is not None:
            self.held_bytes -= ATTEMPT_BYTES + len(attempt[2])

    def forget_oldest(self) -> None:
        """Forget an eighth of the attempts, at least one."""
        for key in list(islice(self.attempts, len(self.attempts) // 8 + 1)):
            self.forget(key)


class LogMemory:
    """Where attempts of tasks ran, and the last lines of each: what is left when a host is gone. Bounded.

    If there are too many, the jobs that take most of the memory forget their oldest attempts. So a job with very many
    tasks does not make the memory forget all others.

    Args:
        most_bytes: how much memory it may take, the overhead of Python's objects included.

    Attributes:
        held_bytes: how much it takes.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._jobs: dict[str, _JobMemory] = {}
        self.held_bytes = 0

    def placed(self, key: LogId, node_id: str) -> None:
        """Note that an attempt of a task runs there."""
        known = self._find(key)
        self._put(key, (sys.intern(node_id), *(known[1:] if known else (0, b""))))

    def remember(self, last: LastLines) -> None:
        """Take the last lines of an attempt, in place of earlier ones of the same."""
        key = last.log_id
        known = self._find(key)
        if known is None or known[1] <= last.end:  # else the messages have overtaken each other
            self._put(key, (sys.intern(last.node_id), last.end, last.data))

    def node_of(self, key: LogId) -> str | None:
        """Return the host that an attempt ran on."""
        found = self._find(key)
        return found[0] if found else None

    def last_lines(self, key: LogId) -> LastLines | None:
        """Return the last lines of an attempt that came here, if any did."""
        found = self._find(key)
        return LastLines(*key, *found) if found and found[1] else None

    def _find(self, key: LogId) -> _Attempt | None:
        job = self._jobs.get(key.job_id)
        return job.attempts.get(_key(key)) if job else None

    def _put(self, key: LogId, attempt: _Attempt) -> None:
        job = self._jobs.get(key.job_id)
        if job is None:
            job = self._jobs[key.job_id] = _JobMemory()
            self.held_bytes += job.held_bytes
        self.held_bytes -= job.held_bytes
        job.put(_key(key), attempt)
        self.held_bytes += job.held_bytes
        if self.held_bytes > self._most_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Forget what is oldest in the largest jobs, until an eighth is free: so it is rarely done."""
        largest = [(-job.held_bytes, place, job_id) for place, (job_id, job) in enumerate(self._jobs.items())]
        heapq.heapify(largest)
        while self.held_bytes > self._most_bytes // 8 * 7 and largest:
            before, place, job_id = largest[0]
            job = self._jobs[job_id]
            job.forget_oldest()
            if job.attempts:
                heapq.heapreplace(largest, (-job.held_bytes, place, job_id))
                self.held_bytes += before + job.held_bytes
            else:
                heapq.heappop(largest)
                del self._jobs[job_id]
                self.held_bytes += before


def _key(key: LogId) -> int:
    return key.task_index << 32 | key.attempt


# -- log service -------------------------------------------------------------------------------------------------------

MOST_BYTES = 4 << 20
"""Of one answer."""
MOST_ASKED = 32
"""Hosts that are asked for the files of an attempt of which it is not known where it ran."""
SEARCHES_AT_ONCE = 2
"""For such attempts. Each goes through all hosts."""
NOT_PLACED = "it has not been placed on a host yet"


@dataclass(slots=True)
class _LogReader:
    actor: ActorHandle
    busy: int = 0
    used_at: float = 0.0


class LogService:
    """Remembers where attempts ran and what they printed last, and reads the rest on their hosts."""

    def __init__(self) -> None:
        self._memory = LogMemory()
        self._readers: dict[str, _LogReader] = {}
        self._searches = asyncio.Semaphore(SEARCHES_AT_ONCE)
        self._background = BackgroundTasks()
        self._sweeper: asyncio.Task[None] | None = None

    def placed(self, order: AttemptOrder) -> None:
        """Note that an attempt is about to run on these hosts."""
        hosts = [host for hosts in order.slices for host in hosts]
        for index, host in enumerate(hosts, order.attempt.gang):
            self._memory.placed(LogId(order.attempt.job_id, index, order.attempt.number), host.node_id)

    def note(self, batch: Sequence[LastLines]) -> None:
        for last in batch:
            self._memory.remember(last)

    def locate(self, standing: "LogStanding", workers: Mapping[str, Worker]) -> LogPlace:
        """Return where the attempt's log is to be read, as far as that is known."""
        log = standing.log
        if log.attempt == 0:
            return LogPlace(replace(log, note=NOT_PLACED), None)
        node_id = standing.node_id or self._memory.node_of(log.log_id)
        worker = workers.get(node_id) if node_id else None
        return LogPlace(log, None if worker is None else (worker.node_id, worker.address))

    async def fetch(
        self, standing: "LogStanding", workers: Mapping[str, Worker], at: LogPosition, max_bytes: int
    ) -> TaskLog:
        """Return a piece of the log from the attempt's host or, if that can't be had, its last lines."""
        log = standing.log
        if log.attempt == 0:
            return replace(log, note=NOT_PLACED)
        key = log.log_id
        node_id = standing.node_id or self._memory.node_of(key) or await self._find(key, standing.job, workers)
        if node_id is None:
            return self._from_memory(
                log, at.offset, "the Controller was restarted and does not find the host that it ran on"
            )
        worker = workers.get(node_id)
        if worker is None:
            return self._from_memory(log, at.offset, "its host is gone")
        limit = min(max(max_bytes, 1), MOST_BYTES)
        question = LogQuestion(*key, max(at.offset, 0), limit, at.tail_lines)
        piece = await self._read(node_id, worker.address, question)
        if isinstance(piece, Unreachable):
            return self._from_memory(log, at.offset, piece.reason)
        return with_piece(log, at, piece)

    def _from_memory(self, log: TaskLog, offset: int, why: str) -> TaskLog:
        last = self._memory.last_lines(log.log_id)
        if last is None:
            return replace(log, offset=offset, end=offset, note=f"{why}, and nothing that it printed came here before")
        start = last.end - len(last.data)
        data = last.data[max(0, offset - start) :]
        note = f"{why}; these are the last lines that came here before"
        return replace(log, offset=last.end - len(data), data=data, end=last.end, note=note)

    async def _find(self, key: LogId, job: Job, workers: Mapping[str, Worker]) -> str | None:
        """Ask the likely hosts which of them has files of an attempt, and return that host."""
        async with self._searches:
            return await self._ask_hosts(key, job, workers)

    async def _ask_hosts(self, key: LogId, job: Job, workers: Mapping[str, Worker]) -> str | None:
        need = job.requirement
        number = key.task_index % need.replicas if need.whole_groups else None
        known = [c for c in need.constraints if not c.orders]
        asked = [worker for worker in workers.values() if all(c.matches(worker.attributes) for c in known)]
        asked = sorted(asked, key=lambda worker: worker.host_index != number)[:MOST_ASKED]
        found = await asyncio.gather(*(self._read(w.node_id, w.address, LogQuestion(*key, 0, 1)) for w in asked))
        for worker, piece in zip(asked, found, strict=True):
            if isinstance(piece, LogPiece):
                self._memory.placed(key, worker.node_id)
                return worker.node_id
        return None

    async def _read(self, node_id: str, address: str, question: LogQuestion) -> LogPiece | Unreachable | None:
        reader = self._readers.get(node_id)
        if reader is None:
            reader = self._readers[node_id] = _LogReader(start_log_reader(node_id, address))
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = self._background.repeat(self._end_idle_readers, "ending idle log readers")
        reader.busy += 1
        try:
            call = Actor[LogReader](reader.actor).call(LogReader.read, [question])
            pieces: Any = await answer(call, f"the reader on its host ({address})", READ_TIMEOUT_S)
        except OSError as error:  # the disk there is faulty
            pieces = Unreachable(f"the log on its host ({address}) can't be read: {error}")
        finally:
            reader.busy -= 1
            reader.used_at = asyncio.get_running_loop().time()
        if not isinstance(pieces, Unreachable):
            found: LogPiece | None = pieces[0]
            return found
        if self._readers.get(node_id) is reader:
            self._end(node_id)
        return pieces

    async def _end_idle_readers(self) -> bool:
        """End the readers that are idle. Return whether none is left."""
        await asyncio.sleep(IDLE_S / 4)
        now = asyncio.get_running_loop().time()
        idle = [n for n, reader in self._readers.items() if not reader.busy and now - reader.used_at > IDLE_S]
        for node_id in idle:
            self._end(node_id)
        return not self._readers

    def _end(self, node_id: str) -> None:
        ray.kill(self._readers[node_id].actor)
        del self._readers[node_id]


@dataclass(frozen=True, slots=True)
class LogStanding:
    """A log without content yet, and on which host the state says that its attempt runs or ran."""

    log: TaskLog
    node_id: str | None
    job: Job


def log_standing(state: ControllerState, job: Job, task_index: int, attempt: int | None) -> LogStanding:
    """Return how an attempt stands before its log is read. So what is read after its end is all of it.

    Raises:
        UnknownNameError: there is no such task or attempt.
    """
    job_id = job.spec.job_id
    if task_index not in range(job.size):
        raise unknown_number(f"task of {job_id}", task_index, range(job.size))
    gang = job.gang_of(task_index)
    latest = gang.attempt
    if attempt is None:
        attempt = latest
    elif not 0 < attempt <= latest:
        raise unknown_number(f"attempt of {job_id}/task-{task_index}", attempt, range(1, latest + 1))
    over = job.state.finished or attempt < latest
    log = TaskLog(
        job_id=job_id,
        task_index=task_index,
        attempt=attempt,
        finished=over and not state.holds_capacity(AttemptId(job_id, attempt, gang.position)),
        latest_attempt=latest,
        job_finished=job.state.finished,
    )
    return LogStanding(log, job.task(task_index).node_id if attempt == latest else None, job)
