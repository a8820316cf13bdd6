"""Serves the files of a job's directory on this host, over HTTP, to the job's tasks on all hosts of its gang.

It runs in threads of the TPUHostActor, so it also serves what an earlier attempt has left. The kernel copies files into
sockets, and what arrives passes through one small buffer for each connection. A connection that has not shown a token
keeps no other one out: if there are too many of them, one of the address that has most is closed.
"""

import contextlib
import errno
import hmac
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, BinaryIO

from iris_ray.actors.host.directories import LocalDirectories
from iris_ray.actors.host.services import HostPart
from iris_ray.actors.protocol.task_files import JobDirectory
from iris_ray.checkpoint.local_files import FILES, LIST, TOKEN_HEADER, TOKEN_PREFIX, of_target, room_in
from iris_ray.fair_limits import BACKLOG, Places, leaves_room

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
SILENCE_S = 30.0
"""The time after which a connection is closed if no byte moves, or if the head of its request isn't complete."""
HEAD_BYTES = 1 << 14
"""The limit for the head of a request."""
MOST_STRANGERS = 256
"""The limit for connections that have not shown a token; one more costs the address that has most its oldest one."""
MOST_TRANSFERS = 256
"""The limit for requests with a token that are answered at a time, of which one job gets half; further ones wait."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FilesOnHost(HostPart):
    """Starts the host's file service."""

    _service: "FileService | None" = None

    async def started(self) -> None:
        if not self.host.exclusive:
            return  # a shared host has no job directories
        try:
            directories = LocalDirectories.of_host(self.host.directory())
            self._service = await self.in_thread(FileService, self.host.place.address, directories)
        except (OSError, RuntimeError) as error:  # such as no thread left
            logger.warning("%s serves no files to other hosts of its gang: %s", self.host.name, error)

    async def files_address(self) -> str:
        return "" if self._service is None else self._service.address

    def close(self) -> None:
        if self._service is not None:
            self._service.stop()


class FileService:
    """A server of this host's job directories. It starts at once, and ends with its process.

    Args:
        address: the host's IP address; the service listens on no other.
        directories: the host's job directories.
        room: returns how many bytes a directory may still take.
        silence_s: as `SILENCE_S`.

    Attributes:
        address: ``host:port``.

    Raises:
        OSError: the address can't be bound.
    """

    def __init__(
        self,
        address: str,
        directories: LocalDirectories,
        room: Callable[[Path], int] = room_in,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._directories = directories
        self._room = room
        self._expected = 0  # bytes that are still to come
        self._lock = threading.Lock()
        for job in directories.jobs():  # transfers that ended with the TPUHostActor before
            shutil.rmtree(job.incoming, ignore_errors=True)
        self._server = _Server(address, self, silence_s)
        self.address = f"{address}:{self._server.server_address[1]}"
        self._stopped = False
        threading.Thread(target=self._serve, name="iris_ray.files", daemon=True).start()

    def stop(self) -> None:
        """Take no more connections."""
        self._stopped = True
        with contextlib.suppress(OSError):  # it is stopped already
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def _serve(self) -> None:
        with self._server:
            while not self._stopped:
                self._server.handle_request()

    def job_of(self, token: str) -> JobDirectory:
        """Return the directory of the job that has this token.

        Raises:
            FileRefusal: there is none.
        """
        for job in self._directories.jobs():
            theirs = job.read_token().encode()
            if theirs and hmac.compare_digest(theirs, token.encode(errors="replace")):
                return job
        raise FileRefusal(HTTPStatus.FORBIDDEN, "no job with this token has started a task on this host")

    @contextlib.contextmanager
    def expecting(self, size: int, job: JobDirectory) -> Iterator[Callable[[int], None]]:
        """Keep room for a file that is to come. Yield a function that is told the number of bytes as they come.

        Raises:
            FileRefusal: there is no room.
        """
        left = size
        with self._lock:
            room = self._room(job.files) - self._expected
            if size > room:
                raise FileRefusal(
                    HTTPStatus.INSUFFICIENT_STORAGE,
                    f"{size} bytes don't fit: the files of a job on this host may grow by {max(0, room)} bytes, so that"
                    " a tenth of its memory, or disk, stays free; delete older files there first, or keep fewer",
                )
            self._expected += size

        def came(count: int) -> None:
            nonlocal left
            with self._lock:
                self._expected -= count
            left -= count

        try:
            yield came
        finally:
            came(left)


class FileRefusal(Exception):
    """A request is refused with this status and these words."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, address: str, service: FileService, silence_s: float) -> None:
        self.service = service
        self.silence_s = silence_s
        self._transfers: Counter[Path] = Counter()
        """Requests with a token that are being answered, by the directories of their jobs."""
        self._transfer_ended = threading.Condition()
        self._strangers: Places[socket.socket] = Places(MOST_STRANGERS)
        self._lock = threading.Lock()
        super().__init__((address, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            lost = self._strangers.add(request, client_address[0])
        if lost is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                lost.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def trust(self, request: Any) -> None:
        """Note that a connection has shown a token, or has ended."""
        with self._lock:
            self._strangers.remove(request)

    @contextlib.contextmanager
    def transfer(self, job: JobDirectory) -> Iterator[None]:
        """Wait until the job may have another request answered."""
        with self._transfer_ended:
            self._transfer_ended.wait_for(lambda: self._may_transfer(job))
            self._transfers[job.path] += 1
        try:
            yield
        finally:
            with self._transfer_ended:
                self._transfers[job.path] -= 1
                self._transfers += Counter()  # drops jobs that have none
                self._transfer_ended.notify_all()

    def _may_transfer(self, job: JobDirectory) -> bool:
        return leaves_room(self._transfers[job.path], MOST_TRANSFERS - self._transfers.total())

    def shutdown_request(self, request: Any) -> None:
        self.trust(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a file transfer to %s was broken off", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "iris_ray", ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._await_head()
        self.connection.settimeout(self.server.silence_s)

    def _await_head(self) -> None:
        """Wait until the head of the request is complete: a stranger can send it byte by byte, or without an end.

        Raises:
            OSError: it has not.
        """
        deadline, seen = time.monotonic() + self.server.silence_s, b""
        while b"\r\n\r\n" not in seen:
            known = len(seen)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, known + 1)
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            seen = self.connection.recv(HEAD_BYTES, socket.MSG_PEEK)
            if len(seen) == known:
                raise ConnectionResetError("the connection has ended, or its head has no end")
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log: a job has thousands of files."""

    def handle_expect_100(self) -> bool:
        return True  # `_put` answers it

    def do_GET(self) -> None:
        if self.path.startswith(LIST):
            self._answer(LIST, self._list)
        else:
            self._answer(FILES, self._get)

    def do_PUT(self) -> None:
        self._answer(FILES, self._put)

    def do_DELETE(self) -> None:
        self._answer(FILES, self._delete)

    def _answer(self, prefix: str, by: Callable[[JobDirectory, tuple[str, ...]], None]) -> None:
        self.close_connection = True
        try:
            job = self.server.service.job_of(self.headers.get(TOKEN_HEADER, "").removeprefix(TOKEN_PREFIX))
            if not self.path.startswith(prefix):
                raise FileRefusal(
                    HTTPStatus.NOT_FOUND, "this service has files of jobs only; its paths begin with /files/"
                )
            self.server.trust(self.connection)
            with self.server.transfer(job):
                by(job, _parts(of_target(prefix, self.path), or_none=prefix == LIST))
        except FileRefusal as refusal:
            self._say(refusal.status, str(refusal).encode())
        except FileNotFoundError:
            self._say(HTTPStatus.NOT_FOUND, b"it does not exist")
        except (ConnectionError, TimeoutError):  # an answer would reach no caller
            raise
        except OSError as error:
            status = HTTPStatus.INSUFFICIENT_STORAGE if error.errno in _FULL else HTTPStatus.CONFLICT
            self._say(status, (error.strerror or str(error)).encode())

    def _say(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _list(self, job: JobDirectory, parts: tuple[str, ...]) -> None:
        try:
            with _opened(job.files, parts) as directory:
                found = dict(_sizes_below(directory, "/".join(parts)))
        except (FileNotFoundError, NotADirectoryError):
            found = {}
        self._say(HTTPStatus.OK, json.dumps(found).encode())

    def _get(self, job: JobDirectory, parts: tuple[str, ...]) -> None:
        with _opened(job.files, parts[:-1]) as directory:
            descriptor = os.open(parts[-1], _FILE, dir_fd=directory)
        with open(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise FileRefusal(HTTPStatus.CONFLICT, "it is not a file")
            start, count = self._range(found.st_size)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if "Range" in self.headers else HTTPStatus.OK)
            self.send_header("Content-Length", str(count))
            self.end_headers()
            self._send(file, start, count)

    def _range(self, size: int) -> tuple[int, int]:
        """Return the first byte and the number of bytes to send. The client compares the number with its request."""
        wanted = self.headers.get("Range")
        if wanted is None:
            return 0, size
        if (match := _RANGE.fullmatch(wanted)) is None:
            raise FileRefusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "only ranges such as bytes=0-9 are served")
        first, last = int(match[1]), min(int(match[2]), size - 1)
        if first > last:
            raise FileRefusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"it has {size} bytes")
        return first, last + 1 - first

    def _send(self, file: Any, start: int, count: int) -> None:
        connection: socket.socket = self.connection
        try:
            complete = not count or connection.sendfile(file, start, count) == count
        except OSError as error:  # the answer has begun, so another one can't be given
            raise ConnectionAbortedError(str(error)) from error
        if not complete:
            raise ConnectionAbortedError("the file has been cut short meanwhile")

    def _put(self, job: JobDirectory, parts: tuple[str, ...]) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise FileRefusal(HTTPStatus.LENGTH_REQUIRED, "a file needs a Content-Length")
        with (
            self.server.service.expecting(int(length), job) as came,
            _taking(job) as (incoming, name),
            open(os.open(name, _NEW_FILE, 0o600, dir_fd=incoming), "wb", buffering=0) as file,
        ):
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(HTTPStatus.CONTINUE)
                self.end_headers()
            _receive(self.rfile, file, int(length), came)  # type: ignore[arg-type]
            with _opened(job.files, parts[:-1], create=True) as directory:
                os.rename(name, parts[-1], src_dir_fd=incoming, dst_dir_fd=directory)
        self._say(HTTPStatus.CREATED)

    def _delete(self, job: JobDirectory, parts: tuple[str, ...]) -> None:
        with _opened(job.files, parts[:-1]) as directory, _taking(job) as (incoming, name):
            os.rename(parts[-1], name, src_dir_fd=directory, dst_dir_fd=incoming)
        self._say(HTTPStatus.OK)


def _receive(source: BinaryIO, file: Any, size: int, came: Callable[[int], None]) -> None:
    """Copy this number of bytes from a connection into a file."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size)))
    while size:
        count = source.readinto(buffer[:size])  # type: ignore[attr-defined]
        if not count:
            raise ConnectionResetError("the sender has broken off")
        chunk = buffer[:count]
        while chunk:
            chunk = chunk[file.write(chunk) :]
        came(count)
        size -= count


# -- paths -------------------------------------------------------------------------------------------------------------


def _parts(path: str, or_none: bool) -> tuple[str, ...]:
    """Return the names in a relative path.

    Raises:
        FileRefusal: it could lead elsewhere, or has no names and needs some.
    """
    parts = tuple(path.split("/")) if path else ()
    if not (parts or or_none) or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise FileRefusal(
            HTTPStatus.BAD_REQUEST, "it is not a path below the job's directory: give names with / between them"
        )
    return parts


@contextlib.contextmanager
def _opened(root: Path, parts: Sequence[str], create: bool = False) -> Iterator[int]:
    """Open a directory below another one, through no link. Make it if that is wanted."""
    directory = os.open(root, _DIRECTORY)
    try:
        for part in parts:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=directory)
            below = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = below
        yield directory
    finally:
        os.close(directory)


@contextlib.contextmanager
def _taking(job: JobDirectory) -> Iterator[tuple[int, str]]:
    """Yield the directory for transfers, and a new name in it. Remove the file or directory of that name at the end."""
    job.incoming.mkdir(mode=0o700, exist_ok=True)
    name = secrets.token_hex(8)
    with _opened(job.incoming, ()) as incoming:
        try:
            yield incoming, name
        finally:
            try:
                os.unlink(name, dir_fd=incoming)
            except FileNotFoundError:
                pass
            except OSError:
                shutil.rmtree(name, ignore_errors=True, dir_fd=incoming)


def _sizes_below(directory: int, path: str) -> Iterator[tuple[str, int]]:
    """Yield the paths and sizes of the files below an open directory, through no link."""
    for below, _, names, descriptor in os.fwalk(".", dir_fd=directory):
        parents = [part for part in (path, *below.split("/")) if part not in ("", ".")]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield "/".join([*parents, name]), found.st_size
