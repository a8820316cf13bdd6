"""What else the process prints while live lines are drawn: it goes above them, byte for byte."""

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

Above = Callable[[str | bytes], AbstractContextManager[None]]
"""Clears the live lines for as long as a text is written."""


class StreamAbove:
    """A stream to the terminal that clears the live lines before each write.

    Rich's own redirection is not used: it wraps long lines, ends lines that have no end yet, such as progress bars, and
    sends stdout to the terminal even if it leads into a file.

    Args:
        stream: a text stream, or a binary one.
        above: clears the lines.
    """

    def __init__(self, stream: Any, above: Above) -> None:
        self._stream = stream
        self._above = above

    def write(self, text: Any) -> Any:
        with self._above(text):
            written = self._stream.write(text)
            self._stream.flush()  # not later, when the lines are there again
        return written

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> "StreamAbove":
        return StreamAbove(self._stream.buffer, self._above)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
        """Put the original streams back, except where somebody else has put another one meanwhile."""
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
