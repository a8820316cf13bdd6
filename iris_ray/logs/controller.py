"""The Controller's access to task logs: on the hosts, through a small actor there, or last lines in its own memory.

Clients that follow a job only ask where the logs are, and read them on the hosts themselves.
"""

import asyncio
import heapq
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from iris_ray.actors.calls.asking import answer
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder, PoolProcess
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LAST_BYTES, MOST_LOGS, LastLines, LogPlace, LogPosition, TaskLog
from iris_ray.logs.files import LogPiece
from iris_ray.logs.reader import (
    IDLE_S,
    READ_TIMEOUT_S,
    LogQuestion,
    LogReader,
    LogReaders,
    piece_in,
    with_piece,
)
from iris_ray.model.checks import unknown_number
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId, TaskAttemptId
from iris_ray.settings import LOG_ARCHIVE
from iris_ray.state import ControllerState

MOST_BYTES = 4 << 20
"""The limit for all pieces of logs in one answer."""
MOST_ID_CHARACTERS = 100
"""The limit for the id of a node; Ray's have 56."""
MOST_ASKED = 32
"""The limit for the hosts that are asked for the files of an attempt whose host is unknown."""
SEARCHES_AT_ONCE = 2
"""The limit for such searches at a time."""
SEARCH_S = 2 * READ_TIMEOUT_S
"""The limit for a search with the wait for its turn: others may look for many attempts whose hosts don't answer."""
NOT_PLACED = "it has not been placed on a host yet"


class LogsInController(ControllerPart):
    """Remembers each attempt's host and last lines, and reads the rest on the hosts. See `LogCalls`."""

    calls = (LogCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state = controller.state
        self._memory = LogMemory()
        self._readers = LogReaders()
        self._searches = asyncio.Semaphore(SEARCHES_AT_ONCE)
        self._background = BackgroundTasks()
        self._sweeper: asyncio.Task[None] | None = None

    async def happened(self, events: list[Happening]) -> None:
        """Note the hosts on which attempts are about to run."""
        for order in events:
            if isinstance(order, AttemptOrder) and order.spare_for is None:
                hosts = [host for hosts in order.slices for host in hosts for _ in range(order.processes_per_host)]
                for index, host in enumerate(hosts, order.first_task * order.processes_per_host):
                    key = TaskAttemptId(order.attempt.job_id, index, order.attempt.number)
                    self._memory.placed(key, host.node_id)
        self._memory.forget_all_but(self._state.jobs)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        """Return a piece of the log from the attempt's host or, if that does not answer, from the archive or memory."""
        found = find_attempt_log(self._state, self.controller.job(job_id), task_index, at.attempt)
        log, key = found.log, found.log.log_id
        if log.attempt == 0:
            return replace(log, note=NOT_PLACED)
        node_id = found.node_id or self._memory.node_of(key) or await self._find(key, found.job)
        limit = min(max(max_bytes, 1), MOST_BYTES)
        question = LogQuestion.at(log, at, limit)
        if node_id is None:
            why = "the Controller was restarted and does not find the host that it ran on"
            return await self._without_host(log, at, question, why)
        worker = self._state.workers.get(node_id)
        if worker is None:
            return await self._without_host(log, at, question, "its host is gone")
        piece = await self._read(node_id, worker.address, question)
        if isinstance(piece, Unreachable):
            return await self._without_host(log, at, question, piece.reason)
        return with_piece(log, at, piece)

    async def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        there = self._existing(self.controller.job(job_id), wanted)
        share = min(max_bytes, MOST_BYTES // max(1, len(there)))
        calls = (self.fetch_task_logs(job_id, index, at, share) for index, at in there.items())
        return dict(zip(there, await asyncio.gather(*calls), strict=True))

    async def locate_logs(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        job = self.controller.job(job_id)
        return {index: self._place(job, index, at.attempt) for index, at in self._existing(job, wanted).items()}

    async def note_last_lines(self, batch: list[LastLines], sender: PoolProcess) -> None:
        for job_id in {last.job_id for last in batch}:
            self.controller.permissions.require_pools_own(sender.owner, job_id)
        for last in batch:
            if self._is_possible(last):
                self._memory.remember(last)

    def _is_possible(self, last: LastLines) -> bool:
        """Return whether these may be the last lines of a task. A pool, which is a user's, may say anything."""
        job = self._state.jobs.get(last.job_id)
        if job is None or last.task_index not in range(job.num_processes):
            return False
        latest = job.gang_of(job.task_of(last.task_index).index).attempt
        fits = len(last.data) <= LAST_BYTES and len(last.node_id) <= MOST_ID_CHARACTERS
        return 0 < last.attempt <= latest and fits

    @staticmethod
    def _existing(job: Job, wanted: Mapping[int, LogPosition]) -> dict[int, LogPosition]:
        """Return the first `MOST_LOGS` of the tasks that exist."""
        there = ((index, at) for index, at in wanted.items() if 0 <= index < job.num_processes)
        return dict(islice(there, MOST_LOGS))

    def _place(self, job: Job, task_index: int, attempt: int | None) -> LogPlace:
        """Return the host of an attempt's log, if it is known."""
        found = find_attempt_log(self._state, job, task_index, attempt)
        log = found.log
        if log.attempt == 0:
            return LogPlace(replace(log, note=NOT_PLACED), None)
        node_id = found.node_id or self._memory.node_of(log.log_id)
        worker = self._state.workers.get(node_id) if node_id else None
        return LogPlace(log, None if worker is None else (worker.node_id, worker.address))

    # -- reading -----------------------------------------------------------------------------------------------------

    async def _without_host(self, log: TaskLog, at: LogPosition, question: LogQuestion, why: str) -> TaskLog:
        if (archive := LOG_ARCHIVE.read()) is not None:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    piece = await asyncio.to_thread(piece_in, archive, question)
            except (OSError, TimeoutError) as error:
                why += f", the archive {archive} can't be read ({error or 'it does not answer'})"
            else:
                if piece is not None:
                    return replace(with_piece(log, at, piece), note=f"{why}; this is from the archive {archive}")
        return self._from_memory(log, at.offset, why)

    def _from_memory(self, log: TaskLog, offset: int, why: str) -> TaskLog:
        last = self._memory.last_lines(log.log_id)
        if last is None:
            return replace(log, offset=offset, end=offset, note=f"{why}, and nothing that it printed came here before")
        start = last.end - len(last.data)
        data = last.data[max(0, offset - start) :]
        note = f"{why}; these are the last lines that came here before"
        return replace(log, offset=last.end - len(data), data=data, end=last.end, note=note)

    async def _find(self, key: TaskAttemptId, job: Job) -> str | None:
        """Ask likely hosts for files of an attempt. Return the host that has them, None after `SEARCH_S`."""
        need = job.requirement
        number = job.task_of(key.task_index).index % need.replicas if need.whole_groups else None
        known = [c for c in need.constraints if not c.orders]
        asked = [one for one in self._state.workers.values() if all(c.matches(one.attributes) for c in known)]
        asked = sorted(asked, key=lambda worker: worker.host_index != number)[:MOST_ASKED]
        try:
            async with asyncio.timeout(SEARCH_S), self._searches:
                reads = (self._read(one.node_id, one.address, LogQuestion(*key, 0, 1)) for one in asked)
                found = await asyncio.gather(*reads)
        except TimeoutError:
            return None
        for worker, piece in zip(asked, found, strict=True):
            if isinstance(piece, LogPiece):
                self._memory.placed(key, worker.node_id)
                return worker.node_id
        return None

    async def _read(self, node_id: str, address: str, question: LogQuestion) -> LogPiece | Unreachable | None:
        host = node_id, address
        reader = self._readers.on(host)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = self._background.repeat(self._end_idle_readers, "ending idle log readers")
        try:
            pieces = await answer(reader.call(LogReader.read, [question]), reader.name, READ_TIMEOUT_S)
        except OSError as error:  # the disk there is faulty
            pieces = Unreachable(f"the log on its host ({address}) can't be read: {error}")
        if isinstance(pieces, Unreachable):
            self._readers.end(host, reader)
            return pieces
        return pieces[0]

    async def _end_idle_readers(self) -> bool:
        """End idle readers. Return whether no reader is left."""
        await asyncio.sleep(IDLE_S / 4)
        return self._readers.end_idle()


@dataclass(frozen=True, slots=True)
class AttemptLog:
    """A log without content yet, its attempt's host if the state knows it, and its job."""

    log: TaskLog
    node_id: str | None
    job: Job


def find_attempt_log(state: ControllerState, job: Job, task_index: int, attempt: int | None) -> AttemptLog:
    """Return the log of a task's attempt. Call this before its log is read: a log read after the end is complete.

    Raises:
        UnknownNameError: there is no such task or attempt.
    """
    job_id = job.spec.job_id
    if task_index not in range(job.num_processes):
        raise unknown_number(f"task of {job_id}", task_index, range(job.num_processes))
    task = job.task_of(task_index)
    gang = job.gang_of(task.index)
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
    return AttemptLog(log, task.node_id if attempt == latest else None, job)


# -- log memory --------------------------------------------------------------------------------------------------------

ATTEMPT_BYTES = 240
"""The memory of an attempt besides its lines: its key, its host, and its share of a dictionary that has room left."""
FEW_JOBS = 32
"""It is not worth a search to forget fewer jobs than this."""
JOB_BYTES = 400
"""The memory of a job besides its attempts."""

_Attempt = tuple[str, int, bytes]
"""Node id, how many bytes the attempt has printed in all, and the last of these bytes."""


@dataclass(slots=True)
class _JobMemory:
    """The attempts of one job's tasks by `_key`, ordered by their latest report."""

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
    """Remembers each attempt's host and last lines, for when the host is gone.

    If the memory is full, the jobs that take most of it forget their oldest attempts. So a job with very many tasks
    does not push out all others.

    Args:
        most_bytes: the limit, including the overhead of Python's objects.

    Attributes:
        held_bytes: the memory that is in use.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._jobs: dict[str, _JobMemory] = {}
        self.held_bytes = 0

    def placed(self, key: TaskAttemptId, node_id: str) -> None:
        """Note the host of a task's attempt."""
        known = self._find(key)
        self._put(key, (sys.intern(node_id), *(known[1:] if known else (0, b""))))

    def remember(self, last: LastLines) -> None:
        """Take the last lines of an attempt. They replace its earlier ones."""
        key = last.log_id
        known = self._find(key)
        if known is None or known[1] <= last.end:  # else this message was overtaken by a later one
            self._put(key, (sys.intern(last.node_id), last.end, last.data))

    def forget_all_but(self, jobs: Collection[str]) -> None:
        """Forget jobs that the Controller has forgotten: nobody can ask for their logs. Some may stay a little longer.

        Args:
            jobs: ids of the jobs that the Controller knows.
        """
        if len(self._jobs) > len(jobs) + max(FEW_JOBS, len(jobs) // 8):
            for job_id in [job_id for job_id in self._jobs if job_id not in jobs]:
                self.held_bytes -= self._jobs.pop(job_id).held_bytes

    def node_of(self, key: TaskAttemptId) -> str | None:
        """Return the host that an attempt ran on."""
        found = self._find(key)
        return found[0] if found else None

    def last_lines(self, key: TaskAttemptId) -> LastLines | None:
        """Return the last lines of an attempt, if it has reported any."""
        found = self._find(key)
        return LastLines(*key, *found) if found and found[1] else None

    def _find(self, key: TaskAttemptId) -> _Attempt | None:
        job = self._jobs.get(key.job_id)
        return job.attempts.get(_key(key)) if job else None

    def _put(self, key: TaskAttemptId, attempt: _Attempt) -> None:
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
        """Forget the oldest attempts of the largest jobs until an eighth of the memory is free, so this is rare."""
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


def _key(key: TaskAttemptId) -> int:
    return key.task_index << 32 | key.attempt
