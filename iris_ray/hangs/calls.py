"""What hosts answer about the tasks of a gang that makes no progress."""

from dataclasses import dataclass
from typing import Protocol

from iris_ray.actors.protocol.services import calls_of


@dataclass(frozen=True, slots=True)
class TaskLook:
    """The activity of a task's process while its gang makes no progress.

    Attributes:
        state: the kernel's letter if the process, or one that it has started, does not run: T (stopped) or D (waits for
            a disk or a device); else "".
        cpu: how many cores it and its descendants use.
        stack: the frames of its main thread, as py-spy shows them, the innermost first; empty if they are not known.
        took_s: how long the look took on the host; seconds.
        late_s: how much longer the answer took than the look; seconds.
    """

    state: str
    cpu: float
    stack: tuple[str, ...]
    took_s: float
    late_s: float = 0.0


@calls_of("hangs")
class HangCalls(Protocol):
    """Calls of a host, about the process of a task that runs there."""

    async def look(self, pid: int) -> TaskLook:
        """Return the activity of a task's process. This takes seconds."""

    async def dump_stacks(self, pid: int) -> None:
        """Have a task print the stacks of its threads into its log."""
