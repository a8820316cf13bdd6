"""The streams of a person before a command that runs elsewhere: its output, their keys, Ctrl-C and their terminal."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.conventions import INTERRUPTED, TERMINATED, note_termination, say_error
from iris_ray.terminal import guarded, unguarded

if TYPE_CHECKING:  # they import Ray
    from iris_ray.sessions.client import Channel, Show
    from iris_ray.sessions.core import Size

T = TypeVar("T")

KILLED = 137
"""The exit code for a command that was killed, as shells have it."""
INTERRUPT_S = 5.0
"""The time for a command to end by itself after Ctrl-C. A second Ctrl-C ends it at once."""
INPUT_BYTES = 1 << 16


class Remote(Protocol):
    """A command that runs elsewhere."""

    def signal(self, number: int) -> None: ...

    def close(self) -> None: ...


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a command, and return its result. Its cancellation becomes a KeyboardInterrupt."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def print_bytes(data: bytes, is_err: bool) -> None:
    """Print output that may be of strangers: on a terminal it controls nothing."""
    _write(guarded(sys.stderr if is_err else sys.stdout), data)


def pass_on(data: bytes, is_err: bool) -> None:
    """Print output of a program that this person has started, as it came."""
    _write(unguarded(sys.stderr if is_err else sys.stdout), data)


def _write(stream: Any, data: bytes) -> None:
    stream.buffer.write(data)
    stream.buffer.flush()


class LabelledLines:
    """Prints whole lines, each after a label."""

    def __init__(self, label: bytes) -> None:
        self._label = label
        self._begun = {False: b"", True: b""}

    def print(self, data: bytes, is_err: bool) -> None:
        *lines, self._begun[is_err] = (self._begun[is_err] + data).split(b"\n")
        if lines:
            pass_on(b"".join(self._label + line + b"\n" for line in lines), is_err)

    def print_rest(self) -> None:
        for is_err, rest in self._begun.items():
            if rest:
                pass_on(self._label + rest + b"\n", is_err)


class CtrlC:
    """Passes Ctrl-C on to commands, and ends them at a second one, or if they ignore it for `INTERRUPT_S`.

    One more ends the wait for hosts that don't answer.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.current_task()
        self._channels: list[Remote] = []
        self._pressed = self._closes = False

    def __enter__(self) -> "CtrlC":
        self._loop.add_signal_handler(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)

    def goes_to(self, channel: Remote) -> None:
        self._channels.append(channel)
        if self._pressed:
            channel.close()

    def judge(self, code: int) -> int:
        """Return the exit code of this command, given the code of the remote one."""
        return INTERRUPTED if self._pressed and code in (KILLED, TERMINATED) else code

    def _press(self) -> None:
        if self._work is not None and (self._closes or not self._channels):
            self._work.cancel()
        elif self._pressed:
            self._close()
        else:
            self._pressed = True
            for channel in self._channels:
                channel.signal(signal.SIGINT)
            self._loop.call_later(INTERRUPT_S, self._close)

    def _close(self) -> None:
        self._closes = True
        for channel in self._channels:
            channel.close()


async def stdin_bytes() -> AsyncIterator[bytes]:
    """Yield what comes on stdin, until its end."""
    loop = asyncio.get_running_loop()
    while sys.stdin is not None:  # it may be closed
        there = loop.create_future()
        with contextlib.suppress(PermissionError):  # of a file, which has its bytes at once
            loop.add_reader(0, _is_ready, there)
            try:
                await there
            finally:
                loop.remove_reader(0)
        try:
            data = os.read(0, INPUT_BYTES)
        except OSError as error:  # a directory, or a terminal that is gone
            say_error(f"stdin can't be read: {error.strerror}")
            return
        if not data:
            return
        yield data


def _is_ready(there: "asyncio.Future[None]") -> None:
    if not there.done():
        there.set_result(None)


# -- a terminal --------------------------------------------------------------------------------------------------------

_FULL_SCREEN, _NO_FULL_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
_AS_BEFORE = b"\x1b[m\x1b[?25h\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l"
"""Plain text, a cursor, and no reports of pasted text and of the mouse."""


async def keys(channel: Remote) -> AsyncIterator[bytes]:
    """Yield what is typed, until the terminal is gone; then end the session, also where no SIGHUP says so."""
    async for data in stdin_bytes():
        yield data
    channel.close()


def terminal_size() -> "Size":
    columns, rows = os.get_terminal_size(1)
    size: Size = module_of("sessions", "core").Size(rows, columns)
    return size


@contextlib.contextmanager
def raw_terminal() -> Iterator["Show"]:
    """Pass each key on as it is, within; afterwards the terminal is as before. Yield what shows output."""
    before = termios.tcgetattr(0)
    is_full = False

    def show(data: bytes, _: bool) -> None:
        nonlocal is_full
        if (last := max(_FULL_SCREEN, _NO_FULL_SCREEN, key=data.rfind)) in data:
            is_full = last == _FULL_SCREEN
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(1, rest) :]

    try:
        tty.setraw(0, termios.TCSADRAIN)
        yield show
    except BaseException:  # a program there could not put the screen in order
        with contextlib.suppress(OSError):
            os.write(1, _AS_BEFORE + (_NO_FULL_SCREEN if is_full else b""))
        raise
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSANOW, before)


async def follow_on_terminal(channel: "Channel") -> int:
    """Connect this terminal to a command with a terminal until the command ends. Return its exit code."""
    loop, work = asyncio.get_running_loop(), asyncio.current_task()
    assert work is not None
    loop.add_signal_handler(signal.SIGWINCH, lambda: channel.resize(terminal_size()))

    def terminate() -> None:
        note_termination()
        work.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGHUP, work.cancel)
    with raw_terminal() as show:
        code: int = await module_of("sessions", "client").follow(channel, show, keys(channel))
        return code
