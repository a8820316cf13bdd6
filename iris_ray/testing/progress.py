"""Tells on stderr what a simulated cluster does."""

import sys
import time


class Progress:
    """Prints a line for each step, with the seconds since the cluster began.

    Args:
        quiet: print nothing.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._began = time.monotonic()

    def begin(self) -> None:
        """Count the seconds from now on."""
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        if not self._quiet:
            elapsed = time.monotonic() - self._began
            print(f"[simulated cluster {elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)
