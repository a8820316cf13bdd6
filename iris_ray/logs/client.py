"""Reads the output of tasks directly from their hosts. The Controller only says where they run."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import ray
from ray.exceptions import RayError

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.client.connection import this_connection
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import MOST_LOGS, LogPlace, LogPosition, TaskLog
from iris_ray.logs.files import LogPiece
from iris_ray.logs.reader import (
    READ_TIMEOUT_S,
    SEARCH_TIMEOUT_S,
    Host,
    LogQuestion,
    LogReader,
    LogReaders,
    with_piece,
)
from iris_ray.logs.search import FoundLines, LogSearch, search_text
from iris_ray.logs.stream import print_logs
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.terminal import live_line

PLACES_S = 1.0
"""Seconds for which the Controller's answer where a task runs is used."""

ATTEMPTS_SEARCHED = 10
"""The limit for the attempts of a task that a search looks at: the latest ones."""
LAST_BYTES, MOST_LINES = 1 << 20, 1 << 20
"""The limits for the search in an attempt whose host is gone: bytes and lines."""


@dataclass(frozen=True, slots=True)
class SearchedLog:
    """What a search has found in the output of one attempt.

    Attributes:
        log: the task and its attempt.
        found: the lines; None if its log was deleted.
        note: why not all of its output was searched, or None.
    """

    log: TaskLog
    found: FoundLines | None
    note: str | None = None


class HostLogs:
    """A `LogSource` that asks the Controller about jobs and the hosts about output.

    One question to each host reads all its tasks. For output that no host has any more, the Controller is asked: it
    remembers the last lines.
    """

    def __init__(self, controller: ControllerConnection) -> None:
        self._controller = controller
        connection = this_connection()  # without it Ray would start a cluster on this machine
        self._readers = LogReaders(lambda: this_connection() == connection)
        self._places: dict[tuple[str, int, int | None], tuple[float, LogPlace]] = {}

    def job_status(self, job_id: str) -> JobStatus:
        return self._controller.ask(ControllerInterface.job_status, job_id)

    def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        return self._controller.ask(LogCalls.fetch_task_logs, job_id, task_index, at, max_bytes)

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Return a piece of the output of several tasks of a job, by task index."""
        places = self._locate(job_id, wanted)
        found = {index: place.log for index, place in places.items() if place.log.attempt == 0}
        for index, piece in self._read(places, wanted, max_bytes):
            found[index] = with_piece(places[index].log, wanted[index], piece)
        self._readers.end_idle()
        left = iter([(index, at) for index, at in wanted.items() if index in places and index not in found])
        while some := dict(islice(left, MOST_LOGS)):
            found |= self._controller.ask(LogCalls.fetch_logs, job_id, some, max_bytes)
        return found

    def search(self, job_id: str, tasks: Sequence[int], attempt: int | None, wanted: LogSearch) -> list[SearchedLog]:
        """Search the output of tasks on their hosts, all at once. Only what is found travels.

        Of what no host has any more, the last lines are searched that the Controller remembers.

        Args:
            job_id: the job.
            tasks: the indexes of its tasks.
            attempt: only this one; None: the latest `ATTEMPTS_SEARCHED` of each task.
            wanted: what is searched for.
        """
        places, found = self.places(job_id, tasks, attempt), dict[TaskAttemptId, SearchedLog]()
        by_host: dict[Host, list[TaskAttemptId]] = defaultdict(list)
        for one, place in places.items():
            if place.host is not None:
                by_host[place.host].append(one)
            else:
                found[one] = SearchedLog(place.log, search_text(place.log.data, wanted), place.log.note)
        asked = {host: self._readers.on(host).call(LogReader.search, ids, wanted) for host, ids in by_host.items()}
        deadline = time.monotonic() + SEARCH_TIMEOUT_S
        for host, call in asked.items():
            try:
                answers = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except RayError:  # the host is gone, or silent, or the pattern takes for ever
                self._readers.end(host)
                answers = [None] * len(by_host[host])
                why: str | None = f"its host has not answered within {SEARCH_TIMEOUT_S:g} s"
            else:
                why = None
            for one, lines in zip(by_host[host], answers, strict=True):
                found[one] = SearchedLog(places[one].log, lines, why)
        return [found[one] for one in sorted(found)]

    def places(self, job_id: str, tasks: Sequence[int], attempt: int | None) -> dict[TaskAttemptId, LogPlace]:
        """Return where the attempts of tasks ran; with their last lines those whose host is gone."""
        latest = self._places_now(job_id, {index: LogPosition(attempt) for index in tasks})
        found = {log_id: place for log_id, place in latest.items() if place.log.attempt}
        for back in range(1, ATTEMPTS_SEARCHED if attempt is None else 0):
            numbers = {place.log.task_index: place.log.latest_attempt - back for place in latest.values()}
            found |= self._places_now(job_id, {index: LogPosition(n) for index, n in numbers.items() if n > 0})
        return found

    def _places_now(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[TaskAttemptId, LogPlace]:
        places: dict[int, LogPlace] = {}
        left = iter(wanted.items())
        while some := dict(islice(left, MOST_LOGS)):
            places |= self._controller.ask(LogCalls.locate_logs, job_id, some)
        lost = [index for index, place in places.items() if place.host is None and place.log.attempt]
        for index in lost:  # this looks for its host, and in the archive
            at = LogPosition(places[index].log.attempt, tail_lines=MOST_LINES)
            last = self.fetch_task_logs(job_id, index, at, LAST_BYTES)
            (again,) = self._controller.ask(LogCalls.locate_logs, job_id, {index: at}).values()
            places[index] = again if again.host is not None else LogPlace(last, None)
        return {place.log.log_id: place for place in places.values()}

    def close(self) -> None:
        """End all readers."""
        self._readers.end_all()

    def _locate(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        """Return where the tasks run. The Controller is asked about those whose place is older than `PLACES_S`."""
        good_since = time.monotonic() - PLACES_S
        known = {index: self._places.get((job_id, index, at.attempt), (0.0, None)) for index, at in wanted.items()}
        stale = {index: wanted[index] for index, (asked_at, _) in known.items() if asked_at < good_since}
        if stale:
            now = time.monotonic()
            for index, place in self._controller.ask(LogCalls.locate_logs, job_id, stale).items():
                known[index] = self._places[job_id, index, wanted[index].attempt] = now, place
        return {index: place for index, (_, place) in known.items() if place is not None}

    def _read(
        self, places: Mapping[int, LogPlace], wanted: Mapping[int, LogPosition], max_bytes: int
    ) -> Iterator[tuple[int, LogPiece | None]]:
        """Yield the output that the hosts have, by task index. All hosts are asked at once; some may not answer."""
        by_host: dict[Host, list[int]] = defaultdict(list)
        for index, place in places.items():
            if place.host is not None:
                by_host[place.host].append(index)
        asked = {}
        for host, indexes in by_host.items():
            of_host = [LogQuestion.at(places[index].log, wanted[index], max_bytes) for index in indexes]
            asked[host] = self._readers.on(host).call(LogReader.read, of_host)
        deadline = time.monotonic() + READ_TIMEOUT_S
        for host, call in asked.items():
            try:
                pieces = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except RayError:  # the host is gone, or silent
                self._readers.end(host)
            else:
                yield from zip(by_host[host], pieces, strict=True)


@contextmanager
def host_logs(controller: ControllerConnection) -> Iterator[HostLogs]:
    """Yield a `HostLogs`, and end its readers afterwards."""
    logs = HostLogs(controller)
    try:
        yield logs
    finally:
        logs.close()


def print_logs_of(job_id: str, task_index: int | None) -> None:
    """Print the output of one task of a job, or with None of all its tasks, until the job ends."""
    with host_logs(ControllerConnection(patience_s=math.inf)) as logs, live_line(job_id) as line:
        print_logs(logs, job_id, task_index, line)
