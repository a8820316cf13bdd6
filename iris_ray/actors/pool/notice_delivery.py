"""The pool's part of a notice's way: the notices of an attempt's hosts and of the Controller go to its tasks.

It then asks the tasks until all have saved their state or time is up.
"""

import asyncio
import logging
import time

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.pool.attempt_place import AttemptContext
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.model.notices import NOTICE_S, HostNotice, Notice, NoticeKind, Replacement, is_news

logger = logging.getLogger(__name__)

ASK_AGAIN_S, ASK_AGAIN_AT_MOST_S = 1.0, 10.0
"""The first and the longest pause before tasks are asked again whether they have saved."""
LATE_ANSWER_S = 5.0
"""The time after the deadline in which a slice may still answer."""

_Source = tuple[str, NoticeKind] | None
"""A host's node id and the kind of its notice, or None for the Controller."""


def peers_of(index: int, hosts: int) -> list[int]:
    """Return the hosts of a gang to which one of them passes notices on: those 1, 2, 4, 8, … places after it.

    So 1,024 hosts hear of a notice in ten steps at most, and each one makes ten calls.
    """
    return [(index + (1 << power)) % hosts for power in range((hosts - 1).bit_length())]


class NoticeDelivery:
    """Delivers the most urgent notice of an attempt. The attempt moves when all tasks have saved, or at the deadline.

    Args:
        context: the attempt.

    Attributes:
        latest: the notice that was delivered last and still holds, or None.
    """

    def __init__(self, context: AttemptContext) -> None:
        self.latest: Notice | None = None
        self._known: dict[_Source, Notice] = {}
        self._attempt, self._place = context, context.place
        self._background = BackgroundTasks()
        self._telling: asyncio.Future[None] | None = None
        self._heard: Notice | None = None  # the last notice that tasks were told; it can't be taken back

    # -- what was heard --------------------------------------------------------------------------------------------

    def heard_from_controller(self, notice: Notice) -> Notice | None:
        """Take the Controller's notice in place of its last one. Return the notice that is due for delivery, if any."""
        self._known[None] = notice
        return self._due()

    def heard_from_host(self, node_id: str, notice: HostNotice) -> Notice | None:
        """Take a host's notice, if a task runs there. Return the notice that is due for delivery, if any."""
        host = next((host for hosts in self._place.order.slices for host in hosts if host.node_id == node_id), None)
        if host is None:
            return None
        name = f"{host.slice_name} host {host.host_index}" if self._place.on_slices else f"host {host.address}"
        deadline = time.time() + NOTICE_S if notice.deadline is None else notice.deadline
        told = Notice(notice.kind, f"{name}: {notice.reason}", deadline)
        if is_news(self._known.get((node_id, notice.kind)), told, time.time()):
            self._known[node_id, notice.kind] = told
        return self._due()

    def maintenance_called_off(self, node_id: str) -> Notice | None:
        """Forget a host's maintenance. Return the notice that is due for delivery in its place, if any.

        The tasks keep it if no other notice is known. The Controller's last notice may have been called off
        meanwhile; the Controller repeats it if it still holds.
        """
        called_off = self._known.pop((node_id, NoticeKind.MAINTENANCE), None)
        if called_off is None or self.latest is None or not called_off.repeats(self.latest):
            return None
        self._known.pop(None, None)
        return self._due()

    def _due(self) -> Notice | None:
        """Return the most urgent notice, unless it was delivered last."""
        now, known = time.time(), self._known.values()
        if not known:
            return None
        first = min(known, key=lambda one: (one.deadline <= now, one.kind is NoticeKind.GROWTH, one.deadline))
        if self.latest is not None and first.repeats(self.latest):
            return None
        is_next = is_news(self.latest, first, now)
        return first if is_next else Replacement(first.kind, first.reason, first.deadline)

    # -- delivery --------------------------------------------------------------------------------------------------

    async def introduce(self) -> None:
        """Let the hosts know each other, so that they can pass notices on without this process and the SliceActors."""
        names, size = self._place.names, self._place.order.hosts_per_slice
        hosts = [(host.handle, host.name) for name in names for host in self._attempt.slices.host_actors(name)]
        peers = [[hosts[peer] for peer in peers_of(index, len(hosts))] for index in range(len(hosts))]
        asks = (
            self._attempt.slices.actor(name).ask_once(
                SliceActor.introduce, self._attempt.id, peers[size * slice_id : size * (slice_id + 1)]
            )
            for slice_id, name in enumerate(names)
        )
        await asyncio.gather(*asks)

    def deliver(self, notice: Notice) -> None:
        """Tell every task. The notice replaces an earlier one."""
        self.cancel()
        self.latest = self._heard = notice
        self._telling = self._background.start(self._tell(notice), f"giving notice to {self._attempt.id}")

    def cancel(self) -> None:
        """Stop telling the tasks."""
        if self._telling is not None:
            self._telling.cancel()

    def move_early(self) -> None:
        """Move the attempt if its tasks were told of a notice and one of them ended before all had saved."""
        if self._heard is not None:
            self._attempt.stop.move(self._heard, f"{self._heard.reason}; a task ended before all had saved")

    async def _tell(self, notice: Notice) -> None:
        seconds = notice.deadline - time.time()
        until = time.monotonic() + seconds  # the wall clock may be set meanwhile
        self._tell_hosts(notice)
        what = "end" if notice.kind is NoticeKind.TIME_LIMIT else "move"
        logger.info("%s is to %s within %.0f s: %s", self._attempt.id, what, seconds, notice.reason)
        pause = ASK_AGAIN_S
        while True:  # go on after the deadline: tasks that have saved must not wait for ever
            all_saved, some_wait = await self._ask(notice, max(0.0, until - time.monotonic()))
            if all_saved:
                break
            if some_wait or notice.kind is NoticeKind.GROWTH:
                await asyncio.sleep(max(0.0, until - time.monotonic()))
                if some_wait or await self._is_to_grow():
                    break
            await asyncio.sleep(pause)  # no task waits: none could be told or handles notices, or the growth is off
            pause = min(2 * pause, ASK_AGAIN_AT_MOST_S)
        how = "all its tasks have saved" if all_saved else "not all of its tasks have saved, but time is up"
        self._attempt.stop.move(notice, f"{notice.reason}; {how}")

    def _tell_hosts(self, notice: Notice) -> None:
        """Tell one host of each slice directly, since SliceActors may hang. The hosts pass it on. Returns at once."""
        if not self._place.on_slices:  # their SliceActor is in this process
            return
        for host in (self._attempt.slices.host_actors(name)[0] for name in self._place.names):
            telling = host.ask_once(HostInterface.hear_notice, self._attempt.id, notice, time.time())
            self._background.start(telling, f"telling {host.name} of a notice")

    async def _ask(self, notice: Notice, seconds: float) -> tuple[bool, bool]:
        """Return whether all tasks saved in this time, and whether any has saved and waits for the move."""
        what = self._attempt.id, notice, time.time()
        replies = await self._attempt.ask_within(seconds + LATE_ANSWER_S, SliceActor.notify, *what)
        answers = [reply or (False, False) for reply in replies]
        return all(saved for saved, _ in answers), any(waits for _, waits in answers)

    async def _is_to_grow(self) -> bool:
        """Return whether the slices for a growing gang are still free. If not, the gang stays unless a task waits."""
        if self.latest is None:
            return False
        attempt = self._attempt.id
        there = await self._attempt.controller.ask_once(ControllerInterface.is_to_grow, attempt)
        if there is False:
            logger.info("%s stays: the slices for it are gone", attempt)
            self.latest = None
            self._known.pop(None, None)
        return there is True
