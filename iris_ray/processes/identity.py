"""Which process a pid means. Pids are used again, so a process is identified by its pid and its start.

Signals go through a pidfd that is compared with the start, so none can reach a later process with the same pid.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

from iris_ray.processes.subtree import read_of_process, stat_fields

BEGINNING_S = 0.1
"""The time after its start in which a process may be about to start its program; its environment is empty then."""
POLL_S = 0.02
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessIdentity(NamedTuple):
    """One process, at any time.

    Attributes:
        started: its start in clock ticks since boot; unlike a time of day, this never changes.
    """

    pid: int
    started: int

    @staticmethod
    def of_this_process() -> "ProcessIdentity":
        """Return the identity of the calling process."""
        stat = stat_of(os.getpid())
        assert stat is not None, "it runs"
        return stat.identity

    def exists(self) -> bool:
        """Return whether the process exists; a zombie does."""
        found = stat_of(self.pid)
        return found is not None and found.identity == self

    def runs(self) -> bool:
        """Return whether any thread of the process runs. The first thread may end before the others."""
        found = stat_of(self.pid)
        return found is not None and found.identity == self and not found.has_ended

    def open_pidfd(self) -> int | None:
        """Return a new file descriptor of the process; None if the process does not exist any more."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid)
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, pidfd)
                if self.exists():  # or it can't be told: OSError
                    stack.pop_all()
                    return pidfd
        return None

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended or is another user's."""
        if (pidfd := self.open_pidfd()) is not None:
            try:
                signal.pidfd_send_signal(pidfd, number)
            except (ProcessLookupError, PermissionError):
                pass
            finally:
                os.close(pidfd)


class ProcessStat(NamedTuple):
    """The kernel's ``stat`` of a process at one moment.

    Attributes:
        started: as in `ProcessIdentity`.
        state: a letter, as in ``ps``.
        threads: how many threads it has, the first one included.
        cpu_s: the seconds of CPU that it has used.
    """

    pid: int
    parent: int
    group: int
    session: int
    started: int
    state: bytes
    threads: int
    cpu_s: float

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started)

    @property
    def is_zombie(self) -> bool:
        """Whether its first thread has ended."""
        return self.state in (b"Z", b"X")

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or its like has stopped it."""
        return self.state == b"T"

    @property
    def has_ended(self) -> bool:
        """Whether none of its threads runs. While one runs, the process holds its memory and chips."""
        return self.is_zombie and self.threads == 1


def stat_of(pid: int) -> ProcessStat | None:
    """Return the stat of a process, zombies included; None if there is no such process."""
    fields = stat_fields(pid)
    if not fields:
        return None
    parent, group, session, user, system, threads, started = (int(fields[at]) for at in (1, 2, 3, 11, 12, 17, 19))
    return ProcessStat(pid, parent, group, session, started, fields[0], threads, (user + system) / TICKS_PER_S)


def own_memory(process: ProcessIdentity) -> int:
    """Return the bytes of memory that a process has resident and does not share with others; 0 if it has ended."""
    fields = read_of_process(process.pid, "statm").split()
    return (int(fields[1]) - int(fields[2])) * PAGE_BYTES if fields and process.exists() else 0


def environ_of(process: ProcessIdentity) -> list[bytes]:
    """Return the variables with which a process's program started, as ``name=value``.

    Read them again if there are none because the process is starting its program.
    """
    while not (found := read_of_process(process.pid, "environ")):
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / TICKS_PER_S
        if age > BEGINNING_S or not process.exists():
            break
        time.sleep(0.001)
    return found.split(b"\0")


def wait_until_ended(processes: Iterable[ProcessIdentity], timeout_s: float) -> None:
    """Wait until no thread of the processes runs, or until the timeout. Zombies count as ended."""
    left, pause_s, deadline = list(processes), 0.001, time.monotonic() + timeout_s
    while (left := [process for process in left if process.runs()]) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
