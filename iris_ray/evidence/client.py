"""Reads the evidence that hosts have kept of a job's tasks, for a bug report."""

import contextlib
import io
import math
import tarfile
from collections.abc import Iterator
from typing import Final

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.status import TaskStatus
from iris_ray.errors import IrisError
from iris_ray.evidence.core import FILES, FOLDER, STACKS
from iris_ray.model.lifecycle import TaskState

MOST_ASKED, MOST_TASKS = 16, 4
"""The limits for the tasks whose hosts are asked, and for those whose evidence is read: the first to fail."""
MOST_BYTES: Final = 16 << 10
"""The limit for what is returned of each file: its end, and of the stacks their begin; bytes."""
MOST_STREAM_BYTES: Final = 32 << 20
"""The limit for what is read of the files of a task; bytes."""
_FIRST_CAUSES = TaskState.FAILED, TaskState.WORKER_FAILED


def kept_evidence(controller: ControllerConnection, job_id: str) -> Iterator[tuple[str, str]]:
    """Yield a title and lines of each file that is kept of the first tasks of a job to fail, or why there are none.

    Raises:
        IrisError: it can't be read.
    """
    outputs = module_of("outputs", "client").JobOutputs(controller, job_id)
    tasks = [task for task in controller.ask_all(ControllerInterface.list_tasks, job_id) if task.error is not None]
    indexes = [index for task in sorted(tasks, key=_when_failed) for index in task.indices][:MOST_ASKED]
    if not indexes:
        return
    found = outputs.find(indexes, None, FOLDER)
    has = {one.attempt.task_index: one for one in found if one.listing is not None and one.listing.files}
    for one in {one.attempt.task_index: one for one in found}.values():
        if one.why is not None:
            yield f"task {one.attempt.task_index}, attempt {one.attempt.attempt}: files about its end", one.why
    for index in [index for index in indexes if index in has][:MOST_TASKS]:
        attempt = has[index].attempt.attempt  # the latest that has left some
        title = f"task {index}, attempt {attempt}"
        try:
            stream = _read(outputs.fetch(index, attempt, FOLDER))
            for name, text in _files(stream):
                yield f"{title}: {name}", text
            if len(stream) > MOST_STREAM_BYTES:  # a program can write there as well
                command = f"iris-ray cp --output {job_id}/{index}:{FOLDER} . --attempt {attempt}"
                yield f"{title}: more files", f"{command} fetches them: they are too large for a report"
        except IrisError as error:
            yield f"{title}: files about its end", str(error)


def _when_failed(task: TaskStatus) -> tuple[bool, float]:
    return task.state not in _FIRST_CAUSES, math.inf if task.ended_at is None else task.ended_at


def _read(stream: Iterator[bytes]) -> bytes:
    data = bytearray()
    for piece in stream:
        data += piece
        if len(data) > MOST_STREAM_BYTES:
            break
    return bytes(data)


def _files(stream: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and some lines of each file of iris_ray's in a tar stream, which may be cut off."""
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(stream)) as members:
        for member in members:
            name = member.name.rpartition("/")[2]
            if name in FILES and member.isreg() and (file := members.extractfile(member)) is not None:
                content = file.read()
                some = content[:MOST_BYTES] if name == STACKS else content[-MOST_BYTES:]  # its own process comes first
                yield name, some.decode(errors="replace")
