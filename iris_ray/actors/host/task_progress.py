"""Reads what a task has said of its progress in its files. A faulty disk, or odd content, is no reason to end a run."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from iris_ray.actors.wire.messages import Progress
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.goodput.kinds import MARKS
from iris_ray.goodput.marks import Marks, StepTime, with_step
from iris_ray.model.plain_values import LARGEST_INT


class TaskProgress:
    """What a task says about itself, from before its first word on.

    Args:
        files: of its process.
    """

    def __init__(self, files: TaskFiles) -> None:
        self._files = files
        self._beat: float | None = None  # the time of the latest heartbeat's file, by the wall clock
        self._beat_at = self._looked_at = time.monotonic()

    def read(self) -> Progress:
        """Return what it has last said."""
        files = self._files
        saved, status = os.path.exists(files.saved), files.read_status()
        beat_at = _time_of(files.heartbeat)
        step = None if beat_at is None else _step_in(_text_of(files.heartbeat))
        marks = _marks(files, step, beat_at)
        return Progress(self._age_of(beat_at), step, saved, status, marks)

    def _age_of(self, beat_at: float | None) -> float | None:
        """Return how many seconds ago the latest heartbeat was, though somebody may have set the wall clock since."""
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if beat_at is None:
            return None
        if beat_at != self._beat:
            age = min(max(0.0, time.time() - beat_at), now - before)  # at the look before, it was not there
            self._beat, self._beat_at = beat_at, now - age
        return now - self._beat_at


def _marks(files: TaskFiles, step: int | None, beat_at: float | None) -> Marks:
    began = _time_of(files.started)
    if began is None:
        return Marks()
    steps: tuple[StepTime, ...] = ()
    for line in _text_of(files.first_steps).splitlines():
        first, _, at = line.partition(" ")
        if len(steps) < 2 and (number := _step_in(first)) is not None and (time_s := _number(at)) is not None:
            steps = with_step(steps, number, max(0.0, time_s - began))
    if step is not None and beat_at is not None:
        steps = with_step(steps, step, max(0.0, beat_at - began))
    return Marks(steps, *_marked(_text_of(files.marked)))


def _marked(text: str) -> tuple[dict[str, float], dict[str, float]]:
    try:
        before, during = (
            {
                name: number
                for name, seconds in part.items()
                if name in MARKS and (number := _number(seconds)) is not None
            }
            for part in json.loads(text)
        )
    except (ValueError, TypeError, AttributeError):
        return {}, {}
    return before, during


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _step_in(text: str) -> int | None:
    number = _number(text)
    return int(number) if number is not None and abs(number) < LARGEST_INT else None


def _number(said: Any) -> float | None:
    try:
        number = float(said)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
