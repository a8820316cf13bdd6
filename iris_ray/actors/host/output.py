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
from typing import Protocol

from iris_ray.actors.calls.ray_internals import label_output
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.protocol.services import imported, installed_services
from iris_ray.actors.protocol.task_files import TaskFiles, remove_file

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18
STUCK_S = 30.0
"""The time that `OutputPump.close` waits for a disk that does not answer."""


class OutputSink(Protocol):
    """Keeps and shows the output of one task, from its first byte to its last. A pump calls it, in its thread.

    It is made with the `StartedTask`, the host's directory, the host's id in Ray, and a `TellPool`.
    """

    def take(self, data: bytes, is_stopped: bool) -> None:
        """Take output.

        Args:
            data: the output.
            is_stopped: whether iris_ray is ending the task. Then nothing of the output is shown: it is not the cause of
                the end, and a native stack of a hundred lines from each task would hide the cause.
        """

    def pause(self) -> None:
        """Show what was held back, because the task has printed nothing for a while."""

    def report_if_due(self) -> None:
        """Do what `patience_s` has waited for."""

    @property
    def patience_s(self) -> float | None:
        """The time to wait for output before `pause` or `report_if_due` has something to do; None: for ever."""

    def end(self) -> None:
        """Show and report the rest."""

    def close(self) -> None:
        """Release what the sink holds."""


TellPool = Callable[..., None]
"""Calls a method of the pool, such as a service's; returns at once. Any thread may call it."""


class Terminal:
    """The driver's terminal, to which Ray sends the output of this process. Tasks without chips share it on their host.

    It suppresses `OSError`: the disk with Ray's logs may be full, while the host's directory is on another disk.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._label: str | None = None  # of the task that prints now

    def begin(self, label: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._mark(label)

    def show(self, label: str, lines: list[str]) -> None:
        """Print lines of a task under its label."""
        with self._lock, contextlib.suppress(OSError):
            if label != self._label:
                self._mark(label)
            print("\n".join(lines), flush=True)

    def _mark(self, label: str) -> None:
        self._label = None
        label_output(label, stderr=False)
        self._label = label


terminal = Terminal()


class PlainOutput:
    """Shows the output of a task on the driver's terminal, and keeps nothing. It stands in for a service of logs."""

    patience_s = None

    def __init__(self, task: StartedTask) -> None:
        self._label = task.label
        self._unfinished = b""

    def take(self, data: bytes, is_stopped: bool) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > CHUNK_BYTES:  # such as a progress bar, which writes no newline
            lines.append(self._unfinished)
            self._unfinished = b""
        if lines and not is_stopped:
            terminal.show(self._label, [line.decode(errors="replace") for line in lines])

    def pause(self) -> None: ...

    def report_if_due(self) -> None: ...

    def end(self) -> None:
        if self._unfinished:
            terminal.show(self._label, [self._unfinished.decode(errors="replace")])

    def close(self) -> None: ...


class OutputPump:
    """Reads the output of one task process, from before its start until `close`.

    Args:
        directory: the host's directory.
        pid: the process.
        node_id: the host's id in Ray.
        tell_pool: calls the pool.
    """

    def __init__(self, directory: Path, pid: int, node_id: str, tell_pool: TellPool) -> None:
        self._directory, self._pid, self._node_id, self._tell_pool = directory, pid, node_id, tell_pool
        self._files = TaskFiles.of_process(directory, pid)
        self._files.output.unlink(missing_ok=True)  # of an earlier process with this pid
        os.mkfifo(self._files.output, 0o600)
        # It is also open for writing: the open then needs no writer, and no end of file comes between two writers.
        self._pipe = os.open(self._files.output, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a user's pipes are at the kernel's limit; this one stays smaller
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._wake, self._wake_writer = os.pipe()
        except OSError:  # no file descriptor is left
            os.close(self._pipe)
            raise
        self._closing = self._is_stopped = False
        self._output: OutputSink | None = None
        self._is_plain = False
        self._untaken = b""  # output that was read, and that the sink has not taken
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
            except BaseException:  # without a reader the task would be killed by SIGPIPE
                logger.exception("the output of process %d can no longer be kept; it is only shown", self._pid)
                self._close_output()
                self._output, self._is_plain = None, True
                if self._untaken and (output := self._started_output()) is not None:
                    output.take(self._untaken, self._is_stopped)
                self._pump()
        finally:
            remove_file(self._files.output)
            for fd in (self._pipe, self._wake):
                os.close(fd)
            self._close_output()

    def _close_output(self) -> None:
        try:
            if self._output is not None:
                self._output.close()
        except BaseException:
            logger.exception("the recorder of the output of process %d can't be closed", self._pid)

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

    def _patience_ms(self) -> float | None:
        patience_s = None if self._output is None or self._is_stopped else self._output.patience_s
        return None if patience_s is None else 1000.0 * patience_s

    def _waiting(self) -> int:
        """Return the number of bytes in the FIFO. Processes that have outlived the task may write more for ever."""
        (count,) = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))
        return int(count)

    def _read(self, count: int) -> None:
        """Read until the FIFO is empty, or until at least so many bytes are read."""
        while count > 0:
            try:
                data = os.read(self._pipe, CHUNK_BYTES)
            except BlockingIOError:
                return
            self._untaken = data
            if (output := self._started_output()) is not None:
                output.take(data, self._is_stopped)
            self._untaken = b""
            count -= len(data)

    def _started_output(self) -> OutputSink | None:
        """Return the output of the task that has started; None before that. The mark of the start names the task."""
        if self._output is None and (task := StartedTask.read(self._files)) is not None:
            self._output = self._sink(task)
        return self._output

    def _sink(self, task: StartedTask) -> OutputSink:
        place = next((service.output for service in installed_services() if service.output), None)
        if place is None or self._is_plain:
            return PlainOutput(task)
        sink: OutputSink = imported(place)(task, self._directory, self._node_id, self._tell_pool)
        return sink
