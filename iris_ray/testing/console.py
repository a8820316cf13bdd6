"""The messages of a simulated cluster on stderr, and a delayed Ctrl-C."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from iris_ray.terminal import LiveLine, live_line


class ConsoleOutput:
    """Prints messages with the seconds since the cluster began, unless ``quiet``. A live line shows the start."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._began = time.monotonic()
        self._line: LiveLine | None = None

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Show the steps of the start within the block in a live line."""
        self._began = time.monotonic()
        if self._quiet:
            yield
            return
        with live_line("simulated cluster", after_s=0.0) as line:
            self._line = line if line.live else None
            try:
                yield
            finally:
                self._line = None

    def step(self, text: str) -> None:
        """Show a step of the start, which is of no interest afterwards."""
        if self._line is not None:
            self._line.show(text)
        else:
            self.say(text)

    def say(self, text: str) -> None:
        if not self._quiet:
            elapsed = time.monotonic() - self._began
            print(f"[simulated cluster {elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def interrupt_held_back() -> Iterator[None]:
    """Let Ctrl-C act only after the block: a driver that is half connected can't even disconnect (Ray 2.60)."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)
