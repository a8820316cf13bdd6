"""Durations as people write them: one form for all options of the command line and all cluster settings."""

import math
import re
from typing import Final

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_PARTS = re.compile(rf"(?:{_NUMBER}[smhdw])+")
_PART = re.compile(rf"({_NUMBER})([smhdw])")

FORMS: Final = "90, 90s, 15m, 2h, 7d or 1h30m"
"""Examples of durations, for messages and help."""


def parse_duration(text: str) -> float:
    """Return the seconds of a duration: a number of seconds such as ``90``, or ``90s``, ``15m``, ``1h30m``, ``7d``.

    Raises:
        ValueError: the text is not a duration; the message says how one is written.
    """
    written = text.strip().lower()
    if re.fullmatch(_NUMBER, written):
        seconds = float(written)
    elif _PARTS.fullmatch(written):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(written))
    else:
        raise ValueError(f"{text[:100]!r} is not a duration; give one such as {FORMS}")
    if math.isinf(seconds):
        raise ValueError(f"{text[:20]!r}… is too long for a duration; give one such as {FORMS}")
    return seconds


def written_duration(seconds: float) -> str:
    """Return a duration as `parse_duration` reads it, in the largest unit that divides it: ``15m`` for 900."""
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:.10g}{unit}"
    return f"{seconds:.10g}s"
