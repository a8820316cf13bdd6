"""The process tree of a task: its process and the descendants, and how to end them all.

We record descendants while the task's process lives, because the kernel forgets the relation when that process ends.
A process is a member of the tree if we saw it as a child of a member or in the process group or session that the
task's process leads, if it carries the task's token, or if the task has named it (`TaskFiles.members`). No other
process is ended.

A program that a task starts carries the token in its environment. A fork shows the environment with which the task's
process started, before it had a token, so the token is also the name of memory that the kernel maps into forks.

A search reads files of each process of the machine, and a host may have thousands of tasks. So searches share listings.
"""

import logging
import mmap
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import ClassVar
from weakref import WeakValueDictionary

from iris_ray.processes.identity import ProcessIdentity, ProcessStat, environ_of, stat_of, wait_until_ended
from iris_ray.processes.subtree import KERNEL_LISTS_CHILDREN, children, pids, read_of_process

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "IRIS_RAY_TASK_TOKEN"
"""The environment variable with a task's token. All programs that the task starts inherit it."""
FORK_MARK = "iris-ray-task-"
"""The name of the memory that a task's process and its forks have mapped is this, then the token."""
LOOKS = 3
"""The number of looks of a listing: a daemon may start while its parent, already seen, ends."""

_MARKS = re.compile(FORK_MARK.encode() + rb"([^ \n]+) ")


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

    _of_roots: ClassVar[WeakValueDictionary[ProcessIdentity, "ProcessTree"]] = WeakValueDictionary()
    """The trees of tasks that this process knows, by root."""

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
        if token is not None and variable is None:
            ProcessTree._of_roots.setdefault(root, self)

    @staticmethod
    def token_of_root(process: ProcessIdentity) -> str | None:
        """Return the token of a task whose own process this is; None if this process knows no such task."""
        tree = ProcessTree._of_roots.get(process)
        return None if tree is None else tree.token

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
                stats = [child for pid in children(process.pid) if (child := stat_of(pid)) is not None]
                if process.exists():  # checked after reading its children, so they are this process's
                    found.add(process)
                    todo |= {child.identity for child in stats if child.parent == process.pid} - found
            self._known = frozenset(found)

    def search(self, just_ended: bool = False, listing: "Listing | None" = None) -> list[ProcessIdentity]:
        """Look through all processes of the machine. Return every member, even if no `update` saw it.

        Args:
            just_ended: whether the root may have ended, but too recently for its pid to be in use again.
            listing: the listing to look through; None for the next one. Block until it is there.
        """
        listing = (listing or Listing.next()).read()
        carriers = set() if self.token is None else listing.carriers(self.token, self.root.started, self._variable)
        stats = listing.stats
        with self._lock:
            members = {process.pid for process in self._known if process in listing}
            # An update may have seen it after the listing.
            unlisted = {process for process in self._known if process not in listing and process.exists()}
            led = listing.led.get(self.pid, set())
            # The kernel gives no new process the number of a group that has members. So the group is still the root's
            # if we know one of its members, or if there was no time to use the number again.
            reused = self.pid in stats and self.root not in listing
            if not reused and (just_ended or led & members):
                members |= led
            new = members = members | carriers
            while new := {child for pid in new for child in listing.children.get(pid, ())} - members:
                members |= new
            self._known = frozenset(stats[pid].identity for pid in members) | unlisted
            return list(self._known)


class Listing:
    """A listing of all processes of the machine, which all searches share that ask for it before it begins.

    Attributes:
        stats: the stats of the processes by pid, including those that started while we read others.
        children, led: the pids of a process's children, and of those in the group or session that it leads, by its pid.

    Example:
        >>> listing = Listing.next()
        >>> found = [process for tree in trees for process in tree.search(listing=listing)]
    """

    _next: ClassVar["Listing"]
    _turn: ClassVar = threading.Lock()  # also for what was read of carriers

    def __init__(self) -> None:
        self.stats: dict[int, ProcessStat] = {}
        self.children: dict[int, list[int]] = {}
        self.led: dict[int, set[int]] = {}
        self._by_age: list[ProcessStat] = []
        self._unread: dict[str | None, list[ProcessStat]] = {}  # by variable, the youngest last
        self._carriers = defaultdict[tuple[str | None, bytes], set[int]](set)

    @staticmethod
    def next() -> "Listing":
        """Return the next listing that begins, so that it finds every process that exists now. Return at once."""
        return Listing._next

    def read(self) -> "Listing":
        """List the processes, unless another thread has done that. Block until they are listed, and return this.

        Raises:
            OSError: as `read_of_process`. Another call tries again.
        """
        with Listing._turn:
            if not self._by_age:
                Listing._next = Listing()  # for those who ask from now on
                self.stats = _all_stats()
                self.children, self.led = defaultdict(list), defaultdict(set)
                for pid, stat in self.stats.items():
                    self.children[stat.parent].append(pid)
                    self.led[stat.group].add(pid)
                    self.led[stat.session].add(pid)
                self._by_age = sorted(self.stats.values(), key=lambda stat: stat.started)  # now it is whole
        return self

    def __contains__(self, process: ProcessIdentity) -> bool:
        found = self.stats.get(process.pid)
        return found is not None and found.identity == process

    def carriers(self, token: str, since: int, variable: str | None) -> set[int]:
        """Return the pids of processes that carry a token.

        Args:
            token, variable: as for `ProcessTree`.
            since: the start of the tree's root. No older process can carry its token, so those are not read.

        Raises:
            OSError: as `read_of_process`.
        """
        with Listing._turn:
            unread = self._unread.setdefault(variable, [*self._by_age])
            while unread and unread[-1].started >= since:
                for found in _tokens_of(unread[-1], variable):
                    self._carriers[variable, found].add(unread[-1].pid)
                unread.pop()
            found_pids = self._carriers.get((variable, token.encode()), ())
            return {pid for pid in found_pids if self.stats[pid].started >= since}


Listing._next = Listing()


def _all_stats() -> dict[int, ProcessStat]:
    """Return the stats of all processes by pid, including those that start while we read others."""
    stats: dict[int, ProcessStat] = {}
    listed: set[int] = set()
    for _ in range(LOOKS):
        new = set(pids()) - listed
        listed |= new
        stats |= {pid: found for pid in new if (found := stat_of(pid)) is not None}
    return stats


def _tokens_of(stat: ProcessStat, variable: str | None) -> list[bytes]:
    """Return the tokens that a process carries in a variable, or as a process of a task."""
    if stat.is_zombie:
        return []
    name = f"{variable or TOKEN_VARIABLE}=".encode()
    tokens = [line.removeprefix(name) for line in environ_of(stat.identity) if line.startswith(name)]
    if variable:
        return tokens
    if (own := ProcessTree.token_of_root(stat.identity)) is not None:  # to read all that it has mapped takes long
        return [*tokens, own.encode()]
    return [*tokens, *_MARKS.findall(read_of_process(stat.pid, "maps"))]


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
            return names_of_running(left)
        if waited // SAY_EVERY_S > said and (names := names_of_running(left)):
            said = waited // SAY_EVERY_S
            logger.warning("%s: killed %.0f s ago and not gone yet; much memory takes long", ", ".join(names), waited)
        left = _running({*left, *search()})  # a dying process may have forked
    return []


def names_of_running(processes: Iterable[ProcessIdentity]) -> list[str]:
    """Return those of the processes that run, as ``pid <n>``."""
    return sorted(f"pid {process.pid}" for process in _running(processes))


def _running(processes: Iterable[ProcessIdentity]) -> list[ProcessIdentity]:
    return [process for process in processes if process.runs()]
