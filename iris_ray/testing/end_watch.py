"""Reports simulated hosts that end unasked: a fault of this machine, not of the simulation."""

import sys
import threading
from collections.abc import Callable

from iris_ray.testing.tpu_host import RunningHost

_LOOK_S = 0.5


class EndWatch:
    """Watches hosts in the background, and prints the end of a raylet's log if the raylet ended by itself.

    It prints in a quiet cluster too: otherwise such an end looks like a loss that a test asked for.

    Args:
        tail: returns the last lines of a host's logs, as the end of a message.
    """

    def __init__(self, tail: Callable[[RunningHost], str]) -> None:
        self._tail = tail
        self._lock = threading.Lock()
        self._hosts: list[RunningHost] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="end-watch", daemon=True)
        self._thread.start()

    def add(self, host: RunningHost) -> None:
        """Watch one more host."""
        with self._lock:
            self._hosts.append(host)

    def expect(self, host: RunningHost) -> None:
        """Expect a host to end by itself: it was drained, or is frozen for longer than Ray waits."""
        with self._lock:
            self._hosts = [other for other in self._hosts if other is not host]

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with self._lock:
                ended = [host for host in self._hosts if not host.machine.running]
                self._hosts = [host for host in self._hosts if host not in ended]
            for host in ended:
                if not host.machine.killed:
                    print(
                        f"simulated host {host.host.name} ended by itself; its log ends with:{self._tail(host)}",
                        file=sys.stderr,
                        flush=True,
                    )
