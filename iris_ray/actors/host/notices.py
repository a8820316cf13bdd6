"""The way of a notice on a host: to the tasks of a gang there, and on to the other hosts of the gang.

A notice may come from the host itself, from the pool, from the slice's SliceActor and from other hosts of the gang, so
that all tasks hear of it though any of these processes hangs.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.host.exit_status import WatchedProcess
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice, is_news

logger = logging.getLogger(__name__)

# -- to a task ---------------------------------------------------------------------------------------------------------

WRITE_AGAIN_S = 0.5
SAVED_POLL_S = 0.02
"""Seconds between two looks whether a task has saved its state; its gang moves once all tasks have."""
LATE_ANSWER_S = 5.0
"""The time after a notice's deadline by which a caller gets an answer. It allows for clocks that differ."""


class TaskNotices:
    """Delivers notices to one task, as a file and a SIGTERM, and waits until the task has saved its state.

    Args:
        process: the task's process.
        files: the files that the process and its host share.
        has_started: whether user code has begun to run in the process. Before that it has no signal handler.
        background: runs the delivery.
    """

    def __init__(
        self,
        process: WatchedProcess,
        files: TaskFiles,
        has_started: Callable[[], bool],
        background: BackgroundTasks,
    ) -> None:
        self._process = process
        self._files = files
        self._has_started = has_started
        self._background = background
        self._latest: Notice | None = None
        self._delivery: asyncio.Task[bool] | None = None
        self._was_signalled = False

    def hear(self, notice: Notice) -> None:
        """Begin to tell the task of a notice in place of the latest one, if it is news. Return at once."""
        if is_news(self._latest, notice, time.time()):
            if self._delivery is not None:
                self._delivery.cancel()
            self._latest = notice
            self._delivery = self._background.start(self._tell(notice), "delivering a notice to a task")

    async def has_saved(self, deadline: float) -> bool:
        """Return whether the task has saved its state for the latest notice; False once another one replaces that.

        The answer comes by the deadline, or `LATE_ANSWER_S` later.
        """
        if (delivery := self._delivery) is None:
            return False
        await asyncio.wait({delivery}, timeout=max(0.0, deadline - time.time()) + LATE_ANSWER_S)
        return delivery.done() and not delivery.cancelled() and delivery.result()

    async def _tell(self, notice: Notice) -> bool:
        """Deliver a notice, and wait until the task has saved its state or ended. Return whether it has saved."""
        while not self._process.ended and not self._write(notice):
            await self._process.wait_at_most(WRITE_AGAIN_S)
        while not self._process.ended and not self._has_started():
            await self._process.wait_at_most(SAVED_POLL_S)
        if not self._was_signalled:  # a second signal would interrupt a handler that is saving
            self._was_signalled = True
            self._process.signal(signal.SIGTERM)
        while not self._process.ended and not os.path.exists(self._files.saved):
            await self._process.wait_at_most(SAVED_POLL_S)
        return os.path.exists(self._files.saved)

    def _write(self, notice: Notice) -> bool:
        """Return whether the notice could be written. A full disk may have room later."""
        try:
            self._files.write_notice(notice)
        except OSError as error:
            logger.warning("the notice %s can't be written for now: %s", notice.reason, error)
            return False
        return True


# -- to the gang -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Membership:
    """A task process here, and the hosts to which this host passes the notices of its gang."""

    attempt: AttemptId
    peers: Sequence[Actor[HostInterface]]
    passed_on: list[Notice] = field(default_factory=list)

    def is_to_pass(self, notice: Notice) -> bool:
        """Return whether a notice is news, and was not passed on before. Otherwise two notices could circulate."""
        latest = self.passed_on[-1] if self.passed_on else None
        return is_news(latest, notice, time.time()) and not any(map(notice.repeats, self.passed_on))


class GangPeers:
    """The gangs of a host's tasks, by the pids of their processes.

    Each host passes a notice on once, to the few peers that `peers_of` gives it. So a notice goes round the hosts that
    can't pass it on.

    Args:
        tell: tells the task of a pid. It may be called several times for one notice.
    """

    def __init__(self, tell: Callable[[int, Notice], None]) -> None:
        self._tell = tell
        self._members: dict[int, _Membership] = {}
        self._background = BackgroundTasks()

    def meet(self, pid: int, attempt: AttemptId, peers: Sequence[Actor[HostInterface]]) -> None:
        """Note that a process runs a task of this attempt."""
        self._members[pid] = _Membership(attempt, peers)

    def forget(self, pid: int) -> None:
        """Note that a process ends."""
        self._members.pop(pid, None)

    def spread(self, notice: Notice) -> None:
        """Tell the gangs of all tasks here, since this host is about to go."""
        for attempt in {member.attempt for member in self._members.values()}:
            self.hear(attempt, notice)

    def hear(self, attempt: AttemptId, notice: Notice) -> None:
        """Tell the tasks of an attempt here, and pass the notice on. Ignore it if that attempt does not run here."""
        peers: dict[str, Actor[HostInterface]] = {}  # by name: processes of one task have the same peers
        for pid, member in self._members.items():
            if member.attempt == attempt and member.is_to_pass(notice):
                member.passed_on.append(notice)
                peers |= {peer.name: peer for peer in member.peers}
                self._tell(pid, notice)
        for peer in peers.values():
            passing = peer.ask_once(HostInterface.hear_notice, attempt, notice, time.time())
            self._background.start(passing, f"passing a notice on to {peer.name}")
