"""Whether the kernel has killed somebody for want of memory."""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")  # as a container sees its own limit (cgroup v2)


def oom_kills(files: tuple[Path, ...] = (VMSTAT, MEMORY_EVENTS)) -> int:
    """How many processes of this machine or container the kernel has killed so far because memory was used up."""
    return sum(map(_count, files))


def _count(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:  # another kernel, or none of our business
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
