"""Reads the evidence that hosts have kept of a job's tasks, for a bug report."""

import io
import tarfile
from collections.abc import Iterator
from typing import Final

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.evidence.core import FOLDER

MOST_TASKS: Final = 4
"""The limit for the tasks whose evidence is read."""
MOST_BYTES: Final = 16 << 10
"""The limit for what is returned of each file: its end; bytes."""
MOST_STREAM_BYTES: Final = 32 << 20
"""The limit for what is read of the files of a task; bytes."""


def kept_evidence(controller: ControllerConnection, job_id: str) -> Iterator[tuple[str, str]]:
    """Yield a title and the last lines of each file that is kept of the first tasks of a job that have an error.

    Raises:
        IrisError: it can't be read.
    """
    outputs = module_of("outputs", "client").JobOutputs(controller, job_id)
    tasks = [task for task in controller.ask_all(ControllerInterface.list_tasks, job_id) if task.error is not None]
    indexes = [task.task_index * task.processes for task in tasks[:MOST_TASKS]]
    if not indexes:
        return
    found = [one for one in outputs.find(indexes, None, FOLDER) if one.listing is not None and one.listing.files]
    for one in {one.attempt.task_index: one for one in found}.values():  # the latest attempt of each
        task, attempt = one.attempt.task_index, one.attempt.attempt
        stream = bytearray()
        for piece in outputs.fetch(task, attempt, FOLDER):
            stream += piece
            if len(stream) > MOST_STREAM_BYTES:  # a program can write there as well
                break
        for name, text in _files(bytes(stream)):
            yield f"task {task}, attempt {attempt}: {name}", text


def _files(stream: bytes) -> Iterator[tuple[str, str]]:
    """Yield the name and the last lines of each file in a tar stream."""
    try:
        with tarfile.open(fileobj=io.BytesIO(stream)) as members:
            for member in members:
                if member.isreg() and (file := members.extractfile(member)) is not None:
                    text = file.read()[-MOST_BYTES:].decode(errors="replace")
                    yield member.name.rpartition("/")[2], text
    except tarfile.TarError:  # it was cut off
        return
