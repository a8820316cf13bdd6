"""The way of a task's output from its process to the files of its host, and a little of it to the driver's terminal.

The task's process and everything that it starts write to a FIFO: a crash loses nothing that was written, and nobody but
the kernel is between ``print`` and TPUHostActor. A thread there empties it into the files, at the speed of a copy; what
the terminal gets goes through a `LineThrottle`. TPUHostActor prints that part on its own stdout, where Ray finds it.
"""

import contextlib
import fcntl
import json
import logging
import os
import select
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from iris_ray.actors.host.line_throttle import LineThrottle
from iris_ray.actors.host.log_files import AttemptLog, LogWriter, logs_directory, prune
from iris_ray.actors.host.process_ledger import output_pipe, started_mark
from iris_ray.actors.wire.messages import TaskLaunch
from iris_ray.actors.wire.ray_internals import label_output
from iris_ray.actors.wire.task_log import LastLines

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
LAST_BYTES = 4096
FIRST_REPORT_S, REPORT_S = 1.0, 5.0
"""When the last lines go to the Controller: soon after the first, then every so often while there are new ones."""
FLUSH_S = 0.5
"""A line without an end, or a count of repeats, is shown after so long a silence."""
DRAIN_S = 5.0
"""How long the end of a process may take to reach the files."""


# -- in the task's process ---------------------------------------------------------------------------------------------


def redirect_output(directory: Path, launch: TaskLaunch) -> int | None:
    """Have this process and all its children print into the FIFO; None if nobody reads it.

    The mark of its start says whose output it is.
    """
    info = launch.info
    whose = {"job_id": info.job_id, "task_index": info.task_index, "attempt": info.attempt}
    mark = started_mark(directory, os.getpid())
    mark.parent.mkdir(mode=0o700, exist_ok=True)
    mark.write_text(json.dumps({**whose, "num_tasks": info.num_tasks, "label": launch.label}))
    try:
        pipe = os.open(output_pipe(directory, os.getpid()), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.set_blocking(pipe, True)
    for stream in (1, 2):
        os.dup2(pipe, stream)
    return pipe


def until_taken(pipe: int, timeout_s: float = 2.0) -> None:
    """Returns when what was written has been read, which takes no time if nothing was."""
    deadline = time.monotonic() + timeout_s
    while _waiting_in(pipe) and time.monotonic() < deadline:
        time.sleep(0.001)


def _waiting_in(pipe: int) -> int:
    with contextlib.suppress(OSError):
        size: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]
        return size
    return 0


# -- on its host -------------------------------------------------------------------------------------------------------


class OutputPump:
    """Reads the output of one task process, from before its start until `close`.

    Args:
        directory: the host's.
        pid: the process.
        node_id: the host's id in Ray.
        report: takes the last lines, every few seconds while there are new ones; called in the pump's thread.
    """

    def __init__(self, directory: Path, pid: int, node_id: str, report: Callable[[LastLines], None]) -> None:
        self._directory, self._pid, self._node_id, self._report = directory, pid, node_id, report
        self._path = output_pipe(directory, pid)
        self._path.unlink(missing_ok=True)  # of an earlier process of that pid
        os.mkfifo(self._path, 0o600)
        # Open for writing, too: so there is a reader before there is a writer, and no end of file between writers.
        self._pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the kernel's limit for a user's pipes; they are a little smaller then
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._wake, self._woken = os.pipe()
        self._closing = False
        self._log: AttemptLog | None = None
        self._writer: LogWriter | None = None
        self._throttle: LineThrottle | None = None
        self._last: deque[bytes] = deque()
        self._last_size = 0
        self._reported_end = 0
        self._report_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"output of {pid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take what is left in the FIFO, and end. Blocks until it is in the files, or for a few seconds."""
        if not self._closing:
            self._closing = True
            os.close(self._woken)
        self._thread.join(2 * DRAIN_S)

    def _run(self) -> None:
        try:
            self._pump()
        except Exception:  # without a reader the task would stop at its next line
            logger.exception("the output of process %d can't be kept any more", self._pid)
        finally:
            self._path.unlink(missing_ok=True)
            for fd in (self._pipe, self._wake):
                os.close(fd)
            if self._writer is not None:
                self._writer.close()

    def _pump(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        closing = False
        while not closing:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            closing = self._wake in ready
            if self._pipe in ready:
                self._take_all(time.monotonic() + (DRAIN_S if closing else 0.0))
            elif not closing and self._throttle is not None:
                self._show(self._throttle.flush(time.monotonic()))
            self._report_if_due()
        if self._has_begun():
            assert self._writer is not None
            assert self._throttle is not None
            self._writer.begin()
            self._show(self._throttle.flush(time.monotonic()))
            self._report_now()

    def _patience_ms(self) -> float | None:
        """How long to wait for output; for ever if nothing is to be said without it."""
        if self._throttle is not None and self._throttle.holds_something:
            return 1000.0 * FLUSH_S
        if self._unreported:
            return 1000.0 * max(0.0, self._report_at - time.monotonic())
        return None

    def _take_all(self, deadline: float) -> None:
        """Read once, or until nothing is left."""
        while True:
            try:
                data = os.read(self._pipe, CHUNK_BYTES)
            except BlockingIOError:
                return
            if self._has_begun():
                self._take(data)
            if time.monotonic() > deadline:
                return

    def _has_begun(self) -> bool:
        """Whether the task has started, and with it is known whose output this is."""
        if self._writer is not None:
            return True
        try:
            whose = json.loads(started_mark(self._directory, self._pid).read_text())
        except (OSError, ValueError):
            return False
        job_id, index = whose["job_id"], whose["task_index"]
        self._log = AttemptLog(logs_directory(self._directory), job_id, index, whose["attempt"])
        self._writer = LogWriter(self._log)
        self._throttle = LineThrottle.for_task_of(whose["num_tasks"], f"iris-ray logs {job_id} {index}")
        self._report_at = time.monotonic() + FIRST_REPORT_S
        label_output(whose["label"], stderr=False)
        return True

    def _take(self, data: bytes) -> None:
        assert self._writer is not None
        assert self._throttle is not None
        problem = self._writer.problem
        if self._writer.write(data):
            prune(logs_directory(self._directory), time.time())
        if self._writer.problem != problem:
            self._show([f"iris_ray: this output can't be kept on its host: {self._writer.problem}"])
        self._last.append(data[-LAST_BYTES:])
        self._last_size += len(self._last[-1])
        while self._last_size - len(self._last[0]) >= LAST_BYTES:
            self._last_size -= len(self._last.popleft())
        self._show(self._throttle.feed(data, time.monotonic()))

    def _show(self, lines: list[str]) -> None:
        if lines:
            with contextlib.suppress(OSError):  # a full disk: who prints is not to be stopped by it
                print("\n".join(lines), flush=True)

    # -- last lines --------------------------------------------------------------------------------------------------

    @property
    def _unreported(self) -> bool:
        return self._writer is not None and self._writer.end > self._reported_end

    def _report_if_due(self) -> None:
        if self._unreported and time.monotonic() >= self._report_at:
            self._report_now()

    def _report_now(self) -> None:
        assert self._log is not None
        assert self._writer is not None
        if not self._unreported:
            return
        data = b"".join(self._last)[-LAST_BYTES:]
        log, self._reported_end = self._log, self._writer.end
        self._report(LastLines(log.job_id, log.task_index, log.attempt, self._node_id, self._writer.end, data))
        self._report_at = time.monotonic() + REPORT_S
