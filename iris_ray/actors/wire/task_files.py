"""The files through which a task process and its host's actor talk while user code runs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Through which a task process and its TPUHostActor talk while user code runs.

    Attributes:
        prefix: what their paths begin with.
    """

    prefix: str

    VARIABLE: ClassVar[str] = "IRIS_RAY_TASK_FILES"
    """Names the prefix in the environment of a task and of what it starts."""

    @staticmethod
    def of_process(directory: Path, pid: int) -> "TaskFiles":
        """Those of a task process, by the host's directory."""
        return TaskFiles(str(directory / "tasks" / str(pid)))

    @staticmethod
    def of_this_task() -> "TaskFiles | None":
        """Those of the task that this process belongs to; None outside a task."""
        prefix = os.environ.get(TaskFiles.VARIABLE)
        return None if prefix is None else TaskFiles(prefix)

    @property
    def notice(self) -> Path:
        """What the task is told; JSON."""
        return Path(f"{self.prefix}.notice")

    @property
    def saved(self) -> Path:
        """Its answer: it may be ended."""
        return Path(f"{self.prefix}.saved")

    @property
    def heartbeat(self) -> Path:
        """Its latest step, as text; when it was written counts."""
        return Path(f"{self.prefix}.heartbeat")

    def remove(self) -> None:
        for path in (self.notice, self.saved, self.heartbeat):
            path.unlink(missing_ok=True)
