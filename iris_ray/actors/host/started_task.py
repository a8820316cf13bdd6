"""The mark that a task process leaves when user code begins: it tells its host which task's output it prints."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from iris_ray.actors.host.host_directory import started_mark


@dataclass(frozen=True, slots=True)
class StartedTask:
    """The task that runs in a process.

    Attributes:
        job_id, task_index, attempt: which.
        num_tasks: how many tasks its job has.
        label: marks the task's output in the driver's terminal.
    """

    job_id: str
    task_index: int
    attempt: int
    num_tasks: int
    label: str

    def write(self, directory: Path, pid: int) -> None:
        """Write the mark into the host's directory."""
        mark = started_mark(directory, pid)
        mark.parent.mkdir(mode=0o700, exist_ok=True)
        mark.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def read(directory: Path, pid: int) -> "StartedTask | None":
        """Return the task that runs in a process; None if none has started, or the mark is not complete yet."""
        try:
            return StartedTask(**json.loads(started_mark(directory, pid).read_text()))
        except (OSError, ValueError):
            return None
