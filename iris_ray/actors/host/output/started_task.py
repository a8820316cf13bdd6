"""The mark that a task process leaves when user code begins: it tells its host which task's output it prints."""

import dataclasses
import json
from dataclasses import dataclass

from iris_ray.actors.wire.task_files import TaskFiles


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

    def write(self, files: TaskFiles) -> None:
        """Write the mark among the files of the task's process."""
        files.started.parent.mkdir(mode=0o700, exist_ok=True)
        files.started.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def read(files: TaskFiles) -> "StartedTask | None":
        """Return the task that runs in a process; None if none has started, or the mark is not complete yet."""
        try:
            return StartedTask(**json.loads(files.started.read_text()))
        except (OSError, ValueError):
            return None
