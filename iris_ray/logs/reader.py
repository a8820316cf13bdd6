"""The actor that reads the logs of one host, for the Controller or for a client that follows a job.

The job's own actors may be gone, so the process that asks starts a reader. That takes a second or two.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ray
from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.host.directories import host_directory
from iris_ray.logs.core import LogPosition, TaskLog
from iris_ray.logs.files import AttemptLog, LogPiece, logs_directory
from iris_ray.logs.search import FoundLines, LogSearch, search
from iris_ray.model.lifecycle import TaskAttemptId

READ_TIMEOUT_S = 20.0
"""The time limit for a reader to start and to answer."""
SEARCH_TIMEOUT_S = 120.0
"""The time limit for a reader to start and to search all logs of a job on its host, 100 MB a second or more."""
IDLE_S = 60.0
"""The idle time after which a reader is ended."""


Host = tuple[str, str]
"""Node id and address."""


class LogQuestion(NamedTuple):
    """Asks for at most ``limit`` bytes of an attempt's output; for the other fields, see `LogPosition`."""

    job_id: str
    task_index: int
    attempt: int
    offset: int
    limit: int
    tail_lines: int | None = None
    since: float | None = None
    with_times: bool = False

    @staticmethod
    def at(log: TaskLog, at: LogPosition, limit: int) -> "LogQuestion":
        """Return the question for a piece of at most ``limit`` bytes at a position in a log."""
        return LogQuestion(*log.log_id, max(at.offset, 0), limit, at.tail_lines, at.since, at.with_times)


class LogReader:
    """Reads the logs of its host."""

    def __init__(self) -> None:
        self._root = logs_directory(host_directory())

    def read(self, questions: Sequence[LogQuestion]) -> list[LogPiece | None]:
        """Return a piece of each attempt's output; None for an attempt without files here."""
        return [piece_in(self._root, question) for question in questions]

    def search(self, ids: Sequence[TaskAttemptId], wanted: LogSearch) -> list[FoundLines | None]:
        """Return the lines that match of each attempt's output; None for an attempt without files here.

        Whatever else wants a core or a disk of this host goes first.
        """
        with ThreadPoolExecutor(1, initializer=_yield_to_all) as its_own:
            return its_own.submit(self._search, ids, wanted).result()

    def _search(self, ids: Sequence[TaskAttemptId], wanted: LogSearch) -> list[FoundLines | None]:
        found, left = list[FoundLines | None](), wanted.most_bytes
        for one in ids:
            found.append(search(AttemptLog(self._root, *one), wanted, left))
            left = max(0, left - (found[-1].size if found[-1] is not None else 0))
        return found


def _yield_to_all() -> None:
    """Let tasks go before this thread, on the cores and on the disks.

    Tasks have the priority of Ray's processes, which is 15 as a rule, and this thread then has the lowest, 19. Where
    they have 0, as an operator may set it, it has 10 and still gets a tenth of a busy core. With 19, or with
    `os.SCHED_IDLE`, its search would end without an answer.
    """
    os.nice(10)  # more than before; on Linux, of the calling thread only


def piece_in(root: Path, asked: LogQuestion) -> LogPiece | None:
    """Return a piece of an attempt's output; None if a directory of logs has no files of it."""
    log = AttemptLog(root, asked.job_id, asked.task_index, asked.attempt)
    if asked.tail_lines is not None:
        piece = log.tail(asked.tail_lines, asked.limit)
    else:
        since = 0 if asked.since is None else log.offset_since(asked.since)
        piece = log.read(max(asked.offset, since), asked.limit)
    return replace(piece, times=log.times(piece)) if asked.with_times and piece is not None else piece


_LogReader = ray.remote(LogReader)


def start_log_reader(node_id: str, address: str) -> ActorHandle:
    """Start a reader on a host, and return at once. It ends with the calling process at the latest."""
    handle: ActorHandle = _LogReader.options(**on_host(node_id, address), max_concurrency=8).remote()
    return handle


class LogReaders:
    """The readers that this process has started, one for each host.

    Args:
        may_end: whether this process is still in the cluster in which it has started them.
    """

    def __init__(self, may_end: Callable[[], bool] = lambda: True) -> None:
        self._may_end = may_end
        self._readers: dict[Host, Actor[LogReader]] = {}
        self._asked_at: dict[Host, float] = {}

    def on(self, host: Host) -> Actor[LogReader]:
        """Return the reader on a host, to be asked now. Start it if there is none."""
        self._asked_at[host] = time.monotonic()
        if host not in self._readers:
            self._readers[host] = Actor[LogReader](start_log_reader(*host), f"the reader on its host ({host[1]})")
        return self._readers[host]

    def end(self, host: Host, reader: Actor[LogReader] | None = None) -> None:
        """End the reader on a host; if one is given, only that one, and not its successor."""
        if reader in (None, self._readers.get(host)):
            if self._may_end():
                ray.kill(self._readers[host].handle)
            del self._readers[host], self._asked_at[host]

    def end_idle(self) -> bool:
        """End the readers that were not asked for `IDLE_S`. Return whether no reader is left."""
        idle_since = time.monotonic() - IDLE_S
        for host in [host for host, asked_at in self._asked_at.items() if asked_at < idle_since]:
            self.end(host)
        return not self._readers

    def end_all(self) -> None:
        for host in list(self._readers):
            self.end(host)


def with_piece(log: TaskLog, at: LogPosition, piece: LogPiece | None) -> TaskLog:
    """Return a log with the piece that its host has read; the piece is None if the host has no files of it."""
    if piece is None:
        said = "its host has no log of it: it never started, or its log was deleted" if log.finished else None
        return replace(log, from_host=True, note=said)
    lost = piece.offset - at.offset if at.tail_lines is None and at.since is None else 0
    note = f"the {lost} bytes before were deleted on its host: only the newest are kept" if lost > 0 else None
    return replace(
        log, offset=piece.offset, data=piece.data, end=piece.end, from_host=True, note=note, times=piece.times
    )
