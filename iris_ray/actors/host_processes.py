"""The task processes of one host: which were ours, which are left, and how to be sure that they are gone.

Each task process is written down in the host's directory, with the start time that makes a pid
unique. A later actor on the same host finds there what an earlier one may have left behind.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

TOKEN_VARIABLE = "IRIS_RAY_TASK_TOKEN"
"""Set in a task's process, so that everything it starts inherits it and can be found again."""


def host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where iris_ray keeps its files on this host: ``$IRIS_RAY_HOST_DIR``, or a directory per user under /tmp."""
    configured = environ.get("IRIS_RAY_HOST_DIR")
    path = Path(configured) if configured else Path(tempfile.gettempdir()) / f"iris_ray-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to somebody else; remove it, or set IRIS_RAY_HOST_DIR to one of yours")
    return path


def started_mark(directory: Path, pid: int) -> Path:
    """The file that a task process leaves when user code begins to run in it; it says which task it is."""
    return directory / "tasks" / f"{pid}.started"


def output_pipe(directory: Path, pid: int) -> Path:
    """The FIFO that a task process prints into."""
    return directory / "tasks" / f"{pid}.output"


class ProcessLedger:
    """Records task processes of this host in ``<directory>/tasks/<pid>.json``.

    Tasks that share the host with others, because they use no chips, are recorded in ``<directory>/shared-tasks``:
    what is found there may belong to an actor that lives.
    """

    def __init__(self, directory: Path, exclusive: bool = True) -> None:
        self._marks = directory
        self._directory = directory / ("tasks" if exclusive else "shared-tasks")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def record(self, process: psutil.Process, token: str) -> None:
        """Write down that this process is ours, and the token that its children will carry."""
        entry = {"pid": process.pid, "started": _start_ticks(process.pid), "token": token}
        started_mark(self._marks, process.pid).unlink(missing_ok=True)  # of an earlier process of that pid
        unfinished = self._directory / f"{process.pid}.unfinished"
        unfinished.write_text(json.dumps(entry))
        unfinished.replace(self._directory / f"{process.pid}.json")

    def has_started(self, pid: int) -> bool:
        """Whether user code has begun to run in that process."""
        return started_mark(self._marks, pid).exists()

    def forget(self, pid: int) -> None:
        (self._directory / f"{pid}.json").unlink(missing_ok=True)
        output_pipe(self._marks, pid).unlink(missing_ok=True)
        started_mark(self._marks, pid).unlink(missing_ok=True)

    def end_leftovers(self) -> list[str]:
        """Kill what earlier actors left behind; return who could not be ended in 10 s."""
        stubborn: list[str] = []
        for path in self._directory.glob("*.json"):
            try:
                entry = json.loads(path.read_text())
                pid, started, token = int(entry["pid"]), int(entry["started"]), str(entry["token"])
            except (OSError, ValueError, KeyError, TypeError):  # not ours, or another actor was faster
                path.unlink(missing_ok=True)
                continue
            left = end_task(_family_of(pid, started), token)
            if left:
                stubborn += left
            else:
                self.forget(pid)
        return stubborn


def _family_of(pid: int, started: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return family(process) if _start_ticks(pid) == started else []
    except (psutil.NoSuchProcess, OSError, ValueError):
        return []


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its pid it names one process, whatever the clock does."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def family(process: psutil.Process) -> list[psutil.Process]:
    """A task's process and all its descendants. To be asked before it ends: then they are nobody's children."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_task(known: list[psutil.Process], token: str, timeout_s: float = 10.0) -> list[str]:
    """SIGKILL the known processes of a task, and whoever else carries its token in the environment.

    Blocks until they are gone, or for ``timeout_s`` seconds. Returns who is left.
    """
    deadline = time.monotonic() + timeout_s
    left = known
    while left := [one for one in (*left, *_carriers(token)) if _runs(one)]:  # again: a dying one may have forked
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                one.kill()
        psutil.wait_procs(left, timeout=0.02)
        if time.monotonic() > deadline:
            return sorted({f"pid {one.pid}" for one in left})
    return []


def _runs(process: psutil.Process) -> bool:
    """Whether it still does anything; a zombie that nobody reaps holds neither memory nor chips."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _carriers(token: str) -> list[psutil.Process]:
    """Processes that the task started and that left its tree, such as daemons with a session of their own."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
