"""What code costs, counted and not timed: the same on every machine."""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType


def calls(action: Callable[[], object]) -> int:
    """Return how many functions of Python an action calls, steps of generators included."""
    count = 0

    def on_event(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def peak_bytes(action: Callable[[], object]) -> int:
    """Return how much memory an action has taken at most, beyond what it found."""
    tracemalloc.start()
    try:
        kept = action()
        _, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return peak
