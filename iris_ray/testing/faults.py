"""The faults of hosts in a simulated cluster: kills, preemptions, maintenance, freezes."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from iris_ray.testing.console import ConsoleOutput
from iris_ray.testing.host_starter import EndWatch
from iris_ray.testing.ray_node.head import RayHead
from iris_ray.testing.tpu_host import NoticeChannel, RunningHost


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


# -- faults ------------------------------------------------------------------------------------------------------------


class HostFaults:
    """Injects faults; `SimulatedCluster` has the same methods, documented, by the names of slices and hosts.

    It announces preemptions to the head, tells the end watch which hosts may end by themselves, and the console of
    every fault.
    """

    def __init__(self, head: RayHead, end_watch: EndWatch, console: ConsoleOutput) -> None:
        self._head = head
        self._end_watch = end_watch
        self._console = console
        self._lock = threading.Lock()
        self._preemptions: list[Preemption] = []

    def kill(self, victim: RunningHost) -> None:
        if victim.machine.running:
            self._console.say(f"killing host {victim.host.name}")
            victim.machine.kill()

    def kill_raylet(self, victim: RunningHost) -> None:
        self._end_watch.expect(victim)
        self._console.say(f"killing the raylet of host {victim.host.name}")
        victim.machine.kill_command()

    def freeze(self, victim: RunningHost) -> None:
        self._end_watch.expect(victim)
        self._console.say(f"freezing host {victim.host.name}")
        victim.machine.freeze()

    def thaw(self, victim: RunningHost) -> None:
        self._console.say(f"thawing host {victim.host.name}")
        victim.machine.thaw()

    def announce_maintenance(self, victim: RunningHost, starts_in_s: float) -> None:
        self._console.say(f"announcing maintenance of host {victim.host.name} in {starts_in_s:g} s")
        victim.metadata.announce_maintenance(starts_in_s)

    def call_off_maintenance(self, victim: RunningHost) -> None:
        self._console.say(f"calling maintenance of host {victim.host.name} off")
        victim.metadata.call_off_maintenance()

    def preempt(
        self, slice_name: str, victims: Sequence[RunningHost], notice_s: float, heard_by: NoticeChannel
    ) -> Preemption:
        """Take hosts away: now if ``notice_s`` is 0, otherwise in the background, that many seconds from now."""
        preemption = Preemption(slice_name, notice_s, partial(self._kill_together, slice_name, victims))
        with self._lock:
            self._preemptions.append(preemption)
        if notice_s:
            self._console.say(f"preempting slice {slice_name} with {notice_s:g} s notice")
        preemption.start()
        if notice_s and heard_by != "ray":
            for victim in victims:
                victim.metadata.preempt()
        if notice_s and heard_by != "metadata":
            self._announce(slice_name, victims, time.time() + notice_s)
        return preemption

    def cancel_preemptions(self) -> None:
        """Call off the kills that have not begun, and wait for the others."""
        with self._lock:
            preemptions = list(self._preemptions)
        for preemption in preemptions:
            preemption.cancel()

    def _announce(self, slice_name: str, victims: Sequence[RunningHost], deadline: float) -> None:
        """Tell Ray of a preemption, all hosts at once, because each frozen host costs a timeout."""
        for victim in victims:
            self._end_watch.expect(victim)

        def announce(victim: RunningHost) -> None:
            if not self._head.announce_preemption(victim.host.node_id, f"{slice_name} is being preempted", deadline):
                self._console.say(f"host {victim.host.name} did not take the notice")

        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(announce, victims))

    def _kill_together(self, slice_name: str, victims: Sequence[RunningHost]) -> None:
        self._console.say(f"killing slice {slice_name}")
        for victim in victims:
            victim.machine.begin_kill()
        for victim in victims:
            victim.machine.kill()
