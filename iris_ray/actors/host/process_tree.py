"""The process tree of a task: its process and the descendants, and how to end them all.

We record descendants while the task's process lives, because the kernel forgets the relation when that process ends.
A pid names a process only together with its start time, since pids are used again. A process is a member of the tree
if we saw it as a child of a member or in the process group or session that the task's process leads, if it carries the
task's token, or if the task has named it (`TaskFiles.members`).

A program that a task starts carries the token in its environment. A fork shows the environment with which the task's
process started, before it had a token, so the token is also the name of memory that the kernel maps into forks.
"""

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from iris_ray.actors.protocol.task_files import TOKEN_VARIABLE

FORK_MARK = "iris-ray-task-"
"""The name of the memory that a task's process and its forks have mapped is this, then the token."""
LISTINGS = 3
"""A search lists the processes so often, because a daemon may start while its parent, already listed, ends."""
BEGINNING_S = 0.1
"""A process may be between two programs for so long after its start."""
KERNEL_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Whether the kernel is built with that file. Most are."""
_GONE_OR_ANOTHER_USERS = FileNotFoundError, ProcessLookupError, PermissionError


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The kernel's ``stat`` of a process at one moment.

    Attributes:
        started: clock ticks since boot; unlike a time of day, this never changes.
        is_zombie: whether its first thread has ended.
        threads: how many threads it has, the first one included.
    """

    pid: int
    parent: int
    group: int
    session: int
    started: int
    is_zombie: bool
    threads: int

    @property
    def has_ended(self) -> bool:
        """Whether none of its threads runs. While one runs, the process holds its memory and chips."""
        return self.is_zombie and self.threads == 1


def stat_of(pid: int) -> ProcessStat | None:
    """Return the stat of a process, zombies included; None if there is no such process."""
    raw = read_of_process(pid, "stat")
    if not raw:
        return None
    fields = raw.rpartition(b")")[2].split()
    parent, group, session, threads, started = (int(fields[place]) for place in (1, 2, 3, 17, 19))
    return ProcessStat(pid, parent, group, session, started, fields[0] in (b"Z", b"X"), threads)


def read_of_process(pid: int, name: str) -> bytes:
    """Return a file of ``/proc`` about a process; empty if the process has ended or is another user's.

    Scans read thousands of these files, so this does without the cost of a Python file object.

    Raises:
        OSError: the file can't be read for another reason, such as too many open files in this process. If we took the
            other process for ended, it would live on.
    """
    try:
        file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except _GONE_OR_ANOTHER_USERS:
        return b""
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b""))
    except _GONE_OR_ANOTHER_USERS:
        return b""
    finally:
        os.close(file)


def mark_forks(token: str) -> mmap.mmap | None:
    """Mark this process and its forks as a task's, until they start another program.

    Return the memory that is the mark, which the caller has to keep; None if the kernel has no such memory.
    """
    try:
        file = os.memfd_create(FORK_MARK + token)
    except OSError:
        return None
    try:
        os.truncate(file, mmap.PAGESIZE)
        return mmap.mmap(file, mmap.PAGESIZE)
    finally:
        os.close(file)


def runs_since(pid: int, started: int) -> bool:
    """Return whether the process with this pid is the one that started at that tick."""
    found = stat_of(pid)
    return found is not None and found.started == started


class ProcessTree:
    """The members of one task's process tree: the task's process, called the root, and its descendants.

    Args:
        pid, started: the root and its start in clock ticks since boot.
        token: the token that processes of the task carry.
        known: descendants that were recorded earlier, as pids and start ticks.
    """

    def __init__(self, pid: int, started: int, token: str, known: Iterable[tuple[int, int]] = ()) -> None:
        self.pid = pid
        self.started = started
        self.token = token
        self._known = {**dict(known), pid: started}
        self._lock = threading.Lock()

    @property
    def known(self) -> dict[int, int]:
        """The pid and start tick of each member at the last `update` or `search`."""
        return dict(self._known)

    def adopt(self, others: Mapping[int, int]) -> None:
        """Add processes, given by pids and start ticks, as members. Their descendants become members, too."""
        with self._lock:
            self._known = {**self._known, **{pid: since for pid, since in others.items() if runs_since(pid, since)}}

    def update(self) -> bool:
        """Add new children of known members, and drop members that have ended. Return whether anything changed.

        If the kernel lists the children of a process, the cost grows with the threads of the tree, not with the number
        of processes on the machine.
        """
        before = self._known
        if KERNEL_LISTS_CHILDREN:
            self._follow_children()
        else:
            self.search()
        return self._known != before

    def _follow_children(self) -> None:
        with self._lock:
            found: dict[int, int] = {}
            todo = list(self._known.items())
            while todo:
                pid, started = todo.pop()
                children = [] if pid in found else [child for number in _children(pid) if (child := stat_of(number))]
                if runs_since(pid, started):  # checked after reading its children, so they are this process's
                    found[pid] = started
                    todo += [(child.pid, child.started) for child in children if child.parent == pid]
            self._known = found

    def search(self, just_ended: bool = False) -> list[psutil.Process]:
        """Look through all processes of the machine. Return every member, even if no `update` saw it.

        Args:
            just_ended: whether the root may have ended, but too recently for its pid to be in use again.
        """
        with self._lock:
            stats = _all_stats()
            members = {pid for pid, stat in stats.items() if self._known.get(pid) == stat.started}
            led = {pid for pid, stat in stats.items() if self.pid in (stat.group, stat.session)}
            # The kernel gives no new process the number of a group that has members. So the group is still the root's
            # if we know one of its members, or if there was no time to use the number again.
            reused = self.pid in stats and stats[self.pid].started != self.started
            if not reused and (just_ended or led & members):
                members |= led
            members |= {pid for pid in stats.keys() - members if self._has_token(stats[pid])}
            while new := {pid for pid, stat in stats.items() if stat.parent in members} - members:
                members |= new
            self._known = {pid: stats[pid].started for pid in members}
        return self.members()

    def _has_token(self, process: ProcessStat) -> bool:
        """Return whether a process carries the task's token. A process older than the root can't."""
        if process.started < self.started or process.is_zombie:
            return False
        entry = f"{TOKEN_VARIABLE}={self.token}".encode()
        if entry in _environ_of(process).split(b"\0"):
            return True
        return f"{FORK_MARK}{self.token} ".encode() in read_of_process(process.pid, "maps")

    def members(self) -> list[psutil.Process]:
        """Return the members at the last `update` or `search` that still exist."""
        found: list[psutil.Process] = []
        for pid, started in self.known.items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if runs_since(pid, started):
                    found.append(process)
        return found


def _environ_of(process: ProcessStat) -> bytes:
    """Return the environment of a process. Read it again if it is empty because the process is starting a program."""
    while not (found := read_of_process(process.pid, "environ")):
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
        if age > BEGINNING_S or not runs_since(process.pid, process.started):
            break
        time.sleep(0.001)
    return found


def _all_stats() -> dict[int, ProcessStat]:
    """Return the stats of all processes by pid, including those that start while we read others."""
    stats: dict[int, ProcessStat] = {}
    listed: set[int] = set()
    for _ in range(LISTINGS):
        new = set(psutil.pids()) - listed
        listed |= new
        stats |= {pid: found for pid in new if (found := stat_of(pid)) is not None}
    return stats


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


# -- end task ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""A long wait for killed processes is logged at this interval."""
BRISK_S = 1.0
"""After so long, the wait for killed processes polls less often."""


def end_task(
    found: Sequence[psutil.Process],
    search: Callable[[], list[psutil.Process]],
    timeout_s: float = 10.0,
    grace_s: float = 0.0,
) -> list[str]:
    """SIGKILL a task's processes, and those that they start meanwhile, until none is left.

    Block until they are gone, or for ``grace_s`` and ``timeout_s`` seconds. A zombie counts as gone once none of its
    threads runs, since it holds neither memory nor chips.

    Args:
        found: the task's processes, as a search has just found them.
        search: finds the task's processes; not called if none of ``found`` runs.
        timeout_s: seconds to wait after the SIGKILL.
        grace_s: seconds between a SIGTERM and the SIGKILL; 0 sends no SIGTERM.

    Returns:
        The processes that still run, as ``pid <n>``.
    """
    left = _running(found)
    if grace_s and left:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.terminate()
        _wait_until_ended(left, grace_s)
        left = _running(search())
    said, began = 0.0, time.monotonic()
    while left:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        waited = time.monotonic() - began
        psutil.wait_procs(left, timeout=0.02 if waited < BRISK_S else 0.5)
        if waited > timeout_s:
            return _names(left)
        if waited // SAY_EVERY_S > said and (names := _names(left)):
            said = waited // SAY_EVERY_S
            logger.warning("%s: killed %.0f s ago and not gone yet; much memory takes long", ", ".join(names), waited)
        left = _running([*left, *search()])  # a dying process may have forked
    return []


def _wait_until_ended(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, for so many seconds at most. `psutil.wait_procs` would also wait for zombies."""
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _names(processes: list[psutil.Process]) -> list[str]:
    return sorted({f"pid {process.pid}" for process in _running(processes)})


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run, each once."""
    return list({process.pid: process for process in processes if _runs(process)}.values())


def _runs(process: psutil.Process) -> bool:
    """Return whether any thread of a process runs. The first thread may end before the others."""
    found = stat_of(process.pid)
    return found is not None and not found.has_ended and process.is_running()
