"""Durations and times as options: each is written in one form, which the command's help explains."""

import math
import time
from typing import Any, Final

import click

from iris_ray.model.durations import FORMS, parse_duration, written_duration

ENDLESS: Final = "inf"
_DATES: Final = "%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M"


class Duration(click.types.FloatParamType):
    """A duration, as seconds.

    Args:
        least: the shortest, in seconds.
        most: the longest, in seconds.
        above: whether it must exceed ``least``.
        endless: whether ``inf`` is allowed, for no limit.
    """

    name = "duration"
    note = f"DURATION is a number of seconds, or has units (s, m, h, d, w): {FORMS}."

    def __init__(
        self, least: float = 0.0, most: float = math.inf, *, above: bool = False, endless: bool = False
    ) -> None:
        self._least = least
        self._most = most
        self._above = above
        self._endless = endless

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):  # a default
            return value
        if self._endless and value == ENDLESS:
            return math.inf
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            self.fail(f"{error}{f', or {ENDLESS}' if self._endless else ''}.", param, ctx)
        if seconds < self._least or (self._above and seconds == self._least):
            least = f"{'more than' if self._above else 'at least'} {written_duration(self._least)}"
            self.fail(f"{value} is too short; give {least}.", param, ctx)
        if seconds > self._most:
            self.fail(f"{value} is too long; give at most {written_duration(self._most)}.", param, ctx)
        return seconds


class Time(click.types.FloatParamType):
    """A time, as seconds since the epoch: a date in this machine's time zone, or a duration ago."""

    name = "time"
    note = f"TIME is a date, 2026-11-01 or 2026-11-01T14:30, in this machine's time zone, or a duration ago: {FORMS}."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return max(0.0, time.time() - parse_duration(value))
        except ValueError:
            pass
        for form in _DATES:
            try:
                return time.mktime(time.strptime(value.strip(), form))
            except (ValueError, OverflowError):
                continue
        self.fail(f"{value!r} is not a time; give an age such as 12h or 7d, or a date such as 2026-11-01.", param, ctx)
