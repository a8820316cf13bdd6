"""The task processes of one host: which were ours, which are left, and how to be sure that they are gone.

Each task process is written down in the host's directory, with its descendants and the start times that make pids
unique. A later actor on the same host finds there what an earlier one may have left behind.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from iris_ray.actors.host.process_tree import ProcessTree, runs_since, stat_of
from iris_ray.actors.wire.task_files import TaskFiles

TOKEN_VARIABLE = "IRIS_RAY_TASK_TOKEN"
"""Set in a task's process, so that everything it starts inherits it and can be found again."""
TERM_GRACE_S = 1.0
"""How long what an earlier actor left behind may take to end by itself."""


STACKS_SIGNAL = signal.SIGRTMIN + 7
"""Makes a task process print the stacks of all its threads, whatever it does; a number that nobody else uses."""


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


def heed_notices(files: TaskFiles) -> None:
    """From now on SIGTERM that comes with a notice ends nobody who has not installed a handler of his own.

    Children that the task forks inherit this, and are ended as ever.
    """
    before, task = signal.getsignal(signal.SIGTERM), os.getpid()

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if os.getpid() == task and files.notice.exists():
            return
        if callable(before):
            before(number, frame)
        else:
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, on_sigterm)


class ProcessLedger:
    """Records task processes of this host in ``<directory>/tasks/<pid>.json``.

    Tasks that share the host with others, because they use no chips, are recorded in ``<directory>/shared-tasks``:
    what is found there is left over only if the process that has recorded it is gone.
    """

    def __init__(self, directory: Path, exclusive: bool = True) -> None:
        self._marks = directory
        self._exclusive = exclusive
        self._directory = directory / ("tasks" if exclusive else "shared-tasks")
        for used in (self._directory, output_pipe(directory, 0).parent):
            used.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()

    def record(self, tree: ProcessTree, token: str) -> None:
        """Write down that this process is ours, and the token that its children will carry."""
        started_mark(self._marks, tree.pid).unlink(missing_ok=True)  # of an earlier process of that pid
        TaskFiles.of_process(self._marks, tree.pid).remove()
        with self._lock:
            self._write(tree, token)

    def note_tree(self, tree: ProcessTree, token: str) -> None:
        """Look who has come to a recorded process, and write that down: a later actor would not find its parents."""
        if tree.look():
            with self._lock:
                if self._entry(tree.pid).exists():  # else it was forgotten meanwhile
                    self._write(tree, token)

    def _write(self, tree: ProcessTree, token: str) -> None:
        known = [[pid, started] for pid, started in tree.known.items() if pid != tree.pid]
        entry = {"pid": tree.pid, "started": tree.started, "token": token, "descendants": known}
        if (recorder := stat_of(os.getpid())) is not None:
            entry["recorder"] = [recorder.pid, recorder.started]
        unfinished = self._directory / f"{tree.pid}.unfinished"
        unfinished.write_text(json.dumps(entry))
        unfinished.replace(self._entry(tree.pid))

    def _entry(self, pid: int) -> Path:
        return self._directory / f"{pid}.json"

    def has_started(self, pid: int) -> bool:
        """Whether user code has begun to run in that process."""
        return started_mark(self._marks, pid).exists()

    def forget(self, pid: int) -> None:
        with self._lock:
            self._entry(pid).unlink(missing_ok=True)
        output_pipe(self._marks, pid).unlink(missing_ok=True)
        started_mark(self._marks, pid).unlink(missing_ok=True)
        TaskFiles.of_process(self._marks, pid).remove()

    def end_leftovers(self, grace_s: float = TERM_GRACE_S) -> list[str]:
        """End what earlier actors left behind, but not the calling process; return who could not be ended in 10 s.

        Args:
            grace_s: seconds that it gets after a SIGTERM; 0: there is none.
        """
        stubborn: list[str] = []
        for tree, token in self._entries(left_over=True):
            if tree.pid == os.getpid():
                continue
            never_ran = not self.has_started(tree.pid) and len(tree.known) == 1
            if never_ran and not runs_since(tree.pid, tree.started):  # so it has left nothing
                self.forget(tree.pid)
                continue
            left = end_task(tree.gather(), token, grace_s=grace_s)
            if left:
                stubborn += left
            else:
                self.forget(tree.pid)
        return stubborn

    def owns(self, process: psutil.Process) -> bool:
        """Whether the process is provably of a task that is recorded here: its own, a descendant, or with its token."""
        entries = list(self._entries())
        try:
            recorded = {one for tree, _ in entries for one in tree.known.items()}
            line = [found for one in (process, *process.parents()) if (found := stat_of(one.pid)) is not None]
            if any((one.pid, one.started) in recorded for one in line):
                return True
            return process.environ().get(TOKEN_VARIABLE) in {token for _, token in entries}
        except (psutil.Error, OSError):
            return False

    def _entries(self, left_over: bool = False) -> Iterator[tuple[ProcessTree, str]]:
        """Every recorded process, or those that are left over, and its token. What makes no sense is removed."""
        for path in self._directory.glob("*.json"):
            try:
                entry = json.loads(path.read_text())
                known = [(int(pid), int(started)) for pid, started in entry.get("descendants", ())]
                tree = ProcessTree(int(entry["pid"]), int(entry["started"]), known)
                if not left_over or self._exclusive or _is_gone(entry.get("recorder")):
                    yield tree, str(entry["token"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not ours, or another actor was faster
                path.unlink(missing_ok=True)


def _is_gone(recorder: list[int] | None) -> bool:
    """Whether the process that has recorded another one has ended; not if nobody knows which that was."""
    return recorder is not None and not runs_since(*recorder)


def end_task(known: list[psutil.Process], token: str, timeout_s: float = 10.0, grace_s: float = 0.0) -> list[str]:
    """SIGKILL the known processes of a task, and whoever else carries its token in the environment.

    Blocks until they are gone, or for ``timeout_s`` seconds. Returns who is left.

    Args:
        known: the task's processes, as far as they are known.
        token: the task's.
        timeout_s: seconds after which those that are still there are given up.
        grace_s: seconds that they get after a SIGTERM, to end by themselves.
    """
    deadline = time.monotonic() + timeout_s
    left = known
    if grace_s and (asked := [one for one in (*known, *_carriers(token)) if _runs(one)]):
        for one in asked:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                one.terminate()
        _wait_for(asked, grace_s)
    while left := [one for one in (*left, *_carriers(token)) if _runs(one)]:  # again: a dying one may have forked
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                one.kill()
        psutil.wait_procs(left, timeout=0.02)
        if time.monotonic() > deadline:
            return sorted({f"pid {one.pid}" for one in left})
    return []


def _wait_for(processes: list[psutil.Process], seconds: float) -> None:
    """Not `psutil.wait_procs`: zombies that nobody reaps are as good as gone."""
    deadline = time.monotonic() + seconds
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


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
