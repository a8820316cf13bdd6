"""The process tree of a task: its process and the descendants, and how to end them all.

We record descendants while the task's process lives, because the kernel forgets the relation when that process ends.
A process is a member of the tree if we saw it as a child of a member or in the process group or session that the
task's process leads, if it carries the task's token, or if the task has named it (`TaskFiles.members`). No other
process is ended.

A program that a task starts carries the token in its environment. A fork shows the environment with which the task's
process started, before it had a token, so the token is also the name of memory that the kernel maps into forks.
"""

import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

from iris_ray.processes.identity import ProcessIdentity, ProcessStat, environ_of, stat_of, wait_until_ended
from iris_ray.processes.subtree import GONE_OR_ANOTHER_USERS, pids, read_of_process

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "IRIS_RAY_TASK_TOKEN"
"""The environment variable with a task's token. All programs that the task starts inherit it."""
FORK_MARK = "iris-ray-task-"
"""The name of the memory that a task's process and its forks have mapped is this, then the token."""
LISTINGS = 3
"""The number of listings in a search: a daemon may start while its parent, already listed, ends."""
KERNEL_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""Whether the kernel lists the children of a thread. Most kernels do."""


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


class ProcessTree:
    """The members of one process tree: a task's process, called the root, and its descendants.

    Args:
        root: the task's process.
        token: the token that processes of the task carry; None if they carry none.
        known: descendants that were recorded earlier.
        variable: the environment variable with the token; None for that of tasks, which mark their forks, too.
    """

    def __init__(
        self,
        root: ProcessIdentity,
        token: str | None = None,
        known: Iterable[ProcessIdentity] = (),
        variable: str | None = None,
    ) -> None:
        self.root = root
        self.pid = root.pid
        self.token = token
        self._variable = variable
        self._known = frozenset((*known, root))
        self._lock = threading.Lock()

    @property
    def known(self) -> frozenset[ProcessIdentity]:
        """The members at the last `update` or `search`."""
        return self._known

    def adopt(self, others: Iterable[ProcessIdentity]) -> None:
        """Add processes as members. Their descendants become members, too."""
        with self._lock:
            self._known |= {process for process in others if process.exists()}

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
            found: set[ProcessIdentity] = set()
            todo = set(self._known)
            while todo:
                process = todo.pop()
                children = [child for pid in _children(process.pid) if (child := stat_of(pid)) is not None]
                if process.exists():  # checked after reading its children, so they are this process's
                    found.add(process)
                    todo |= {child.identity for child in children if child.parent == process.pid} - found
            self._known = frozenset(found)

    def search(self, just_ended: bool = False) -> list[ProcessIdentity]:
        """Look through all processes of the machine. Return every member, even if no `update` saw it.

        Args:
            just_ended: whether the root may have ended, but too recently for its pid to be in use again.
        """
        with self._lock:
            stats = _all_stats()
            members = {pid for pid, stat in stats.items() if stat.identity in self._known}
            led = {pid for pid, stat in stats.items() if self.pid in (stat.group, stat.session)}
            # The kernel gives no new process the number of a group that has members. So the group is still the root's
            # if we know one of its members, or if there was no time to use the number again.
            reused = self.pid in stats and stats[self.pid].identity != self.root
            if not reused and (just_ended or led & members):
                members |= led
            members |= {pid for pid in stats.keys() - members if self._has_token(stats[pid])}
            children: dict[int, list[int]] = {}
            for pid, stat in stats.items():
                children.setdefault(stat.parent, []).append(pid)
            new = members
            while new := {child for pid in new for child in children.get(pid, ())} - members:
                members |= new
            self._known = frozenset(stats[pid].identity for pid in members)
            return list(self._known)

    def _has_token(self, stat: ProcessStat) -> bool:
        """Return whether a process carries the task's token. A process older than the root can't."""
        if self.token is None or stat.started < self.root.started or stat.is_zombie:
            return False
        if f"{self._variable or TOKEN_VARIABLE}={self.token}".encode() in environ_of(stat.identity):
            return True
        return self._variable is None and f"{FORK_MARK}{self.token} ".encode() in read_of_process(stat.pid, "maps")


def _all_stats() -> dict[int, ProcessStat]:
    """Return the stats of all processes by pid, including those that start while we read others."""
    stats: dict[int, ProcessStat] = {}
    listed: set[int] = set()
    for _ in range(LISTINGS):
        new = set(pids()) - listed
        listed |= new
        stats |= {pid: found for pid in new if (found := stat_of(pid)) is not None}
    return stats


def _children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended.

    Raises:
        OSError: as `read_of_process`.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except GONE_OR_ANOTHER_USERS:
        return []
    return [int(child) for thread in threads for child in read_of_process(pid, f"task/{thread}/children").split()]


# -- end the processes -------------------------------------------------------------------------------------------------

SAY_EVERY_S = 10.0
"""A long wait for killed processes is logged at this interval."""
BRISK_S, BRISKLY_S, SLOWLY_S = 1.0, 0.02, 0.5
"""Killed processes are searched for at an interval, which is longer after the first second."""


def end_processes(
    found: Iterable[ProcessIdentity],
    search: Callable[[], Iterable[ProcessIdentity]],
    timeout_s: float = 10.0,
    grace_s: float = 0.0,
) -> list[str]:
    """SIGKILL processes, and those that they start meanwhile, until none is left.

    Block until they are gone, or for ``grace_s`` and ``timeout_s`` seconds. A zombie counts as gone once none of its
    threads runs, since it holds neither memory nor chips.

    Args:
        found: the processes, as a search has just found them.
        search: finds them again; not called if none of ``found`` runs.
        timeout_s: seconds to wait after the SIGKILL.
        grace_s: seconds between a SIGTERM and the SIGKILL; 0 sends no SIGTERM.

    Returns:
        The processes that still run, as ``pid <n>``.
    """
    left = _running(found)
    if grace_s and left:
        for process in left:
            process.signal(signal.SIGTERM)
        wait_until_ended(left, grace_s)
        left = _running(search())
    said, began = 0.0, time.monotonic()
    while left:
        for process in left:
            process.signal(signal.SIGKILL)
        waited = time.monotonic() - began
        wait_until_ended(left, BRISKLY_S if waited < BRISK_S else SLOWLY_S)
        if waited > timeout_s:
            return _names(left)
        if waited // SAY_EVERY_S > said and (names := _names(left)):
            said = waited // SAY_EVERY_S
            logger.warning("%s: killed %.0f s ago and not gone yet; much memory takes long", ", ".join(names), waited)
        left = _running({*left, *search()})  # a dying process may have forked
    return []


def _names(processes: Iterable[ProcessIdentity]) -> list[str]:
    return sorted(f"pid {process.pid}" for process in _running(processes))


def _running(processes: Iterable[ProcessIdentity]) -> list[ProcessIdentity]:
    return [process for process in processes if process.runs()]
