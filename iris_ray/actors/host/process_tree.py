"""A task's process and what descends from it, noted while it lives: once it has ended they are nobody's children.

A pid names one process only together with when that started. Whoever is noted here was seen as the child of one who
was, or in the process group or session that the task's own process leads; nobody else is taken for a relative.
"""

import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What the kernel says about a process in one look.

    Attributes:
        pid, parent, group, session: numbers of processes.
        started: clock ticks since boot, so that it stays the same whatever the clock does.
    """

    pid: int
    parent: int
    group: int
    session: int
    started: int


def stat_of(pid: int) -> ProcessStat | None:
    """None if there is no such process; one that nobody has reaped still is there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessStat(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def runs_since(pid: int, started: int) -> bool:
    """Whether the process that started then is still there, and not another of its pid."""
    found = stat_of(pid)
    return found is not None and found.started == started


class ProcessTree:
    """The relatives of one task's process.

    Args:
        pid, started: the process.
        known: descendants that were noted earlier.
    """

    def __init__(self, pid: int, started: int, known: Iterable[tuple[int, int]] = ()) -> None:
        self.pid = pid
        self.started = started
        self._known = {**dict(known), pid: started}
        self._lock = threading.Lock()

    @property
    def known(self) -> dict[int, int]:
        """The pids of those who were there at the last look, and when each started."""
        return dict(self._known)

    def look(self) -> bool:
        """Note who has come and who has gone; whether anybody has.

        Costs 10 µs for each thread of the tree, however many processes the machine has.
        """
        with self._lock:
            found: dict[int, int] = {}
            todo = list(self._known.items())
            while todo:
                pid, started = todo.pop()
                children = [] if pid in found else [child for number in _children(pid) if (child := stat_of(number))]
                if runs_since(pid, started):  # asked after its children: so they are children of this one
                    found[pid] = started
                    todo += [(child.pid, child.started) for child in children if child.parent == pid]
            changed, self._known = found != self._known, found
            return changed

    def gather(self, just_ended: bool = False) -> list[psutil.Process]:
        """Everybody who can be told to belong to it, also those whom no look has seen. Looks at all processes.

        Args:
            just_ended: the task's process may be gone, but nobody can have got its number yet.
        """
        with self._lock:
            everybody = {pid: found for pid in psutil.pids() if (found := stat_of(pid)) is not None}
            ours = {pid for pid, one in everybody.items() if self._known.get(pid) == one.started}
            led = {pid for pid, one in everybody.items() if self.pid in (one.group, one.session)}
            # The kernel gives nobody the number of a group that has a member. So if one of its members is known it
            # still is ours, and also if there was no time to use the number again.
            is_stranger = self.pid in everybody and everybody[self.pid].started != self.started
            if not is_stranger and (just_ended or led & ours):
                ours |= led
            while new := {pid for pid, one in everybody.items() if one.parent in ours} - ours:
                ours |= new
            self._known = {pid: everybody[pid].started for pid in ours}
        return self.members()

    def members(self) -> list[psutil.Process]:
        """Those who were there at the last look and still are."""
        found: list[psutil.Process] = []
        for pid, started in self.known.items():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if runs_since(pid, started):
                    found.append(process)
        return found


def _children(pid: int) -> list[int]:
    """Pids of its children now; none where the kernel was built without that list."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # it has ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found
