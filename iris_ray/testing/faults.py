"""The preemption of a slice in a simulated cluster, and its announcement."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from iris_ray.testing.ray_node.head import RayHead
from iris_ray.testing.tpu_host import RunningHost

NoticeChannel = Literal["both", "ray", "metadata"]
"""Where a preemption is announced: as a drain of Ray's nodes, by the hosts' metadata servers, or both."""


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


def announce_to_ray(head: RayHead, preemption: Preemption, victims: Sequence[RunningHost]) -> list[str]:
    """Have Ray drain the hosts of a preemption, all at once, because each frozen host costs a timeout.

    Returns:
        The names of the hosts whose raylets did not take the notice.
    """
    reason, deadline = f"{preemption.slice_name} is being preempted", time.time() + preemption.notice_s

    def announce(victim: RunningHost) -> bool:
        return head.announce_preemption(victim.host.node_id, reason, deadline)

    with ThreadPoolExecutor(max_workers=16) as pool:
        taken = list(pool.map(announce, victims))
    return [victim.host.name for victim, is_taken in zip(victims, taken, strict=True) if not is_taken]
