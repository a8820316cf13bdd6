"""The files and signals through which the processes of a task and its TPUHostActor talk, and their token."""

import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import ClassVar

from iris_ray.model.notices import Notice, NoticeKind

TOKEN_VARIABLE = "IRIS_RAY_TASK_TOKEN"
"""The environment variable with a task's token. All processes that the task starts inherit it."""
STATUS_CHARACTERS = 200
"""How long the words of a task about itself may be."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of one task process.

    Attributes:
        prefix: the part that their paths share.
    """

    prefix: str

    VARIABLE: ClassVar[str] = "IRIS_RAY_TASK_FILES"
    """The environment variable with the prefix, in a task's process and in all that it starts."""

    @staticmethod
    def of_process(directory: Path, pid: int) -> "TaskFiles":
        """Return the files of a task process in its host's directory."""
        return TaskFiles(str(directory / "tasks" / str(pid)))

    @staticmethod
    def with_containers(directory: Path) -> "list[TaskFiles]":
        """Return the files of all task processes in a host's directory whose containers may still be there."""
        return [TaskFiles(str(path.with_suffix(""))) for path in (directory / "tasks").glob("*.container")]

    @staticmethod
    def of_this_task() -> "TaskFiles | None":
        """Return the files of the task that this process belongs to; None outside a task."""
        prefix = os.environ.get(TaskFiles.VARIABLE)
        return None if prefix is None else TaskFiles(prefix)

    @property
    def pid(self) -> str:
        """The number of the task's process."""
        return os.path.basename(self.prefix)

    @property
    def started(self) -> Path:
        """The mark that the task process writes when user code begins; it names the task."""
        return Path(f"{self.prefix}.started")

    @property
    def container(self) -> Path:
        """The record of the container in which the task's program runs."""
        return Path(f"{self.prefix}.container")

    @property
    def output(self) -> Path:
        """The FIFO that the task prints into."""
        return Path(f"{self.prefix}.output")

    @property
    def notice(self) -> Path:
        """The notice that the task has had, as JSON: kind, reason and deadline."""
        return Path(f"{self.prefix}.notice")

    @property
    def saved(self) -> Path:
        """Exists once the task has saved its state and may be ended."""
        return Path(f"{self.prefix}.saved")

    @property
    def heartbeat(self) -> Path:
        """The task's latest step as text, or nothing. The file's time is the time of the heartbeat."""
        return Path(f"{self.prefix}.heartbeat")

    @property
    def status(self) -> Path:
        """The task's latest words about itself: one line of at most `STATUS_CHARACTERS`."""
        return Path(f"{self.prefix}.status")

    @property
    def first_steps(self) -> Path:
        """The first steps that each process of the task has named: a line of step and time for each."""
        return Path(f"{self.prefix}.first_steps")

    @property
    def marked(self) -> Path:
        """The seconds that the task has marked before its first step and since then, as JSON."""
        return Path(f"{self.prefix}.marked")

    @property
    def members(self) -> Path:
        """Processes that belong to the task though it has not started them: a line of pid and start tick for each."""
        return Path(f"{self.prefix}.members")

    def add_member(self, pid: int, started: int) -> None:
        """Have a process that began at that clock tick since boot end with the task."""
        with open(self.members, "a", encoding="ascii") as file:
            file.write(f"{pid} {started}\n")

    def read_members(self) -> dict[int, int]:
        """Return the processes that `add_member` has named, with their start ticks."""
        try:
            lines = self.members.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return {}
        found = (line.split() for line in lines)  # a line may be torn: the machine has gone down, or the disk is full
        return {int(words[0]): int(words[1]) for words in found if len(words) == 2 and all(map(str.isdecimal, words))}

    def write_notice(self, notice: Notice) -> None:
        """Leave a notice for the task, in place of an earlier one. A reader sees all of it or nothing."""
        content = {"kind": notice.kind.value, "reason": notice.reason, "deadline": notice.deadline}
        unfinished = Path(f"{self.notice}.unfinished")
        unfinished.write_text(json.dumps(content))
        unfinished.replace(self.notice)

    def read_notice(self) -> Notice | None:
        """Return the notice that the task has had; None if it had none, or if that can't be read for now."""
        try:
            found = json.loads(self.notice.read_text())
        except (OSError, ValueError):  # a faulty disk is no reason to end a training run
            return None
        return Notice(NoticeKind(found["kind"]), found["reason"], found["deadline"])

    def read_status(self) -> str | None:
        """Return the task's latest words about itself; None if there are none, or if they can't be read for now."""
        try:
            with open(self.status, encoding="utf-8", errors="replace") as file:
                return file.read(STATUS_CHARACTERS)
        except OSError:
            return None

    def remove(self) -> None:
        """Remove all of them that exist, but the FIFO and the container's record, which goes with the container."""
        said = self.heartbeat, self.status, self.first_steps, self.marked
        for path in (self.started, self.notice, self.saved, self.members, *said):
            remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file if it exists and its disk lets us. Nothing depends on its end."""
    with contextlib.suppress(OSError):
        path.unlink()


# -- local run ---------------------------------------------------------------------------------------------------------
# The directory of a gang that runs in processes of one machine, without Ray: its tasks' files, and their endpoints.


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


# -- task signals ------------------------------------------------------------------------------------------------------
# The signals that a host sends to a running task process, and what the process does with them by default.

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a task process print the stacks of all its threads, whatever it does. No other software uses this number."""


def survive_notices(files: TaskFiles) -> None:
    """Install a SIGTERM handler that ignores the signal if a notice came with it.

    Without a notice, SIGTERM does what it did before. User code may install a handler of its own afterwards. Children
    that the task forks inherit this handler, but SIGTERM ends them as before.
    """
    before, task = signal.getsignal(signal.SIGTERM), os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() == task and os.path.exists(files.notice):
            return
        if callable(before):
            before(number, frame)
        else:
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, on_sigterm)
