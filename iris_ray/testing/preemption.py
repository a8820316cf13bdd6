"""The preemption of one slice."""

import threading
from collections.abc import Callable


class Preemption:
    """The preemption of one slice, announced, under way or done.

    Attributes:
        slice_name: the slice.
        notice_s: seconds between the announcement and the kill.
    """

    def __init__(self, slice_name: str, notice_s: float, kill: Callable[[], None]) -> None:
        self.slice_name = slice_name
        self.notice_s = notice_s
        self._kill = kill
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether the hosts are gone."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the hosts are gone, at most ``timeout_s`` seconds. Return whether they are."""
        return self._done.wait(timeout_s)

    def start(self) -> None:
        """Begin to count down; without notice, kill before this returns."""
        if not self.notice_s:
            self._end()
            return
        self._thread = threading.Thread(target=self._count_down, name=f"preempt-{self.slice_name}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Call the kill off if it has not begun; if it has, wait for its end."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _count_down(self) -> None:
        if not self._cancelled.wait(self.notice_s):
            self._end()

    def _end(self) -> None:
        self._kill()
        self._done.set()
