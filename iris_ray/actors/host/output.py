"""Reads the output of a task on its host.

The task's process and all processes that it starts write into a FIFO, and a thread of TPUHostActor empties it at the
speed of a copy. Only the kernel is in between, so a crash of the task loses no output.
"""

import contextlib
import fcntl
import logging
import os
import select
import struct
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.task_files import TaskFiles, remove_file
from iris_ray.logs.core import LastLines
from iris_ray.logs.host import TaskOutput

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
STUCK_S = 30.0
"""`OutputPump.close` waits so long for a disk that does not answer."""


class OutputPump:
    """Reads the output of one task process, from before its start until `close`.

    Args:
        directory: the host's directory.
        pid: the process.
        node_id: the host's id in Ray.
        report: takes the last lines every few seconds while there are new ones, in the pump's thread.
    """

    def __init__(self, directory: Path, pid: int, node_id: str, report: Callable[[LastLines], None]) -> None:
        self._directory, self._pid, self._node_id, self._report = directory, pid, node_id, report
        self._files = TaskFiles.of_process(directory, pid)
        self._files.output.unlink(missing_ok=True)  # of an earlier process with this pid
        os.mkfifo(self._files.output, 0o600)
        # Open for writing, too: so the open does not wait for a writer, and there is no end of file between writers.
        self._pipe = os.open(self._files.output, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user's pipes are at the kernel's limit; this one stays smaller
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._wake, self._wake_writer = os.pipe()
        except OSError:  # no file descriptor is left
            os.close(self._pipe)
            raise
        self._closing = self._is_stopped = False
        self._output: TaskOutput | None = None
        self._thread = threading.Thread(target=self._run, name=f"output of {pid}", daemon=True)
        self._thread.start()

    def stop_showing(self) -> None:
        """Write later output to files only, not to the driver's terminal, because the task is being stopped."""
        self._is_stopped = True

    def close(self) -> None:
        """Read the rest of the FIFO, and end. Block until it is in the files, or for `STUCK_S` if the disk is stuck."""
        if not self._closing:
            self._closing = True
            os.close(self._wake_writer)
        self._thread.join(STUCK_S)

    def _run(self) -> None:
        try:
            try:
                self._pump()
            except Exception:
                logger.exception("the output of process %d can no longer be kept", self._pid)
                self._discard()
        finally:
            remove_file(self._files.output)
            for fd in (self._pipe, self._wake):
                os.close(fd)
            if self._output is not None:
                self._output.close()

    def _pump(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        closing = False
        while not closing:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            closing = self._wake in ready
            if self._pipe in ready:
                self._read(self._waiting() if closing else 1)
            elif not closing and not self._is_stopped and self._output is not None:
                self._output.pause()
            if self._output is not None:
                self._output.report_if_due()
        if (output := self._started_output()) is not None:
            output.end()

    def _discard(self) -> None:
        """Read until `close`, and keep nothing. If the FIFO had no reader, SIGPIPE would end the task."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._wake not in {fd for fd, _ in poll.poll()}:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe, CHUNK_BYTES)

    def _patience_ms(self) -> float | None:
        patience_s = None if self._output is None or self._is_stopped else self._output.patience_s
        return None if patience_s is None else 1000.0 * patience_s

    def _waiting(self) -> int:
        """Return how many bytes are in the FIFO. Processes that have outlived the task may write more for ever."""
        (count,) = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))
        return int(count)

    def _read(self, count: int) -> None:
        """Read until the FIFO is empty, or until at least so many bytes are read."""
        while count > 0:
            try:
                data = os.read(self._pipe, CHUNK_BYTES)
            except BlockingIOError:
                return
            if (output := self._started_output()) is not None:
                output.take(data, self._is_stopped)
            count -= len(data)

    def _started_output(self) -> TaskOutput | None:
        """Return the output of the task that has started; None before that. The mark of the start names the task."""
        if self._output is None and (task := StartedTask.read(self._files)) is not None:
            self._output = TaskOutput(task, self._directory, self._node_id, self._report)
        return self._output
