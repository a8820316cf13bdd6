"""Tracebacks of user code as text: what of them people see, and which ones they have already seen."""

import re
from typing import Final

_OUR_FRAME: Final = re.compile(
    r'^  File "(?:<frozen runpy>|[^"]*/iris_ray/(?:actors|cli)/[^"]*)".*\n?(?:^    .*\n?)*', re.MULTILINE
)
"""A frame of iris_ray that calls user code, with the lines that quote it."""
_DIRECTORY: Final = re.compile(r'(?<=  File ")[^"]*/')
_FRAME: Final = re.compile(r'^  File "[^"]*", line \d+, in .*$', re.MULTILINE)
_SEEN: Final = re.compile(r"^\S+ attempt \d+ ended with the same traceback:$", re.MULTILINE)

MOST_LINES: Final = 20
MOST_CHARACTERS: Final = 400
"""Of a longer line of a traceback, only the beginning is shown."""
MOST_KEPT: Final = 100
"""The number of different tracebacks of a job that are remembered."""


def without_our_frames(traceback: str) -> str:
    """Return a traceback without the frames of iris_ray that call user code; unchanged if no other frames are left."""
    users = _OUR_FRAME.sub("", traceback)
    return users if _FRAME.search(users) else traceback


def last_lines(traceback: str) -> list[str]:
    """Return the end of a traceback for people, at most `MOST_LINES` lines, without the frames of iris_ray."""
    lines = without_our_frames(traceback).rstrip("\n").split("\n")
    shown = [line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}…" for line in lines[-MOST_LINES:]]
    return shown if len(lines) <= MOST_LINES else ["…", *shown]


class SeenTracebacks:
    """The tracebacks that the user of a job has seen, and the first attempt that ended with each.

    Two tracebacks are the same if their frames are: the same code has failed in the same place. Messages may differ. So
    may directories, since a script may run in a temporary one.
    """

    def __init__(self) -> None:
        self._attempts: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._attempts)

    def earlier(self, traceback: str) -> str | None:
        """Return the attempt that ended with the same traceback first; None without one, or without a traceback."""
        return self._attempts.get(_key(traceback)) if traceback else None

    def note(self, traceback: str, attempt: str) -> None:
        """Note that an attempt, such as "train-1a2b3c4d attempt 2", has ended with a traceback, which was shown."""
        self._attempts.setdefault(_key(traceback), attempt)
        if len(self._attempts) > MOST_KEPT:
            del self._attempts[next(iter(self._attempts))]


def _key(traceback: str) -> int:
    return hash(tuple(_DIRECTORY.sub("", frame) for frame in _FRAME.findall(traceback)))


# -- in the text of an error -------------------------------------------------------------------------------------------


def as_seen(attempt: str, traceback: str) -> str:
    """Return a traceback below a line that says which earlier attempt ended with it."""
    return f"{attempt} ended with the same traceback:\n{traceback}"


def was_seen(text: str) -> bool:
    """Return whether a text with a traceback says so: see `as_seen`."""
    return _SEEN.search(text) is not None


def last_frame(text: str) -> str:
    """Return the last frame of a text with a traceback, and what follows it; the whole text if it has no frame."""
    frames = list(_FRAME.finditer(text))
    return text[frames[-1].start() :] if frames else text
