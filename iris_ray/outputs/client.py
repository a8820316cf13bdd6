"""Finds the output directories of a job's tasks, lists and fetches their files directly from the hosts."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.client.connection import current_user
from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.model.checks import unknown_number
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.reader import LIST_S, PIECE_S, START_S, OutputReader, start_output_reader
from iris_ray.outputs.sending import LeftOut, Listing, checked

MAY = "fetch the output files of its tasks"
GONE = "its host is gone, and its files with it"


@dataclass(frozen=True, slots=True)
class FoundOutput:
    """What an attempt has left.

    Attributes:
        attempt: of which task.
        listing: its files; None if its directory is not there, or can't be read now.
        why: why it can't be read now, or None.
    """

    attempt: TaskAttemptId
    listing: Listing | None
    why: str | None = None


class JobOutputs:
    """The output directories of one job. Only the job's user and operators may see them.

    Args:
        controller: the Controller.
        job_id: the job.

    Attributes:
        left_out: what the latest `fetch` has left out.

    Raises:
        UnknownNameError: there is no such job, or the cluster has forgotten it.
        NotPermittedError: it is another user's job, and this user is not an operator.
        ServiceUnavailableError: there is no service ``logs``, which knows where attempts ran.
    """

    def __init__(self, controller: ControllerConnection, job_id: str) -> None:
        controller.ask(ControllerInterface.require_own, job_id, current_user(), MAY)
        job = controller.ask(ControllerInterface.job_status, job_id)
        self._controller, self._job_id = controller, job_id
        self._count = sum(job.tasks.values()) * job.processes_per_host
        self._logs = module_of("logs", "client").host_logs
        self.left_out = LeftOut()

    def find(self, tasks: Sequence[int] | None, attempt: int | None, path: str = "") -> list[FoundOutput]:
        """Return what attempts have left, those that have left nothing included.

        Args:
            tasks: indexes of tasks; None: all.
            attempt: only this one; None: the latest ten of each task.
            path: only what is in this directory of each.

        Raises:
            UnknownNameError: there is no such task or attempt.
            InvalidRequestError: the path leads out of the directory.
        """
        within, hosts = checked(path), self._hosts(tasks, attempt)
        found = {one: FoundOutput(one, None, GONE) for one, host in hosts.items() if host is None}
        by_host: dict[tuple[str, str], list[TaskAttemptId]] = defaultdict(list)
        for one, host in hosts.items():
            if host is not None:
                by_host[host].append(one)
        readers = {host: start_output_reader(*host) for host in by_host}
        try:
            asked = {host: readers[host].call(OutputReader.list_files, by_host[host], within) for host in by_host}
            deadline = time.monotonic() + START_S + LIST_S
            for host, call in asked.items():
                answers, why = _answered(call, host[1], deadline - time.monotonic())
                attempts = by_host[host]
                found |= {
                    one: FoundOutput(one, has, why)
                    for one, has in zip(attempts, answers or [None] * len(attempts), strict=True)
                }
        finally:
            for reader in readers.values():
                ray.kill(reader.handle)
        return [found[one] for one in sorted(found)]

    def fetch(self, task: int, attempt: int | None, path: str = "") -> Iterator[bytes]:
        """Yield a file or directory of an attempt as a tar stream; see `packed`.

        Args:
            task: the task's index.
            attempt: its attempt; None: the latest one that has left files.
            path: relative to the output directory; "": all of it.

        Raises:
            UnknownNameError: there is no such task, attempt, file or directory; or the attempt's host is gone.
            InvalidRequestError: the path leads out of the directory, or the host can't send it.
        """
        self.left_out = LeftOut()
        one = self._chosen(task, attempt)
        host = self._hosts([task], one.attempt)[one]
        where = f"attempt {one.attempt} of task {task} of {self._job_id}"
        if host is None:
            raise UnknownNameError(f"{where} has no output files: {GONE}")
        reader = start_output_reader(*host)
        try:
            reader.call(OutputReader.begin, one, checked(path))
            waiting, limit_s = reader.call(OutputReader.next_piece), START_S + PIECE_S
            while True:
                try:
                    piece = ray.get(waiting, timeout=limit_s)
                except RayTaskError as error:
                    if isinstance(error.cause, FileNotFoundError):
                        raise UnknownNameError(
                            f"{where} has no {path or 'output files'} in its $IRIS_OUTPUT_DIR;"
                            f" iris-ray cp --output {self._job_id}/{task} lists what is there"
                        ) from None
                    raise InvalidRequestError(f"the files of {where} can't be sent: {error.cause}") from None
                except RayError as error:
                    raise InvalidRequestError(
                        f"the files of {where} can't be fetched: its host ({host[1]}) does not answer"
                        f" ({type(error).__name__}); try again"
                    ) from None
                if not piece.data:
                    self.left_out = piece.left_out or LeftOut()
                    return
                waiting, limit_s = reader.call(OutputReader.next_piece), PIECE_S  # while this one is written here
                yield piece.data
        finally:
            ray.kill(reader.handle)

    def _chosen(self, task: int, attempt: int | None) -> TaskAttemptId:
        """Return the attempt whose files are fetched."""
        if attempt is not None:
            return TaskAttemptId(self._job_id, task, attempt)
        found = self.find([task], None)
        with_files = [one for one in found if one.listing is not None and one.listing.count]
        if with_files:
            return with_files[-1].attempt
        why = next((one.why for one in reversed(found) if one.why is not None), "it has written none")
        raise UnknownNameError(f"task {task} of {self._job_id} has no output files: {why}")

    def _hosts(self, tasks: Sequence[int] | None, attempt: int | None) -> dict[TaskAttemptId, tuple[str, str] | None]:
        """Return node id and address of the host of each attempt; None for a host that is gone."""
        for task in tasks or ():
            if task not in range(self._count):
                raise unknown_number(f"task of {self._job_id}", task, range(self._count))
        with self._logs(self._controller) as logs:
            places = logs.places(self._job_id, range(self._count) if tasks is None else tasks, attempt)
        return {one: place.host for one, place in places.items() if place.log.attempt}


def _answered(call: Any, address: str, within_s: float) -> tuple[list[Listing | None] | None, str | None]:
    """Return the answer of a host, or why there is none."""
    try:
        return ray.get(call, timeout=max(0.0, within_s)), None
    except GetTimeoutError:
        return None, f"its host ({address}) has not answered within {START_S + LIST_S:.0f} s"
    except RayTaskError as error:
        return None, f"its host ({address}) can't read it: {error.cause}"
    except RayError as error:
        return None, f"its host ({address}) does not answer ({type(error).__name__})"
