"""A terminal for tests: a program runs on it, and the test sees what a person would see."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from types import TracebackType

import pyte

from tests.support.command_line import REPOSITORY
from tests.support.waiting import wait_until


class Terminal:
    """A command on a terminal of its own.

    Args:
        command: the program and its arguments.
        columns: how wide the terminal is.
        environment: variables besides this process's.
        stdout: where its stdout goes, a file descriptor; None: to the terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        environment: dict[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self._ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._screen = pyte.HistoryScreen(columns, 24)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        variables = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY), **(environment or {})}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=its if stdout is None else stdout, stderr=its, env=variables,
            start_new_session=True,
        )  # fmt: skip
        os.close(its)
        os.set_blocking(self._ours, False)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        os.close(self._ours)

    def lines(self) -> list[str]:
        """What is on the screen now, without empty lines at its end."""
        with contextlib.suppress(BlockingIOError, OSError):  # OSError: it has ended
            while data := os.read(self._ours, 65536):
                self.raw += data
                self._stream.feed(data)
        text = "\n".join(line.rstrip() for line in self._screen.display).rstrip()
        return text.split("\n") if text else []

    def wait_for(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """The screen, once it is so."""
        screen: list[str] = []

        def holds() -> bool:
            screen[:] = self.lines()
            return condition(screen)

        try:
            wait_until(holds)
        except AssertionError:
            raise AssertionError(f"in vain; the screen: {screen}") from None
        return screen

    def wait_for_text(self, text: str) -> list[str]:
        """The screen, once this text is on it."""
        return self.wait_for(lambda lines: any(text in line for line in lines))

    def go_on(self) -> None:
        """Send a line to its stdin, which is not the terminal."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def press_ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> list[str]:
        """The screen after its end."""
        wait_until(lambda: (self.lines(), self.process.poll() is not None)[1])
        return self.lines()


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]
