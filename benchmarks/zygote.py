"""A prototype of a zygote: a process that has imported modules and forks a fresh process for each task.

It has one thread and no connection to Ray, so a fork loses nothing. `forked_process.py` tries what such forks can do;
iris_ray does not use this file. The zygote needs only the standard library, so it runs on each version of Python.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
MOST_BYTES = 1 << 20
QUIET_DEVICES = "/dev/null", "/dev/urandom", "/dev/random", "/dev/pts/", "/dev/tty", "/dev/shm/"
ANSWER_S = 1.0
"""The time in which a zygote must answer; it does nothing but fork."""


class ZygoteError(Exception):
    """A zygote can't be used.

    Args:
        why: what happened.
        module: the preloaded module that is to blame, if one is.
    """

    def __init__(self, why: str, module: str | None = None) -> None:
        super().__init__(f"preloading {module}: {why}" if module else why)
        self.why, self.module = why, module


class Child:
    """A forked process, as the zygote's owner sees it."""

    def __init__(self, reader: int, pid: int) -> None:
        self.pid = pid
        self._reader = open(reader, "rb")  # noqa: SIM115  # closed by `end`

    def hear(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Return what the child says next; nothing at its end.

        Raises:
            TimeoutError: it has said nothing for so long.
        """
        if not _is_readable(self._reader.fileno(), timeout_s):
            raise TimeoutError(f"pid {self.pid} says nothing")
        return json.loads(self._reader.readline() or b"{}")  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill it, and wait until its end of the pipe is closed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with self._reader:
            self._reader.read()


class Zygote:
    """Starts a zygote and asks it for forks. It ends with this object's process, and its children with it.

    Args:
        preload: modules to import.
        python, launcher, environ: the interpreter, a command that starts it, and more variables.
        freeze: whether objects leave the collector's sight before the first fork.
        ends_by: ``pipe``: at the end of its connection the zygote ends its descendants and itself. ``signal``: the
            kernel kills its children with it. ``kill``: the kernel kills it with its owner. ``wake``: the kernel wakes
            it at its owner's end if it is stopped. ``session``: it is out of reach of signals to its owner's group.
            ``detached``: it is not a child of its owner.
        import_limit_s: time for each module.

    Raises:
        ZygoteError: it did not become ready; the error names the module.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        python: str = sys.executable,
        launcher: Sequence[str] = (),
        environ: Mapping[str, str] = {},
        freeze: bool = True,
        ends_by: Collection[str] = ("pipe", "signal", "session", "detached"),
        import_limit_s: float = 120.0,
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = json.dumps({"preload": list(preload), "freeze": freeze, "ends_by": list(ends_by)})
        command = [*launcher, python, __file__, str(theirs.fileno()), settings]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environ},
            start_new_session="session" in ends_by,
        )
        theirs.close()
        self.pid, self.codes = self.process.pid, dict[int, int]()
        module: str | None = None
        try:
            while "ready" not in (said := self._hear(import_limit_s)):
                if "refused" in said:
                    raise ZygoteError(said["refused"])
                module, self.pid = said["importing"], said["pid"]
        except ZygoteError as error:
            self.end()
            raise ZygoteError(error.why, module) from None
        self.ready, self.pid = said["ready"], said["pid"]

    def fork(self, call: str, **arguments: Any) -> Child:
        """Fork a child that calls a function, given as ``module:function``, with a way to speak and arguments.

        Raises:
            ZygoteError: the zygote has ended or does not answer within a second.
        """
        reader, writer = os.pipe()
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_hear` says how it ended
                socket.send_fds(self._channel, [json.dumps({"call": call, "with": arguments}).encode()], [writer])
            while "forked" not in (said := self._hear(ANSWER_S)):
                self.codes[said["ended"]] = said["code"]
        except ZygoteError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return Child(reader, said["forked"])

    def code(self, child: Child, timeout_s: float = 30.0) -> int:
        """Wait for a child's end. Return its exit code; a signal counts as its negative number."""
        while child.pid not in self.codes:
            said = self._hear(timeout_s)
            self.codes[said["ended"]] = said["code"]
        return self.codes.pop(child.pid)

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        if not _is_readable(self._channel.fileno(), timeout_s):
            raise ZygoteError(f"no answer within {timeout_s:g} s")
        with contextlib.suppress(ConnectionResetError):
            if data := self._channel.recv(MOST_BYTES):
                return json.loads(data)  # type: ignore[no-any-return]
        code = self.process.wait(10)
        raise ZygoteError(f"the zygote was killed by signal {-code}" if code < 0 else f"the zygote ended with {code}")

    def end(self) -> None:
        """End the zygote and its children."""
        self._channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    """Wait until a descriptor can be read. Return False after ``timeout_s``."""
    poll = select.poll()  # `select.select` takes no descriptor beyond 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def start_without_the_unfit(preload: Sequence[str], **settings: Any) -> tuple[Zygote, dict[str, str]]:
    """Start a zygote. If a module is unfit for a fork, begin anew without it.

    Returns:
        The zygote, and why each module was left out.
    """
    left_out: dict[str, str] = {}
    while True:
        try:
            return Zygote([module for module in preload if module not in left_out], **settings), left_out
        except ZygoteError as error:
            if error.module is None:
                raise
            left_out[error.module] = error.why


# -- what a process has that no fork should inherit --------------------------------------------------------------------


def threads() -> list[str]:
    """Return the kernel's names of this process's threads besides the first."""
    own = str(os.getpid())
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")
            if task != own]  # fmt: skip


def devices() -> list[str]:
    """Return the device files that this process has open, except stateless ones such as ``/dev/null``."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted({path for path in found if path.startswith("/dev/") and not path.startswith(QUIET_DEVICES)})


def settle() -> list[str]:
    """Fork a process that ends at once. Libraries with fork handlers, such as OpenBLAS, end their threads for it.

    Returns:
        The warnings of Python and libraries about this fork.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if (pid := os.fork()) == 0:
            os._exit(0)
    os.waitpid(pid, 0)
    return [f"{one.category.__name__}: {one.message}" for one in caught]


def unfit() -> str | None:
    """Return why this process can't be forked from, in words; None if it can."""
    if threads():
        settle()
    if left := threads():
        return f"it started {len(left)} threads ({', '.join(sorted(set(left)))})"
    if opened := devices():
        return f"it opened {', '.join(opened)}"
    return None


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


# -- the zygote's own process ------------------------------------------------------------------------------------------


def serve(channel: socket.socket, by_signal: bool) -> Callable[[], object]:
    """Fork as asked until the connection ends. Return what to run, in a child only."""
    poll, running, zygote = select.poll(), dict[int, int](), os.getpid()
    poll.register(channel, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                pid = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _tell(channel, ended=pid, code=code)
                continue
            data, descriptors = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):  # the owner ended with answers unread
                data, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, 1)
            if not data:
                _end_all()
            if why := unfit():  # a signal handler or a timer of a module may have done it
                _tell(channel, refused=why)
                os._exit(1)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                if by_signal:
                    signal_at_parents_end(signal.SIGKILL)
                    if os.getppid() != zygote:
                        os._exit(1)
                channel.close()
                for pidfd in running:
                    os.close(pidfd)
                return _program(json.loads(data), descriptors[0])
            os.close(descriptors[0])
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            _tell(channel, forked=pid)


def _end_all() -> NoReturn:
    """Kill all descendants, which the kernel gives to this process when they lose their parents, and end."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)


def _program(asked: dict[str, Any], writer: int) -> Callable[[], object]:
    def say(**facts: Any) -> None:
        os.write(writer, json.dumps(facts).encode() + b"\n")

    def run() -> None:
        module, _, name = asked["call"].partition(":")
        try:
            getattr(importlib.import_module(module), name)(say, **asked["with"])
        except Exception:
            say(error=traceback.format_exc(limit=-3))
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)

    return run


def _tell(channel: socket.socket, **facts: Any) -> None:
    with contextlib.suppress(OSError):  # the owner is gone; the next look at the channel says so
        channel.send(json.dumps(facts).encode())


def main() -> None:
    """Import modules one by one, tell what is unfit, and serve."""
    channel, settings = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    os.set_inheritable(channel.fileno(), False)
    ends_by = settings["ends_by"]
    if "detached" in ends_by and os.fork():
        os._exit(0)
    if "kill" in ends_by or "wake" in ends_by:
        signal_at_parents_end(signal.SIGKILL if "kill" in ends_by else signal.SIGCONT)
    if "pipe" in ends_by:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seconds: dict[str, float] = {}
    for module in settings["preload"]:
        _tell(channel, importing=module, pid=os.getpid())
        began = time.monotonic()
        try:
            importlib.import_module(module)
            why = unfit()
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            _tell(channel, refused=why)
            os._exit(1)
        seconds[module] = round(time.monotonic() - began, 2)
    if settings["freeze"]:
        gc.collect()
        gc.freeze()
    _tell(channel, ready=seconds, pid=os.getpid())
    serve(channel, "signal" in ends_by)()


if __name__ == "__main__":
    from zygote import main as _main  # children that import this file then get the module that runs

    _main()
