"""The task processes of one host: which were ours, which are left, and how to be sure that they are gone.

Each process that is about to run a task is written down in the host's directory, with the start time that makes a pid
unique. A later actor on the same host finds there what an earlier one may have left behind.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil


def host_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for iris_ray's files of this host: ``$IRIS_RAY_HOST_DIR``, or one per user under the temp directory."""
    configured = environ.get("IRIS_RAY_HOST_DIR")
    path = Path(configured) if configured else Path(tempfile.gettempdir()) / f"iris_ray-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


class ProcessLedger:
    """Records task processes of this host in ``<directory>/tasks/<pid>.json``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "tasks"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def record(self, process: psutil.Process, task_id: str) -> None:
        """Write down that this process is about to run that task."""
        entry = {"pid": process.pid, "started": process.create_time(), "task_id": task_id}
        (self._directory / f"{process.pid}.json").write_text(json.dumps(entry))

    def forget(self, pid: int) -> None:
        (self._directory / f"{pid}.json").unlink(missing_ok=True)

    def end_leftovers(self, keep: int | None = None) -> list[str]:
        """Kill what earlier actors left behind, except process ``keep``; return who could not be ended in 10 s."""
        stubborn: list[str] = []
        for path in self._directory.glob("*.json"):
            try:
                entry = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # half written, or another actor was faster
            if entry["pid"] == keep:
                continue
            left = end_task(_same_process(entry["pid"], entry["started"]), entry["task_id"])
            if left:
                stubborn += left
            else:
                self.forget(entry["pid"])
        return stubborn


def _same_process(pid: int, started: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - started) < 0.05 else None
    except psutil.NoSuchProcess:
        return None


def end_task(process: psutil.Process | None, task_id: str, timeout_s: float = 10.0) -> list[str]:
    """SIGKILL a task's process, its descendants, and whoever else carries the task's id in its environment.

    Blocks until they are gone, or for ``timeout_s`` seconds. Returns who is left, as "name (pid)".
    """
    ours: list[psutil.Process] = []
    if process is not None:
        ours = [process, *_descendants(process)]
    ours += _carriers(task_id)
    for one in ours:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(ours, timeout=timeout_s)
    return [f"pid {one.pid}" for one in alive]


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


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
