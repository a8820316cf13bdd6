"""A task's process and its descendants.

The descendants are recorded while the task's process lives: the kernel forgets them as its descendants when it ends.

A pid names one process only together with the time at which that process started. A process counts as part of the tree
only if it was seen as a child of another member, in the process group or session that the task's process leads, if it
carries the task's token, or if the task has named it (`TaskFiles.members`).

A program that a task starts carries the token in its environment. What a task forks shows the environment of the task's
process, which began before it had a token; so the token is also the name of memory that the kernel maps into forks.
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
"""Before the token in the name of the memory that a task's process and its forks have mapped."""
LISTINGS = 3
"""How often a search lists the processes: a daemon may start while its parent, which a listing has seen, ends."""
BEGINNING_S = 0.1
"""How long after its start a process may be between two programs."""
KERNEL_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Most kernels are built with that file."""
_GONE_OR_ANOTHER_USERS = FileNotFoundError, ProcessLookupError, PermissionError


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What the kernel says about a process at one moment.

    Attributes:
        pid, parent, group, session: process numbers.
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
        """Whether no thread of it runs. While one runs, the process holds its memory and chips."""
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

    Scans read thousands of these files, so this spares what a Python file object costs.

    Raises:
        OSError: the file can't be read for another reason: this process has no file descriptor left, for instance. To
            take the other one for ended would let it live on.
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
    """Mark this process and those that it forks, until they start another program, as those of a task.

    Returns memory to keep: the mark goes with it. None: the kernel has no such memory.
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
    """Return whether the process that started at that tick still exists; another process may have got its pid."""
    found = stat_of(pid)
    return found is not None and found.started == started


class ProcessTree:
    """The members of one task's process tree: its first process, the root, and the descendants of that.

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
        """Count processes, given by pids and start ticks, as members, and so their descendants."""
        with self._lock:
            self._known = {**self._known, **{pid: since for pid, since in others.items() if runs_since(pid, since)}}

    def update(self) -> bool:
        """Add new children of known members and drop members that have ended. Return whether anything changed.

        The cost grows with the threads of the tree, not with the number of processes on the machine, if the kernel
        lists the children of a process.
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
                if runs_since(pid, started):  # checked after its children were read, so they are children of this one
                    found[pid] = started
                    todo += [(child.pid, child.started) for child in children if child.parent == pid]
            self._known = found

    def search(self, just_ended: bool = False) -> list[psutil.Process]:
        """Look through all processes of the machine and return every member, those that no `update` saw included.

        Args:
            just_ended: whether the root may be gone, but too recently for its pid to be in use again.
        """
        with self._lock:
            stats = _all_stats()
            members = {pid for pid, stat in stats.items() if self._known.get(pid) == stat.started}
            led = {pid for pid, stat in stats.items() if self.pid in (stat.group, stat.session)}
            # The kernel gives no new process the number of a group that has a member. So the group is the root's as
            # long as one of its members is known, or if there was no time to use the number again.
            reused = self.pid in stats and stats[self.pid].started != self.started
            if not reused and (just_ended or led & members):
                members |= led
            members |= {pid for pid in stats.keys() - members if self._has_token(stats[pid])}
            while new := {pid for pid, stat in stats.items() if stat.parent in members} - members:
                members |= new
            self._known = {pid: stats[pid].started for pid in members}
        return self.members()

    def _has_token(self, process: ProcessStat) -> bool:
        """Return whether a process carries the task's token. One that is older than the root can't have it."""
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
    """Return the environment of a process. One that is beginning a program has none yet, and is asked again."""
    while not (found := read_of_process(process.pid, "environ")):
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
        if age > BEGINNING_S or not runs_since(process.pid, process.started):
            break
        time.sleep(0.001)
    return found


def _all_stats() -> dict[int, ProcessStat]:
    """Return the stats of all processes by pid, those included that start while others are read."""
    stats: dict[int, ProcessStat] = {}
    listed: set[int] = set()
    for _ in range(LISTINGS):
        new = set(psutil.pids()) - listed
        listed |= new
        stats |= {pid: found for pid in new if (found := stat_of(pid)) is not None}
    return stats


def _children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


# -- end task ----------------------------------------------------------------------------------------------------------
# Ending a task: every process of it is killed, also one that has left the task's process tree.

logger = logging.getLogger(__name__)

SAY_EVERY_S = 10.0
"""How often a long wait for processes that have been killed is mentioned."""
BRISK_S = 1.0
"""Processes that are not gone after so long are looked for less often."""


def end_task(
    found: Sequence[psutil.Process],
    search: Callable[[], list[psutil.Process]],
    timeout_s: float = 10.0,
    grace_s: float = 0.0,
) -> list[str]:
    """SIGKILL a task's processes, and then those that they have started meanwhile, until none is left.

    Blocks until they are gone, or for ``grace_s`` and ``timeout_s`` seconds. Zombies count as gone, once no
    thread of them runs: they hold neither memory nor chips.

    Args:
        found: its processes, as a search has just found them.
        search: finds its processes; not called if none of those found runs.
        timeout_s: seconds after the SIGKILL after which processes that still run are left alone.
        grace_s: seconds between a SIGTERM and the SIGKILL; 0 sends no SIGTERM.

    Returns:
        Which processes still run, as ``pid <n>``.
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
        left = _running([*left, *search()])  # a dying one may have forked
    return []


def _wait_until_ended(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until all have ended, for so many seconds at most. `psutil.wait_procs` would wait for zombies, too."""
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _names(processes: list[psutil.Process]) -> list[str]:
    """Return which of them still run, in words."""
    return sorted({f"pid {process.pid}" for process in _running(processes)})


def _running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run, each of them once."""
    return list({process.pid: process for process in processes if _runs(process)}.values())


def _runs(process: psutil.Process) -> bool:
    """Return whether a process exists and a thread of it runs. Its first thread may have ended before the others."""
    found = stat_of(process.pid)
    return found is not None and not found.has_ended and process.is_running()
