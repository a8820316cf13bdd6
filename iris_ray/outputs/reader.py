"""What a host does for a client of its output directories. A job's own actors may be gone, so the client starts it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.ray_internals import on_host
from iris_ray.actors.host.directories import host_directory
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from iris_ray.outputs.sending import LeftOut, Listing, listing, packed

START_S = 30.0
"""The limit for the start of a process on a host; seconds."""
PIECE_S = 120.0
"""The limit for a piece of a stream; a directory of many small files takes longer than one large file."""
LIST_S = 60.0
"""The limit for the listings of a host."""


class Piece(NamedTuple):
    """A piece of a stream; the last one has no bytes, and says what was left out."""

    number: int
    data: bytes
    left_out: LeftOut | None = None


class OutputReader:
    """Lists and sends files of the output directories of its host.

    Args:
        directory: returns iris_ray's directory there.
    """

    def __init__(self, directory: Callable[[], Path] = host_directory) -> None:
        self._root = outputs_directory(directory())
        self._stream: Iterator[bytes] = iter(())
        self._number = 0
        self._left_out = LeftOut()

    def list_files(self, attempts: Sequence[TaskAttemptId], path: str) -> list[Listing | None]:
        """Return what the output directories of attempts have within a path; None for one that is not there."""
        return [listing(OutputDirectory.of(self._root, attempt), path) for attempt in attempts]

    def begin(self, attempt: TaskAttemptId, path: str) -> None:
        """Begin to send a file or directory of an attempt."""
        self._number, self._left_out = 0, LeftOut()
        self._stream = packed(OutputDirectory.of(self._root, attempt), path, self._left_out)

    def next_piece(self) -> Piece:
        """Return the next piece.

        Raises:
            FileNotFoundError: there is no such file or directory.
            InvalidRequestError: it can't be sent; the message says why.
        """
        self._number += 1
        data = next(self._stream, b"")
        return Piece(self._number, data, None if data else self._left_out)


_OutputReader = ray.remote(OutputReader)


def start_output_reader(node_id: str, address: str) -> Actor[OutputReader]:
    """Start a reader on a host, and return at once. It ends with the calling process at the latest."""
    return Actor(_OutputReader.options(**on_host(node_id, address)).remote(), f"the reader on {address}")
