"""Passes notices on between the hosts of a gang, so that all tasks hear them though the pool or a SliceActor hangs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice, is_news, is_same


@dataclass(slots=True)
class _Membership:
    """A task process here, and the hosts to which this host passes the notices of its gang."""

    attempt: AttemptId
    peers: Sequence[Actor[HostInterface]]
    passed_on: list[Notice] = field(default_factory=list)

    def is_to_pass(self, notice: Notice) -> bool:
        """Return whether a notice is news. A notice that this host has passed on is not, so that none circulates."""
        latest = self.passed_on[-1] if self.passed_on else None
        return is_news(latest, notice, time.time()) and not any(is_same(told, notice) for told in self.passed_on)


class GangPeers:
    """The gangs of a host's tasks, by the pids of their processes.

    A host passes each notice on once, to the few peers that `peers_of` gives it, and they do the same. So a notice goes
    round the hosts that can't pass it on.

    Args:
        tell: tells the task of a pid. It may be told of the same notice several times.
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
