"""The task processes of one host: which were ours, which are left, and how to be sure that they are gone.

Each task process is written down in the host's directory, with the start time that makes a pid
unique. A later actor on the same host finds there what an earlier one may have left behind.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil


def host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where iris_ray keeps its files on this host: ``$IRIS_RAY_HOST_DIR``, or a directory per user under /tmp."""
    configured = environ.get("IRIS_RAY_HOST_DIR")
    path = Path(configured) if configured else Path(tempfile.gettempdir()) / f"iris_ray-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


class ProcessLedger:
    """Records task processes of this host in ``<directory>/tasks/<pid>.json``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tasks"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def record(self, process: psutil.Process) -> None:
        """Write down that this process is ours."""
        entry = {"pid": process.pid, "started": process.create_time()}
        (self._directory / f"{process.pid}.json").write_text(json.dumps(entry))

    def forget(self, pid: int) -> None:
        (self._directory / f"{pid}.json").unlink(missing_ok=True)

    def end_leftovers(self) -> list[str]:
        """Kill what earlier actors left behind; return who could not be ended in 10 s."""
        stubborn: list[str] = []
        for path in self._directory.glob("*.json"):
            try:
                entry = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # half written, or another actor was faster
            left = end_task(_family_of(entry["pid"], entry["started"]), None)
            if left:
                stubborn += left
            else:
                self.forget(entry["pid"])
        return stubborn


def _family_of(pid: int, started: float) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return family(process) if abs(process.create_time() - started) < 0.05 else []
    except psutil.NoSuchProcess:
        return []


def family(process: psutil.Process) -> list[psutil.Process]:
    """A task's process and all its descendants. To be asked before it ends: then they are nobody's children."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_task(known: list[psutil.Process], task_id: str | None, timeout_s: float = 10.0) -> list[str]:
    """SIGKILL the known processes of a task, and whoever else carries the task's id in its environment.

    Blocks until they are gone, or for ``timeout_s`` seconds. Returns who is left.
    """
    ours = [*known, *(_carriers(task_id) if task_id else ())]
    for one in ours:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(ours, timeout=timeout_s)
    return [f"pid {one.pid}" for one in alive]


def _carriers(task_id: str) -> list[psutil.Process]:
    """Processes that were started by the task and left its tree, such as daemons with a session of their own."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("IRIS_TASK_ID") == task_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
