"""The files and signals through which the processes of a task and its TPUHostActor talk, and a job's directory."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import ClassVar

from iris_ray.model.membership import Membership
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.processes.identity import ProcessIdentity

_OWNED = ".owned"
_MEMBER = re.compile(r"([0-9]{1,9}) ([0-9]{1,18})")
OUTPUT_DIR = "IRIS_OUTPUT_DIR"
"""The variable with a task's directory for files that outlive its attempt; the service ``outputs`` sets it."""
STATUS_CHARACTERS = 200
"""The limit for the characters of a task's status."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of one task process. Their paths begin with ``prefix``."""

    prefix: str

    VARIABLE: ClassVar[str] = "IRIS_RAY_TASK_FILES"
    """The environment variable with the prefix, in a task's process and in all that it starts."""

    @staticmethod
    def of_process(directory: Path, pid: int) -> "TaskFiles":
        """Return the files of a task process in its host's directory."""
        return TaskFiles(str(directory / "tasks" / str(pid)))

    @staticmethod
    def with_owned(directory: Path) -> "list[TaskFiles]":
        """Return the files of all task processes in a host's directory that may own something; see `owned`.

        Raises:
            OSError: as `files_in`.
        """
        found = [path for path in files_in(directory / "tasks") if path.suffix == _OWNED]
        return [TaskFiles(str(path.with_suffix(""))) for path in sorted(found)]

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
    def host_directory(self) -> Path:
        """The directory of the task's host; see `of_process`."""
        return Path(self.prefix).parents[1]

    @property
    def started(self) -> Path:
        """The mark that the task process writes when user code begins; it names the task."""
        return Path(f"{self.prefix}.started")

    def owned(self, service: str) -> Path:
        """The record of what the task has started outside its process tree, such as a container, by a service's name.

        The service ends that together with the task's processes (see `Service.ends_owned`) and removes the record.
        """
        return self.all_owned / service

    @property
    def all_owned(self) -> Path:
        """The folder with the records of `owned`. Most tasks have none."""
        return Path(f"{self.prefix}{_OWNED}")

    @property
    def output(self) -> Path:
        """The FIFO that the task prints into."""
        return Path(f"{self.prefix}.output")

    @property
    def notice(self) -> Path:
        """The task's notice as JSON: kind, reason and deadline."""
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
    def rhythm(self) -> Path:
        """The latest `Rhythm` that a process of the task has told, as JSON."""
        return Path(f"{self.prefix}.rhythm")

    @property
    def stacks(self) -> Path:
        """The stacks of the task's process, if it was asked for them."""
        return Path(f"{self.prefix}.stacks")

    @property
    def status(self) -> Path:
        """The task's latest status: one line of at most `STATUS_CHARACTERS`."""
        return Path(f"{self.prefix}.status")

    @property
    def first_steps(self) -> Path:
        """The first steps of each process of the task: a line of step and time for each."""
        return Path(f"{self.prefix}.first_steps")

    @property
    def marked(self) -> Path:
        """The seconds that the task has marked before its first step and after it, as JSON."""
        return Path(f"{self.prefix}.marked")

    @property
    def last_save(self) -> Path:
        """The seconds between the task's latest two saves that outlive its hosts, as text, or nothing.

        The file's time is the end of the latest one.
        """
        return Path(f"{self.prefix}.last_save")

    @property
    def asks(self) -> Path:
        """Exists once the task has called `preemption_notice`: it will see a notice."""
        return Path(f"{self.prefix}.asks")

    @property
    def membership(self) -> Path:
        """The running slices of the job, as JSON, where each slice is a gang by itself."""
        return Path(f"{self.prefix}.membership")

    @property
    def members(self) -> Path:
        """Processes that belong to the task though it has not started them: a line of pid and start tick for each.

        Others may belong to it by its token. As long as none can, this file does not exist.
        """
        return Path(f"{self.prefix}.members")

    def expect_members(self) -> None:
        """Have the task's host look for processes that carry its token, even if the task itself leaves none."""
        open(self.members, "a").close()

    def add_member(self, process: ProcessIdentity) -> None:
        """Have a process end with the task."""
        with open(self.members, "a", encoding="ascii") as file:
            file.write(f"{process.pid} {process.started}\n")

    def read_members(self) -> set[ProcessIdentity]:
        """Return the processes that `add_member` has named.

        Raises:
            OSError: the disk can't read them for now. Without them, a process might be taken for ended.
        """
        try:
            lines = self.members.read_text(encoding="ascii", errors="replace").splitlines()
        except FileNotFoundError:
            return set()
        whole = filter(None, map(_MEMBER.fullmatch, lines))  # a line may be torn, after a power failure
        return {ProcessIdentity(int(pid), int(started)) for pid, started in (match.groups() for match in whole)}

    def write_notice(self, notice: Notice) -> None:
        """Write a notice for the task, in place of an earlier one, whole or not at all."""
        content = {"kind": notice.kind.value, "reason": notice.reason, "deadline": notice.deadline}
        write_whole(self.notice, json.dumps(content).encode())

    def read_notice(self) -> Notice | None:
        """Return the task's notice; None if it has none, or the disk can't read it for now."""
        try:
            found = json.loads(self.notice.read_text())
        except (OSError, ValueError):  # a faulty disk must not end a training run
            return None
        return Notice(NoticeKind(found["kind"]), found["reason"], found["deadline"])

    def read_membership(self) -> Membership | None:
        """Return the slices of the job that run; None if they are not known, or the disk can't read them for now."""
        try:
            return Membership.of_json(self.membership.read_text())
        except (OSError, ValueError, TypeError):
            return None

    def read_status(self) -> str | None:
        """Return the task's latest status; None if there is none, or the disk can't read it for now."""
        try:
            with open(self.status, encoding="utf-8", errors="replace") as file:
                return file.read(STATUS_CHARACTERS)
        except OSError:
            return None

    def remove(self) -> None:
        """Remove all files that exist, except the FIFO, and records of `owned`, which go with what they name."""
        said = self.heartbeat, self.rhythm, self.stacks, self.status, self.first_steps, self.marked, self.last_save
        for path in (self.started, self.notice, self.saved, self.members, self.membership, self.asks, *said):
            remove_file(path)


def may_exist(path: Path) -> bool:
    """Return whether there is such a file or directory, or a faulty disk can't tell."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def remove_file(path: Path) -> None:
    """Remove a file if it exists and its disk lets us."""
    with contextlib.suppress(OSError):
        path.unlink()


# -- job directory -----------------------------------------------------------------------------------------------------

MEMORY = Path("/dev/shm")
"""The file system in memory that job directories use, if it has room."""


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """The files of a job on one host. They are locked, kept and removed as a whole.

    Attributes:
        path: the directory; no other user can read it.
    """

    path: Path

    @staticmethod
    def of_local_dir(local_dir: str) -> "JobDirectory":
        """Return the directory that has a task's ``local_dir``."""
        return JobDirectory(Path(local_dir).parent)

    @property
    def files(self) -> Path:
        """The tasks' ``local_dir``, with nothing of iris_ray in it."""
        return self.path / "files"

    @property
    def incoming(self) -> Path:
        """Files that the file service is receiving or removing."""
        return self.path / "incoming"

    @property
    def token(self) -> Path:
        """The file with the job's token, which callers of the file service must have."""
        return self.path / "token"

    def write_token(self, token: str) -> None:
        """Let the file service serve this directory to callers with the token."""
        write_whole(self.token, token.encode())

    def read_token(self) -> str:
        """Return the job's token; "" if the file service does not serve this directory."""
        with contextlib.suppress(OSError):
            return self.token.read_text()
        return ""


# -- local run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The directory of a gang that runs in processes of one machine, without Ray: its tasks' files and endpoints."""

    directory: Path

    VARIABLE: ClassVar[str] = "IRIS_RAY_LOCAL_RUN"
    """The environment variable with the directory, in each task and all that it starts."""

    @staticmethod
    def of_this_task() -> "LocalRun | None":
        """Return the run of the task that this process belongs to; None on a cluster, and outside a task."""
        directory = os.environ.get(LocalRun.VARIABLE)
        return None if directory is None else LocalRun(Path(directory))

    def files(self, task_index: int) -> TaskFiles:
        return TaskFiles(str(self.directory / str(task_index)))

    def launch_file(self, task_index: int) -> Path:
        """Return the path of the task's launch."""
        return self.directory / f"{task_index}.launch"

    def end_file(self, task_index: int) -> Path:
        """Return the path of the end of the task's function. The file exists only after the end."""
        return self.directory / f"{task_index}.end"

    def local_dir(self, task_index: int) -> Path:
        """Return the path of the task's own directory."""
        return self.directory / f"{task_index}.local"

    def output_dir(self, task_index: int) -> Path:
        """Return the path of the task's output directory, which goes with the run."""
        return self.directory / f"{task_index}.outputs"

    def has_ended(self, task_index: int) -> bool:
        return self.end_file(task_index).exists()

    def put(self, key: str, value: bytes) -> None:
        """Store a value under a key, in place of an earlier one, whole or not at all."""
        write_whole(self._path(key), value)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def _path(self, key: str) -> Path:
        return self.directory / f"{sha256(key.encode()).hexdigest()}.value"


def files_in(directory: Path) -> list[Path]:
    """Return the paths in a directory; none if there is no directory.

    Raises:
        OSError: it can't be read for now. `Path.glob` of Python 3.12 and later would find nothing in it.
    """
    try:
        return [directory / name for name in os.listdir(directory)]
    except FileNotFoundError:
        return []


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader finds the old file or the whole new one."""
    unfinished = Path(f"{path}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


# -- signals from a host to a running task process ---------------------------------------------------------------------

STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a task process print the stacks of all its threads, even if it hangs. No other software uses this number."""
LOOK_SIGNAL = signal.SIGRTMIN + 8
"""Makes a task process write its stacks to `TaskFiles.stacks`."""


def print_stacks_when_asked(files: TaskFiles) -> None:
    """Have this process print its stacks on `STACKS_SIGNAL`, and write them to their file on `LOOK_SIGNAL`.

    Raises:
        OSError: the file can't be created.
    """
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)  # not sys.stderr: user code may replace it
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    faulthandler.register(LOOK_SIGNAL, file=os.open(files.stacks, flags, 0o600), all_threads=True)


def survive_notices(files: TaskFiles) -> None:
    """Install a SIGTERM handler that ignores the signal if a notice came with it.

    Without a notice, SIGTERM has the same effect as before. User code may install a handler of its own afterwards.
    Forked children have the earlier handler again, so SIGTERM ends them at once, whenever it comes. With a handler of
    Python's, a child that waits for a lock may never hear it, and `multiprocessing.Pool` would wait for ever.
    """
    before, masks = signal.getsignal(signal.SIGTERM), threading.local()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.path.exists(files.notice):
            return
        if callable(before):
            before(number, frame)
        else:
            sys.exit(128 + number)

    def hold_back() -> None:
        masks.before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before_fork)

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        let_through()

    signal.signal(signal.SIGTERM, on_sigterm)
    os.register_at_fork(before=hold_back, after_in_parent=let_through, after_in_child=restore)
