"""An event loop whose clock goes on only when there is nothing left to do: waiting takes no time, and is exact.

While it runs, ``time.time`` and ``time.monotonic`` tell its time, too. Nothing may wait for a thread.
"""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")
ENDLESS = 10_000
BEGAN = 1_700_000_000.0
"""What ``time.time`` tells in the beginning."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at 0 s. Fails if no task can ever go on, and if tasks go on for ever while no time passes."""

    def __init__(self) -> None:
        self._now = 0.0
        self.wall_at_start = BEGAN
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self._now

    def wall_clock(self) -> float:
        return self.wall_at_start + self._now

    def block(self, seconds: float) -> None:
        """What a call does that keeps the event loop from its work for so long."""
        self._now += seconds


class _Jump(selectors.DefaultSelector):
    """Where a loop would wait for its next timer, the clock jumps there."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop
        self._rounds = 0  # since the last jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits, and nothing will ever happen")
        self._rounds += 1
        if not ready and timeout:
            self._loop.block(timeout)
            self._rounds = 0
        if self._rounds > ENDLESS:
            self._rounds = 0
            raise AssertionError(f"{ENDLESS} rounds of the event loop, and no time has passed")
        return ready


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, in virtual time."""

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        with mock.patch.object(time, "monotonic", loop.time), mock.patch.object(time, "time", loop.wall_clock):
            return runner.run(scenario)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine, which runs in virtual time."""

    @wraps(test)
    def runs(**fixtures: Any) -> None:
        run(test(**fixtures))

    return runs


def now() -> float:
    """Seconds since the loop that runs was made."""
    return asyncio.get_running_loop().time()


def set_wall_clock(seconds: float) -> None:
    """Set the wall clock of the loop that runs ahead by so many seconds, or back."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.wall_at_start += seconds


def block(seconds: float) -> None:
    """Keep the loop that runs from its work."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.block(seconds)
