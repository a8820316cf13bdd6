"""The record of a task's container, among the files of the task's process: it is written before the container starts.

A container is no child of ours. It would outlive the task, unless whoever ends the task's processes ends it, too: the
task's TPUHostActor, the reaper once that actor is gone, or the next actor on the host.
"""

import contextlib
import json
from dataclasses import dataclass

from iris_ray.actors.host.containers.engine import REMOVAL_S, ContainerEngine
from iris_ray.actors.wire.task_files import TaskFiles


@dataclass(frozen=True, slots=True)
class ContainerRecord:
    """The container of a task.

    Attributes:
        engine: the path of its engine's command.
        name: its name.
    """

    engine: str
    name: str

    def write(self, files: TaskFiles) -> None:
        """Write the record among the files of a task's process, whole or not at all."""
        unfinished = files.container.with_name(f"{files.container.name}.unfinished")
        unfinished.write_text(json.dumps({"engine": self.engine, "name": self.name}))
        unfinished.replace(files.container)

    @staticmethod
    def read(files: TaskFiles) -> "ContainerRecord | None":
        """Return the container of a task; None if it has none."""
        try:
            found = json.loads(files.container.read_text())
            return ContainerRecord(str(found["engine"]), str(found["name"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def end_container(files: TaskFiles, timeout_s: float = REMOVAL_S) -> list[str]:
    """End the container of a task and remove it, if it has one. Blocks until it is gone.

    Returns:
        What still runs after ``timeout_s`` seconds, as ``container <name> (<why>)``.
    """
    record = ContainerRecord.read(files)
    if record is None:
        return []
    problem = ContainerEngine(record.engine).remove(record.name, timeout_s)
    if problem is not None:
        return [f"container {record.name} ({problem})"]
    with contextlib.suppress(OSError):
        files.container.unlink(missing_ok=True)
    return []
