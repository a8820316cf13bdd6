"""The operations of this process that can fail, and the faults that they meet.

`Operations.installed` replaces the functions of the standard library that touch files, SQLite, sockets, threads and
processes by ones that count each call. At one of them, the fault happens.
"""

import asyncio
import builtins
import contextlib
import ctypes
import errno
import io
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from enum import Enum
from typing import Any

KILLED = 77
"""The exit code of a process that a fault has killed."""


class Fault(Enum):
    """What happens at an operation.

    Attributes:
        REFUSED: it does nothing, and raises an error.
        ANSWER_LOST: it is done, and raises an error.
        TORN: half of a write is done; then it raises an error for a full disk.
        REFUSED_THEN_KILLED, ANSWER_LOST_THEN_KILLED: as before; the process is gone after its next report.
        KILLED: it is done; then the process is gone.
        KILLED_TORN: half of a write is done; then the process is gone.
        CANCELLED: the task that waits there is cancelled.
    """

    REFUSED = "refused"
    ANSWER_LOST = "done, answer lost"
    REFUSED_THEN_KILLED = "refused, killed later"
    ANSWER_LOST_THEN_KILLED = "done, answer lost, killed later"
    TORN = "half written"
    KILLED = "killed after it"
    KILLED_TORN = "killed half-way"
    CANCELLED = "cancelled"


fstat = os.fstat
MADE = {"fork", "thread", "pipe", "openpty", "pidfd_open", "socketpair"}
"""Operations that make what goes with the process; each can be refused for lack of room."""
READS = {
    "open",
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "read",
    "fstat",
    "kv read",
    "connect",
    "recv",
    *MADE,
    "request read",
}
"""Operations that change nothing: losing their answer is no different from refusing them."""
WRITES = {"write", "pwrite"}
"""Operations that can be done by half."""
ASYNCIOS_OWN = {"_make_self_pipe", "_write_to_self", "_read_from_self", "shutdown_default_executor"}
"""What asyncio does to wake and to end its own threads. It copes with no failure there."""
OS_FUNCTIONS = (
    *("open", "stat", "lstat", "fstat", "listdir", "scandir", "pwrite", "fsync", "fdatasync"),
    *("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink", "truncate", "ftruncate", "chmod"),
    *("utime", "fork", "pipe", "openpty", "pidfd_open"),
)


def faults_of(operation: str) -> list[Fault]:
    """Return the faults that are tried at an operation."""
    if operation == "await":
        return [Fault.CANCELLED]
    if operation in READS:
        return [Fault.REFUSED]
    if operation == "pipe write":  # the kernel refuses one only if nobody reads
        return [Fault.KILLED, Fault.KILLED_TORN]
    torn = [Fault.TORN, Fault.KILLED_TORN] if operation in WRITES else []
    later = [Fault.REFUSED_THEN_KILLED, Fault.ANSWER_LOST_THEN_KILLED]
    return [Fault.REFUSED, Fault.ANSWER_LOST, *later, Fault.KILLED, *torn]


class ConnectionLostError(ConnectionResetError):
    """A connection is lost, at both ends."""


class NoAnswerError(Exception):
    """A request has no answer. A scenario turns this into the error of its client."""


class StoreIsAwayError(Exception):
    """The cluster's key-value store does not answer."""


class Operations:
    """Counts operations, and has one of them meet a fault.

    Args:
        at: the number of that operation; None: none does.
        fault: what happens there.

    Attributes:
        names: of all operations so far, in their order.
    """

    def __init__(self, at: int | None = None, fault: Fault = Fault.REFUSED) -> None:
        self.names: list[str] = []
        self._at = at
        self._fault = fault
        self._lock = threading.Lock()
        self._exit = os._exit

    def disarm(self) -> None:
        """Have no operation of this process meet the fault: it stands for another machine."""
        self._at = None

    def has_reported(self) -> None:
        """End the process after a report, if the fault says so and has happened."""
        later = Fault.REFUSED_THEN_KILLED, Fault.ANSWER_LOST_THEN_KILLED
        if self._fault in later and self._at is not None and len(self.names) > self._at:
            self._exit(KILLED)

    def do(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do an operation, or have it meet the fault."""
        with self._lock:
            self.names.append(name)
            is_it = len(self.names) - 1 == self._at and self._fault in faults_of(name)
        if not is_it:
            return function(*args, **kwargs)
        match self._fault:
            case Fault.REFUSED | Fault.REFUSED_THEN_KILLED:
                raise _error_of(name)
            case Fault.ANSWER_LOST | Fault.ANSWER_LOST_THEN_KILLED:
                function(*args, **kwargs)
                raise _error_of(name)
            case Fault.TORN | Fault.KILLED_TORN:
                *before, data = args[:2]
                function(*before, bytes(data)[: len(bytes(data)) // 2], *args[2:], **kwargs)
                if self._fault is Fault.KILLED_TORN:
                    self._exit(KILLED)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case Fault.KILLED:
                function(*args, **kwargs)
                self._exit(KILLED)
            case Fault.CANCELLED:
                function(*args, **kwargs)
                if (task := asyncio.current_task()) is not None:
                    task.cancel()

    @types.coroutine
    def awaited(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Do the work of a coroutine in this task. Each time that it waits counts as an operation, ``await``."""
        go_on, value = work.send, None
        while True:
            try:
                waits_for = go_on(value)
            except StopIteration as end:
                return end.value
            self.do("await", lambda: None)
            try:
                go_on, value = work.send, (yield waits_for)
            except BaseException as error:
                go_on, value = work.throw, error

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, all operations of this process count."""
        with contextlib.ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            for name in OS_FUNCTIONS:
                put(os, name, self._counted(name, getattr(os, name)))
            put(os, "read", self._of_file("read", os.read))
            put(os, "write", self._of_file("write", os.write))
            opened = self._opener()
            put(builtins, "open", opened)
            put(io, "open", opened)
            put(sqlite3, "connect", self._connector())
            put(socket, "socketpair", self._counted("socketpair", socket.socketpair))
            put(threading.Thread, "start", self._method("thread", threading.Thread.start))
            put(subprocess.Popen, "__init__", self._method("fork", subprocess.Popen.__init__))
            for name in ("connect", "send", "sendall", "recv"):
                put(socket.socket, name, self._method(name, getattr(socket.socket, name)))
            yield

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_name in ASYNCIOS_OWN:
                return function(*args, **kwargs)
            return self.do(name, function, *args, **kwargs)

        return call

    def _of_file(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Count the reads and writes of files; those of pipes and terminals don't fail while both ends live."""
        of_socket = {"read": "recv", "write": "send"}[name]

        def call(file: int, *args: Any) -> Any:
            mode = fstat(file).st_mode
            if stat.S_ISSOCK(mode):
                try:
                    return self.do(of_socket, function, file, *args)
                except ConnectionLostError:
                    with socket.socket(fileno=os.dup(file)) as lost:
                        _lose(lost)
                    raise
            if stat.S_ISREG(mode):
                return self.do(name, function, file, *args)
            return function(file, *args) if name == "read" else self.do("pipe write", function, file, *args)

        return call

    def _method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_name in ASYNCIOS_OWN:
                return method(this, *args, **kwargs)
            try:
                return self.do(name, lambda *args, **kwargs: method(this, *args, **kwargs), *args, **kwargs)
            except ConnectionLostError:
                _lose(this)
                raise

        return call

    def _opener(self) -> Callable[..., Any]:
        operations = self

        class File(io.FileIO):
            def readinto(self, buffer: Any, /) -> int | None:
                found: int | None = operations.do("read", super().readinto, buffer)
                return found

            def readall(self) -> bytes:
                found: bytes = operations.do("read", super().readall)
                return found

            def write(self, data: Any, /) -> int | None:  # type: ignore[override]
                written: int | None = operations.do("write", super().write, data)
                return written

            def truncate(self, size: int | None = None, /) -> int:
                found: int = operations.do("truncate", super().truncate, size)
                return found

        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            plain = mode.replace("b", "").replace("t", "")
            if isinstance(file, int):  # nothing is opened
                raw = File(file, plain, closefd=closefd)
            else:
                raw = operations.do("open", File, file, plain, closefd=closefd, opener=opener)
            try:
                if buffering == 0:
                    return raw
                size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
                kind = io.BufferedRandom if "+" in plain else io.BufferedReader if "r" in plain else io.BufferedWriter
                buffered: Any = kind(raw, size)
                if "b" in mode:
                    return buffered
                return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
            except BaseException:
                raw.close()
                raise

        return opened

    def _connector(self) -> Callable[..., Any]:
        operations = self
        connect = sqlite3.connect

        class Cursor(sqlite3.Cursor):
            def execute(self, *args: Any) -> Any:
                return operations.do("statement", super().execute, *args)

            def executemany(self, *args: Any) -> Any:
                return operations.do("statement", super().executemany, *args)

        class Connection(sqlite3.Connection):
            def cursor(self, factory: Any = Cursor) -> Any:
                return super().cursor(factory)

            def execute(self, *args: Any) -> Any:
                return self.cursor().execute(*args)

            def executemany(self, *args: Any) -> Any:
                return self.cursor().executemany(*args)

            def executescript(self, script: str) -> Any:
                return operations.do("statement", super().executescript, script)

            def commit(self) -> None:
                operations.do("statement", super().commit)

        def connected(*args: Any, **kwargs: Any) -> Any:
            return operations.do("open", connect, *args, factory=Connection, **kwargs)

        return connected


def _lose(lost: socket.socket) -> None:
    """Have the other end lose a connection, too: by a reset, where there is one."""
    if lost.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):
            lost.shutdown(socket.SHUT_RDWR)
    else:
        nowhere = bytes(16)  # AF_UNSPEC: the kernel disconnects
        ctypes.CDLL(None).connect(lost.fileno(), nowhere, len(nowhere))


def _error_of(name: str) -> Exception:
    """Return the error of an operation that fails: a full disk where something is made, a broken one elsewhere."""
    if name == "statement":
        return sqlite3.OperationalError("disk I/O error")
    if name == "thread":
        return RuntimeError("can't start new thread")
    if name.startswith("request"):
        return NoAnswerError(f"{name} has no answer")
    if name.startswith("kv"):
        return StoreIsAwayError("the GCS does not answer")
    if name in ("connect", "send", "sendall", "recv", "call"):
        return ConnectionLostError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    number = errno.ENOSPC if name in {*WRITES, "mkdir", "link", "symlink"} else errno.EIO
    if name in MADE:
        number = errno.EAGAIN if name == "fork" else errno.EMFILE
    return OSError(number, os.strerror(number))
