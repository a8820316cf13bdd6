"""The terminal: live lines at its bottom, and the streams through which text of strangers is printed.

There is a live line for each thing for which this process waits. They appear only if stderr is a terminal that can move
its cursor. Rich lays them out: it knows the width of characters, NO_COLOR and terminals without any abilities
(TERM=dumb).

Names, reasons and output come from other people. `printable` escapes what would control a terminal, and `guarded`
streams do so with all that is written to them. `WatchedOutput` says what happens if nobody reads them any more.
"""

import contextlib
import io
import logging
import os
import re
import select
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


PATIENCE_S = 2.0
"""Waits that take less have no line."""
TICK_S = 0.2
MOST_LINES = 4


class LiveLine:
    """One line, made by `live_line`."""

    def __init__(self, label: str, lines: "LiveLines", after_s: float, began: float) -> None:
        self._label = label
        self._lines = lines
        self._began = began
        self._after_s = after_s
        self._text = ""

    @property
    def live(self) -> bool:
        """Whether lines are drawn at all; if not, callers print what matters."""
        return self._lines.drawable

    @property
    def due(self) -> bool:
        return time.monotonic() - self._began >= self._after_s and bool(self._text)

    def show(self, text: str) -> None:
        """Set the text; the terminal's width cuts it off."""
        self._text = one_line(text)

    def parts(self) -> tuple[str, str, str]:
        """Return its label, its text and the elapsed time."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return self._label, self._text, f"{minutes}:{seconds:02d}"


class LiveLines:
    """All live lines of the process. A thread draws them while there are any, and never talks to Ray."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._switching = threading.RLock()  # taken before the other lock; logging has its own between the two
        self._lines: list[LiveLine] = []
        self._streams = RedirectedStreams(self._above)
        self._stream: Any = None
        self._console: Console | None = None  # for that stream; made when the first line is due, as rich takes a moment
        self._drawn: list[tuple[str, str, str]] = []
        self._mid_line = False  # whether other output has begun a line and not ended it, such as a question
        self._drawing = threading.Condition(self._lock)

    @property
    def drawable(self) -> bool:
        return self._stream is not None

    def add(self, line: LiveLine) -> None:
        with self._switching:
            with self._lock:
                self._lines.append(line)
                if len(self._lines) > 1 or (stream := _terminal()) is None:
                    return
                self._stream = stream
                self._mid_line = False
            self._streams.begin()
            threading.Thread(target=self._draw_until_empty, args=(stream,), name="live lines", daemon=True).start()

    def remove(self, line: LiveLine) -> None:
        with self._switching:
            with self._lock:
                self._lines.remove(line)
                self._clear()
                if is_last := not self._lines and self._stream is not None:
                    self._stream = self._console = None
                self._drawing.notify_all()
            if is_last:  # outside the lock: it waits for logging threads, which wait for the lock
                self._streams.end()

    def forget(self) -> None:
        """Reset a forked child: the lines, and the thread that draws them, belong to its parent."""
        self._streams.end()
        self.__init__()  # type: ignore[misc]

    @contextlib.contextmanager
    def _above(self, text: str | bytes) -> Iterator[None]:
        with self._lock:
            self._clear()
            if text:
                self._mid_line = text[-1:] not in ("\n", b"\n")
            yield

    def _draw_until_empty(self, stream: Any) -> None:
        with self._lock:
            while self._stream is stream:
                with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or stderr is closed
                    self._draw()
                self._drawing.wait(TICK_S)

    def _draw(self) -> None:
        due = [line for line in self._lines if line.due]
        shown = [line.parts() for line in due[:MOST_LINES]]
        if len(due) > MOST_LINES:
            shown.append((f"and {len(due) - MOST_LINES} more", "", ""))
        if shown == self._drawn or self._mid_line or not _in_foreground(self._stream):
            return
        self._clear()
        console = self._console = self._console or _console(self._stream)
        _take_width(console)
        for number, parts in enumerate(shown):
            console.print(_laid_out(*parts, console.width), end="\n" if number < len(shown) - 1 else "")
        self._stream.flush()
        self._drawn = shown

    def _clear(self) -> None:
        if not self._drawn or self._console is None:
            return
        from rich.control import Control
        from rich.segment import ControlType

        erase: list[Any] = [ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)]
        up = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * (len(self._drawn) - 1)
        self._drawn = []
        with contextlib.suppress(OSError, ValueError):
            self._console.control(Control(*erase, *up))
            self._console.file.flush()


@contextlib.contextmanager
def live_line(label: str, after_s: float = PATIENCE_S, began: float | None = None) -> Iterator[LiveLine]:
    """Show a line while the block waits for something.

    Args:
        label: the subject of the line.
        after_s: seconds after which it appears, if it has a text by then.
        began: when the wait began, as of ``time.monotonic``; None: now.

    Example::

        with live_line("train-1a2b3c4d") as line:
            line.show("starting 3 of 8 tasks")
    """
    line = LiveLine(label, _all_lines, after_s, time.monotonic() if began is None else began)
    _all_lines.add(line)
    try:
        yield line
    finally:
        _all_lines.remove(line)


def _terminal() -> Any:
    """Return stderr if lines can be drawn on it, or None."""
    stream = unguarded(sys.stderr)
    if stream is None or stream.closed or not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    return None if _stdout_is_a_pipe() or not _in_foreground(stream) else stream


def _console(stream: Any) -> "Console":
    from rich.console import Console

    return Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)


def _take_width(console: "Console") -> None:
    """Have a console use the terminal's present width, whatever COLUMNS says."""
    with contextlib.suppress(OSError, ValueError):
        if (columns := os.get_terminal_size(console.file.fileno()).columns) > 0:
            console.width = columns


def _stdout_is_a_pipe() -> bool:
    """Return whether another program gets stdout, such as ``grep``, whose output would run into the lines."""
    try:
        return stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # no stdout, or no file
        return False


def _laid_out(label: str, text: str, elapsed: str, width: int) -> Any:
    """Return the text of a line. It leaves the last column free: some terminals wrap a full line at once."""
    from rich.text import Text

    front = Text.assemble((label, "bold"), " " * bool(text), text, no_wrap=True)
    back = f" {elapsed}" if elapsed else ""
    front.truncate(max(1, width - 1 - len(back)), overflow="ellipsis")
    front.append(back, "dim")
    front.truncate(max(1, width - 1), overflow="crop")
    return front


def _in_foreground(stream: Any) -> bool:
    """Return whether this process is in the terminal's foreground; otherwise the shell's prompt is there."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True


# -- streams -----------------------------------------------------------------------------------------------------------
# While live lines are drawn, all other output of the process goes above them, byte for byte.

Above = Callable[[str | bytes], AbstractContextManager[None]]
"""Clears the live lines for as long as a text is written."""


class StreamOver(ABC):
    """A text or binary stream that writes to another one, and is like it in all else.

    Rich's own redirection wraps long lines, ends unfinished ones, such as progress bars, and sends stdout to the
    terminal even if it leads into a file.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    @abstractmethod
    def write(self, text: Any) -> Any:
        """Write a text as the stream below does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class StreamAbove(StreamOver):
    """A stream to the terminal that clears the live lines before each write."""

    def __init__(self, stream: Any, above: Above) -> None:
        super().__init__(stream)
        self._above = above

    def write(self, text: Any) -> Any:
        with self._above(text):
            written = self._stream.write(text)
            self._stream.flush()  # before the lines are drawn again
        return written

    @property
    def buffer(self) -> "StreamAbove":
        return StreamAbove(self._stream.buffer, self._above)


class RedirectedStreams:
    """``sys.stdout``, ``sys.stderr`` and the handlers of `logging` that write to them, if they are terminals."""

    def __init__(self, above: Above) -> None:
        self._above = above
        self._ours: dict[str, tuple[Any, StreamAbove]] = {}

    def begin(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, StreamAbove) and stream.isatty():
                self._ours[name] = stream, StreamAbove(stream, self._above)
                setattr(sys, name, self._ours[name][1])
                _redirect_handlers(stream, self._ours[name][1])

    def end(self) -> None:
        """Restore the original streams, except where other code has replaced ours meanwhile."""
        for name, (stream, ours) in self._ours.items():
            if getattr(sys, name) is ours:
                setattr(sys, name, stream)
            _redirect_handlers(ours, stream)
        self._ours.clear()


def _redirect_handlers(stream: Any, other: Any) -> None:
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and getattr(handler, "stream", None) is stream:
                handler.setStream(other)


_all_lines = LiveLines()
os.register_at_fork(after_in_child=_all_lines.forget)

# -- text of strangers -------------------------------------------------------------------------------------------------

_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")


def printable(text: bytes | str, kept: str = "\t") -> str:
    """Return any text or bytes as text for a terminal: colours stay, all else that controls a terminal is escaped.

    Other sequences move the cursor, write the reader's clipboard, or make a terminal answer as if a person typed.

    Args:
        text: by default a line.
        kept: the control characters that stay.
    """
    pieces = _COLOUR.split(text if isinstance(text, str) else text.decode(errors="backslashreplace"))
    pieces[::2] = (
        piece if piece.isprintable() else "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in piece)
        for piece in pieces[::2]
    )
    return "".join(pieces)


def without_colours(text: str) -> str:
    """Return a text without the sequences that set colours, for readers that are no terminals."""
    return _COLOUR.sub("", text)


def one_line(text: object) -> str:
    """Return any text as one line for a cell or a terminal: without line ends and control characters."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in str(text)).split())


def print_line(text: bytes | str, file: Any = None) -> None:
    """Print a line of strangers to stdout or another stream. Characters that it can't encode are replaced."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    print(printable(text).encode(encoding, "replace").decode(encoding), file=file, flush=True)


class GuardedStream(StreamOver):
    """A text or binary stream to a terminal, to which any text can be written: see `printable`."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._decoder = getincrementaldecoder("utf-8")("backslashreplace")  # characters may come in two pieces

    def write(self, text: Any) -> int:
        if isinstance(text, str):
            self._stream.write(printable(text, "\t\n\r"))
        else:
            self._stream.write(printable(self._decoder.decode(text), "\t\n\r").encode(errors="backslashreplace"))
        return len(text)

    @cached_property
    def buffer(self) -> "GuardedStream":
        return GuardedStream(self._stream.buffer)

    @property
    def unguarded(self) -> Any:
        return self._stream


def guarded(stream: Any) -> Any:
    """Return a stream to which any text can be written: a guard if it is a terminal, else itself."""
    is_terminal = stream is not None and not stream.closed and stream.isatty()
    return GuardedStream(stream) if is_terminal and unguarded(stream) is stream else stream


def unguarded(stream: Any) -> Any:
    """Return the stream below a guarded one, for programs that this person has started; any other as it is."""
    return getattr(stream, "unguarded", stream)


# -- output that goes nowhere ------------------------------------------------------------------------------------------


class OutputLostError(OSError):
    """A stream of this process can't be written, such as stdout into a file on a full disk."""


class WatchedStream(StreamOver):
    """A text or binary stream whose failing writes end the process's work, in whichever thread they fail.

    In the main thread the error is raised. In any other, such as Ray's that prints what tasks print, the text is
    dropped: an error would end that thread, and nothing would be printed any more.
    """

    def __init__(self, stream: Any, output: "WatchedOutput") -> None:
        super().__init__(stream)
        self._output = output

    def write(self, text: Any) -> Any:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._output.failed(self, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._output.failed(self, error)

    @cached_property
    def buffer(self) -> "WatchedStream":
        return WatchedStream(self._stream.buffer, self._output)


class WatchedOutput:
    """stdout and stderr of this process, from now on to its end. Those that are closed lead nowhere.

    Args:
        end: called in another thread than the main one when nobody reads stdout any more. It is to end the process's
            work.
        say: says on stderr, from such a thread, that output is lost.

    Attributes:
        unread: whether something was written to stdout, or with it to stderr, after its reader had gone.
    """

    def __init__(self, end: Callable[[], None], say: Callable[[str], None]) -> None:
        self.unread = False
        self._end, self._say = end, say
        self._lost = self._is_over = False
        sys.stdout, sys.stderr = (
            WatchedStream(os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") if stream is None else stream, self)
            for stream in (sys.stdout, sys.stderr)
        )

    def failed(self, stream: WatchedStream, error: OSError) -> None:
        """Judge an error of a stream. Raise it in the main thread if it is to end the work."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_over:  # Ray prints what is left when Python exits, and would crash at an error
            return
        if isinstance(error, BrokenPipeError):
            was_read = not self.unread
            self.unread = self.unread or _has_no_reader(1)
            if _has_no_reader(2):  # it may be the same pipe, and what ends the work may write to it
                _write_nowhere(2)
            if self.unread and is_main:
                raise error
            if self.unread and was_read:
                self._end()
        elif stream.fileno() != 2:  # where this could be said
            lost = OutputLostError(f"stdout can't be written: {error.strerror}")
            if is_main:
                raise lost from None
            if not self._lost:
                self._lost = True
                self._say(f"{lost}; lines are lost")

    def finish(self) -> None:
        """Write what the streams still hold. What can't be written is dropped, so that Python exits silently.

        The way is that of Python's documentation of SIGPIPE, in the module signal.

        Raises:
            OutputLostError: stdout can't be written.
        """
        try:
            sys.stdout.flush()
        except OSError as error:
            _write_nowhere(1)
            if isinstance(error, OutputLostError) and not self._lost:
                raise
        finally:
            self._is_over = True


def _has_no_reader(descriptor: int) -> bool:
    """Return whether a descriptor is that of a pipe or socket whose reader has gone."""
    watch = select.poll()
    watch.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))


def _write_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def show_each_line() -> None:
    """Write each line of this process to its place at once, also if that is a file or a pipe, as Ray's workers do."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


@contextlib.contextmanager
def guarded_output(is_guarded: bool = True) -> Iterator[None]:
    """Guard stdout and stderr within, so that no text of strangers controls the terminal, or don't guard them."""
    guard = guarded if is_guarded else unguarded
    with contextlib.redirect_stdout(guard(sys.stdout)), contextlib.redirect_stderr(guard(sys.stderr)):
        yield
