"""The files that this job keeps in ``local_dir`` on the hosts of its gang, read and written over the network.

Each host serves the files of its own disk or memory, even while no task runs there. So a task on a new host fetches
missing files from the others, and a task keeps a second copy of its files on the host of another slice.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from iris_ray.actors.protocol.task_files import JobDirectory
from iris_ray.checkpoint.local_files import FILES, LIST, TOKEN_HEADER, TOKEN_PREFIX, room_in, to_target
from iris_ray.errors import InvalidRequestError, PeerFilesError
from iris_ray.task.job_info import get_job_info

SILENCE_S = 10.0
"""The time without a byte after which a host counts as unable to answer."""
START_S = 20.0
"""The time within which the tasks of a gang start. A host knows a job once its task has started there."""
ASK_AGAIN_S = 0.05
CHUNK_BYTES = 4 << 20
CONTINUE = b"HTTP/1.1 100"
NOT_FOUND = HTTPStatus.NOT_FOUND


class PeerFiles:
    """The files of this job on one host of its gang: what its tasks there have in ``local_dir``.

    Every method raises `PeerFilesError` if the host can't be reached or refuses. Paths are relative to ``local_dir``,
    with "/" between their parts. Threads may share an object.

    Args:
        address: ``host:port`` of the host's file service, as in ``get_job_info().file_services``.
        token: the job's token.
        timeout_s: seconds without a byte after which the host counts as lost.
    """

    def __init__(self, address: str, token: str, timeout_s: float = SILENCE_S) -> None:
        self.address = address
        self._token = token
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"PeerFiles({self.address!r})"

    def list(self, directory: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all files below a directory, by path; nothing if there is no such directory.

        A file that is being written by `write` is not there until it is whole. Links are left out.
        """
        with self._ask("GET", LIST, directory) as response:
            found: dict[str, int] = json.loads(response.read())
            return found

    def read(self, path: str, into: "memoryview[Any]", offset: int = 0) -> None:
        """Fill a buffer with the bytes of a file from an offset on. A file that is too short is an error."""
        buffer = into.cast("B")
        if not buffer:
            return
        wanted = f"bytes={offset}-{offset + len(buffer) - 1}"
        with self._ask("GET", FILES, path, {"Range": wanted}) as response:
            if response.length != len(buffer):
                raise PeerFilesError(
                    f"{self.address}: {path} has {response.length} bytes from {offset} on, and {len(buffer)} were"
                    " expected; it is not the file that was asked for"
                )
            while buffer:
                if not (count := response.readinto(buffer)):
                    raise ConnectionResetError("the host ended its answer too early")
                buffer = buffer[count:]

    def write(self, path: str, source: "Path | memoryview[Any]") -> None:
        """Store a file, whole at once or not at all, in place of an earlier one. Make the directories above it.

        The files of a job on a host leave a tenth of its memory, or disk, free. A file that doesn't fit is refused.
        """
        if isinstance(source, Path):
            with source.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                with self._ask("PUT", FILES, path, size=size, send=lambda to: _send_file(to, file, size)):
                    pass
        else:
            content = source.cast("B")
            with self._ask("PUT", FILES, path, size=len(content), send=lambda to: _send_all(to, content)):
                pass

    def delete(self, path: str) -> None:
        """Delete a file or a directory, whole at once. Do nothing if it does not exist."""
        with self._ask("DELETE", FILES, path, missing_ok=True):
            pass

    @contextlib.contextmanager
    def _ask(
        self,
        method: str,
        prefix: str,
        path: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        size: int = 0,
        send: Callable[[socket.socket], object] | None = None,
        missing_ok: bool = False,
    ) -> Iterator[HTTPResponse]:
        """Ask the host, and yield its answer. Until a task of the job has started there, ask again.

        Args:
            method, prefix, path: of the request.
            headers: further headers.
            size: the length of the request's body.
            send: sends the body, once the host has agreed to take it.
            missing_ok: whether the path need not exist.

        Raises:
            PeerFilesError: the host refuses, can't be reached or falls silent.
        """
        what = f"{method} {path or 'the list of files'}"
        deadline = time.monotonic() + START_S
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal():
            raise PeerFilesError(f"that host of the gang serves no files, so it can't answer {what}; ask another host")
        while True:
            connection = HTTPConnection(host, int(port), timeout=self._timeout_s)
            try:
                connection.putrequest(method, to_target(prefix, path), skip_accept_encoding=True)
                for name, value in {TOKEN_HEADER: TOKEN_PREFIX + self._token, **headers}.items():
                    connection.putheader(name, value)
                if send is not None:
                    connection.putheader("Content-Length", str(size))
                    connection.putheader("Expect", "100-continue")
                connection.endheaders()
                if send is not None and self._agrees(connection.sock):
                    with contextlib.suppress(ConnectionError):  # it may have refused meanwhile, and said why
                        send(connection.sock)
                response = connection.getresponse()
                if response.status == HTTPStatus.FORBIDDEN and time.monotonic() < deadline:
                    time.sleep(ASK_AGAIN_S)
                    continue
                if response.status >= HTTPStatus.BAD_REQUEST and not (missing_ok and response.status == NOT_FOUND):
                    why = response.read().decode(errors="replace")
                    raise PeerFilesError(f"{self.address} refuses {what}: {why}")
                yield response
                return
            except (OSError, HTTPException, ValueError) as error:  # ValueError: a list that isn't JSON
                if isinstance(error, PeerFilesError):
                    raise
                why = "it is silent" if isinstance(error, TimeoutError) else str(error).strip() or type(error).__name__
                raise PeerFilesError(
                    f"{self.address} did not answer {what}: {why}. The host, or the network to it, is lost: use another"
                    " copy"
                ) from error
            finally:
                connection.close()

    def _agrees(self, connection: socket.socket) -> bool:
        """Return whether the host wants the body of a request. If it refuses, it has said why."""
        deadline = time.monotonic() + self._timeout_s
        while 0 < len(seen := connection.recv(len(CONTINUE), socket.MSG_PEEK)) < len(CONTINUE):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)
        return seen == CONTINUE


def _send_all(connection: socket.socket, content: memoryview) -> None:
    """Send in chunks: the time limit of a socket is for a whole call of ``sendall``."""
    for start in range(0, len(content), CHUNK_BYTES):
        connection.sendall(content[start : start + CHUNK_BYTES])


def _send_file(connection: socket.socket, file: BinaryIO, size: int) -> None:
    if size and connection.sendfile(file, 0, size) < size:
        raise PeerFilesError(f"{file.name} has become shorter while it was sent; write files under another name first")


def peers() -> list[PeerFiles]:
    """Return the files of this job on the host of each task of its gang, by gang rank.

    The list is empty without chips, in local processes (``mode="simple"``), and where ``file_services`` is empty.

    Raises:
        InvalidRequestError: called outside a task.
    """
    me = get_job_info()
    if me is None:
        raise InvalidRequestError("only tasks of a job have peers; this process is not one")
    if not me.local_dir or not me.file_services:
        return []
    token = JobDirectory.of_local_dir(me.local_dir).read_token()
    return [PeerFiles(address, token) for address in me.file_services]


def room() -> int:
    """Return how many bytes this job may still put into its ``local_dir`` on this host; negative if it has too many.

    Raises:
        InvalidRequestError: called outside a task, or in one without chips.
    """
    me = get_job_info()
    if me is None or not me.local_dir:
        raise InvalidRequestError("this process has no local_dir: it is not a task of a job with chips")
    return room_in(Path(me.local_dir))
