"""The directory of a gang that runs in processes of one machine, without Ray: its tasks' files, and their endpoints."""

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from iris_ray.actors.wire.task_files import TaskFiles


@dataclass(frozen=True, slots=True)
class LocalRun:
    """One run.

    Attributes:
        directory: of the run.
    """

    directory: Path

    VARIABLE: ClassVar[str] = "IRIS_RAY_LOCAL_RUN"
    """The environment variable with the directory, in each task and all that it starts."""

    @staticmethod
    def of_this_task() -> "LocalRun | None":
        """Return the run of the task that this process belongs to; None on a cluster, and outside a task."""
        directory = os.environ.get(LocalRun.VARIABLE)
        return None if directory is None else LocalRun(Path(directory))

    def files(self, task_index: int) -> TaskFiles:
        """Return the files that every task has."""
        return TaskFiles(str(self.directory / str(task_index)))

    def launch_file(self, task_index: int) -> Path:
        """What the task is to run."""
        return self.directory / f"{task_index}.launch"

    def end_file(self, task_index: int) -> Path:
        """How the task's function has ended; there is no such file before."""
        return self.directory / f"{task_index}.end"

    def local_dir(self, task_index: int) -> Path:
        """A directory of the task's own."""
        return self.directory / f"{task_index}.local"

    def has_ended(self, task_index: int) -> bool:
        return self.end_file(task_index).exists()

    def put(self, key: str, value: bytes) -> None:
        """Keep a value under a key, in place of an earlier one. A reader sees all of it or nothing."""
        write_whole(self._path(key), value)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def _path(self, key: str) -> Path:
        return self.directory / f"{sha256(key.encode()).hexdigest()}.value"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader finds the old file or the whole new one."""
    unfinished = Path(f"{path}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)
