"""How many processes the kernel has killed because memory was used up, and whether that was a moment ago."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")  # a container's own limit (cgroup v2)


LOOKS_KEPT = 60
"""How many looks back a kill still counts. A look a second: a process of hundreds of GB takes a while to end."""


def oom_kills(files: tuple[Path, ...] = (VMSTAT, MEMORY_EVENTS)) -> int:
    """Return how many processes the kernel has killed for lack of memory, on this machine and in this container."""
    return sum(map(_count, files))


def _count(path: Path) -> int:
    """Return the file's ``oom_kill`` count; 0 if this kernel has no such file or count."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class RecentOomKills:
    """Knows whether the kernel has killed any process lately. What it killed long before explains no end.

    Args:
        count: returns how many it has killed in all.
    """

    def __init__(self, count: Callable[[], int] = oom_kills) -> None:
        self._count = count
        self._counts = deque([count()], LOOKS_KEPT)

    def look(self) -> None:
        """Remember how many there are by now; to be called once a second."""
        self._counts.append(self._count())

    def found(self) -> bool:
        """Return whether there were any since the oldest look that is remembered."""
        return self._count() > self._counts[0]
