"""Reads the output of tasks directly from their hosts. The Controller only says where they run."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.host.output.log_files import LogPiece
from iris_ray.actors.host.output.log_reader import (
    IDLE_S,
    READ_TIMEOUT_S,
    LogQuestion,
    LogReader,
    start_log_reader,
    with_piece,
)
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.actors.protocol.task_log import MOST_LOGS, LogPlace, LogPosition, TaskLog
from iris_ray.client.connection import this_connection

PLACES_S = 1.0
"""Seconds for which the Controller's answer where a task runs is used."""

Host = tuple[str, str]
"""Node id and address."""


class HostLogs:
    """A `LogSource` that asks the Controller about jobs and the hosts about output.

    One question to each host reads all its tasks. For output that no host has any more, the Controller is asked: it
    remembers the last lines.
    """

    def __init__(self, controller: ControllerConnection) -> None:
        self._controller = controller
        self._connection = this_connection()
        self._readers: dict[Host, ActorHandle] = {}
        self._used_at: dict[Host, float] = {}
        self._places: dict[tuple[str, int, int | None], tuple[float, LogPlace]] = {}

    def job_status(self, job_id: str) -> JobStatus:
        return self._controller.ask(ControllerInterface.job_status, job_id)

    def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        return self._controller.ask(ControllerInterface.fetch_task_logs, job_id, task_index, at, max_bytes)

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Return a piece of the output of several tasks of a job, by task index."""
        places = self._locate(job_id, wanted)
        found = {index: place.log for index, place in places.items() if place.log.attempt == 0}
        for index, piece in self._read(places, wanted, max_bytes):
            found[index] = with_piece(places[index].log, wanted[index], piece)
        self._end_idle()
        left = iter([(index, at) for index, at in wanted.items() if index in places and index not in found])
        while some := dict(islice(left, MOST_LOGS)):
            found |= self._controller.ask(ControllerInterface.fetch_logs, job_id, some, max_bytes)
        return found

    def close(self) -> None:
        """End all readers."""
        for host in list(self._readers):
            self._end(host)

    def _locate(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        """Return where the tasks run. The Controller is asked about those whose place is older than `PLACES_S`."""
        good_since = time.monotonic() - PLACES_S
        known = {index: self._places.get((job_id, index, at.attempt), (0.0, None)) for index, at in wanted.items()}
        stale = {index: wanted[index] for index, (asked_at, _) in known.items() if asked_at < good_since}
        if stale:
            now = time.monotonic()
            for index, place in self._controller.ask(ControllerInterface.locate_logs, job_id, stale).items():
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
            of_host = [_question(places[index].log, wanted[index], max_bytes) for index in indexes]
            asked[host] = Actor[LogReader](self._reader(host)).call(LogReader.read, of_host)
        deadline = time.monotonic() + READ_TIMEOUT_S
        for host, call in asked.items():
            try:
                pieces = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except RayError:  # the host is gone, or silent
                self._end(host)
            else:
                yield from zip(by_host[host], pieces, strict=True)

    def _reader(self, host: Host) -> ActorHandle:
        self._used_at[host] = time.monotonic()
        if host not in self._readers:
            self._readers[host] = start_log_reader(*host)
        return self._readers[host]

    def _end_idle(self) -> None:
        for host in [host for host in self._readers if time.monotonic() - self._used_at[host] > IDLE_S]:
            self._end(host)

    def _end(self, host: Host) -> None:
        reader = self._readers.pop(host)
        if this_connection() == self._connection:  # without a connection Ray would start a cluster on this machine
            ray.kill(reader)


@contextmanager
def host_logs(controller: ControllerConnection) -> Iterator[HostLogs]:
    """Yield a `HostLogs`, and end its readers afterwards."""
    logs = HostLogs(controller)
    try:
        yield logs
    finally:
        logs.close()


def _question(log: TaskLog, at: LogPosition, max_bytes: int) -> LogQuestion:
    return LogQuestion(log.job_id, log.task_index, log.attempt, max(at.offset, 0), max_bytes, at.tail_lines)
