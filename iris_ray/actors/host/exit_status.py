"""The end of a process, as far as its host can tell, and the watch on a process until its end."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.subtree import as_shells_say

# From linux/pidfd.h: struct pidfd_info, version 0 (64 bytes): u64 mask, u64 cgroupid, 11 × u32 ids, i32 exit_code.
_INFO = struct.Struct("=QQ11Ii")
_WANT_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


def exit_code_of(pidfd: int) -> int | None:
    """Return a process's exit code, or the negative number of the signal that killed it.

    Return None if the process still runs, its parent has not reaped it yet, or the kernel is older than Linux 6.15.
    """
    buffer = bytearray(_INFO.pack(_WANT_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(buffer)
    if not mask & _WANT_EXIT:
        return None
    return os.waitstatus_to_exitcode(status)


def in_words(code: int) -> str:
    """Return an exit code, or a signal, as the end of a sentence."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class ProgramExit(SystemExit):
    """Ends a task that runs a program in place of a function, with the program's exit code.

    Args:
        code: the exit code.
        words: how the program ended, as a sentence for people.
        kind: the kind of the task's end.
    """

    def __init__(self, code: int, words: str, kind: EndKind = EndKind.EXITED) -> None:
        super().__init__(code)
        self.words = words
        self.kind = kind


# -- diagnosis of a task process that ended without a report -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The exit of a task process.

    Attributes:
        at: seconds since the epoch.
        had_started: whether user code had begun to run in it.
        memory_was_short: whether the kernel killed any process of this host for lack of memory in the minute before.
        code: the exit code, or the negative number of the signal that killed it; None if the kernel can't tell.
        stopped_for: why iris_ray ended it, or None if it ended by itself.
        killed_for_memory: why the host ended it for lack of memory, or None.
        zygote_ended: whether the kernel has killed it because the process that had forked it has ended.
    """

    at: float
    had_started: bool
    memory_was_short: bool
    code: int | None
    stopped_for: str | None
    killed_for_memory: str | None = None
    zygote_ended: bool = False


def diagnose(found: ProcessExit) -> TaskEnd:
    """Return how the task ended: stopped, out of memory, never started, with its zygote or crashed, in this order."""
    if found.stopped_for is not None:
        return TaskEnd(EndKind.STOPPED, found.at, error=found.stopped_for)
    if found.killed_for_memory is not None:
        return TaskEnd(
            EndKind.OUT_OF_MEMORY, found.at, error=found.killed_for_memory, exit_code=as_shells_say(-SIGKILL)
        )
    how = "ended without a word" if found.code is None else in_words(found.code)
    exit_code = None if found.code is None else as_shells_say(found.code)
    if not found.had_started:
        return TaskEnd(EndKind.NEVER_STARTED, found.at, error=f"the waiting task process {how}", exit_code=exit_code)
    if found.memory_was_short and found.code in (None, -SIGKILL):
        reason = "the task process was killed by the kernel, because the host's memory was used up"
        return TaskEnd(EndKind.OUT_OF_MEMORY, found.at, error=reason, exit_code=exit_code)
    if found.zygote_ended:
        reason = "the process of iris_ray that had forked the task has ended, and the task with it"
        return TaskEnd(EndKind.ZYGOTE_ENDED, found.at, error=reason, exit_code=exit_code)
    return TaskEnd(EndKind.CRASHED, found.at, error=f"the task process {how}", exit_code=exit_code)


VMSTAT = Path("/proc/vmstat")
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")  # a container's own limit (cgroup v2)
LOOKS_KEPT = 60
"""The number of looks, one a second, for which a kill counts: a process of hundreds of GB ends slowly."""


def oom_kills(files: tuple[Path, ...] = (VMSTAT, MEMORY_EVENTS)) -> int:
    """Return the number of processes that the kernel has killed for lack of memory, here and in this container."""
    return sum(map(_count, files))


def _count(path: Path) -> int:
    """Return the file's ``oom_kill`` count; 0 if this kernel has no such file or count."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class RecentOomKills:
    """Knows whether the kernel has killed any process for lack of memory in the last minute.

    Args:
        count: returns how many it has killed in all.
    """

    def __init__(self, count: Callable[[], int] = oom_kills) -> None:
        self._count = count
        self._counts = deque([count()], LOOKS_KEPT)

    def look(self) -> None:
        """Remember the present count. Call this once a second."""
        self._counts.append(self._count())

    def found(self) -> bool:
        """Return whether the count has grown since the oldest remembered look."""
        return self._count() > self._counts[0]


# -- watched process ---------------------------------------------------------------------------------------------------


class WatchedProcess:
    """One running process of this host, held by a pidfd, so that signals can't hit another process with its pid.

    Args:
        process: the process.

    Raises:
        RuntimeError: the process has ended; another process may have its pid.
    """

    def __init__(self, process: ProcessIdentity) -> None:
        if (pidfd := process.open_pidfd()) is None:
            raise RuntimeError(f"the process that waited for a task, pid {process.pid}, has ended before it got one")
        self._pidfd = pidfd
        self._exited = asyncio.Event()

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call a function on the running event loop when the process ends, before `ended` turns true."""

        def ended() -> None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            on_exit()
            self._exited.set()

        asyncio.get_running_loop().add_reader(self._pidfd, ended)

    @property
    def ended(self) -> bool:
        return self._exited.is_set()

    async def wait(self) -> None:
        """Wait for the end of the process."""
        await self._exited.wait()

    async def wait_at_most(self, seconds: float) -> None:
        """Wait for the end of the process, for this time at most; seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if not self.ended:
                signal.pidfd_send_signal(self._pidfd, number)

    def exit_code(self) -> int | None:
        """Return the process's exit code, as `exit_code_of` does."""
        return exit_code_of(self._pidfd)

    def close(self) -> None:
        """Close the file descriptor. Call this once, when the process has ended or no caller watches it any more."""
        os.close(self._pidfd)
