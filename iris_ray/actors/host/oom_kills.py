"""How many processes the kernel has killed because memory was used up."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")  # a container's own limit (cgroup v2)


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
