"""Pings the hosts of a slice once a second, for as long as this process is pinged itself.

More than `MOST_ASKED` hosts are pinged in groups: the first host of a group pings the others, and reports which are
silent. One process that pings 1,024 hosts would need half a core.
"""

import math
import secrets
from collections.abc import Mapping

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.contact import SLICE_UNASKED_S, Contact
from iris_ray.actors.wire.failure_detector import FailureDetector

MOST_ASKED = 64


class HostWatch:
    """Watches hosts until it is stopped.

    Args:
        hosts: by index.
        place: the slice, or the place on shared hosts, for whose tasks they are watched.
        silence_s: a host that has not answered for so long is marked lost; seconds.

    Attributes:
        detector: says which hosts are silent.
    """

    def __init__(self, hosts: Mapping[int, Actor[HostInterface]], place: str, silence_s: float) -> None:
        self._hosts = hosts
        self._place = place
        self._silence_s = silence_s
        self._groups = groups_of(list(hosts))
        self._id = secrets.token_hex(4)
        self._contact = Contact(SLICE_UNASKED_S, lambda: True)
        self._background = BackgroundTasks()
        self._background.repeat(self._contact.count, "counting silent seconds")
        self.detector = FailureDetector(self._ask, self._groups, silence_s)

    def asked(self) -> None:
        """Note that this process was pinged."""
        self._contact.asked()

    def stop(self) -> None:
        """Stop pinging."""
        self.detector.stop()
        self._background.cancel()

    async def _ask(self, first: int) -> None:
        """Ping the first host of a group, unless this process is not pinged itself. The hosts then end their tasks."""
        if self._contact.is_lost:
            return
        host, others = self._hosts[first], self._groups[first]
        if not others:
            await host.call(HostInterface.healthy)
        elif (found := await host.call(HostInterface.silent_peers, self._place, self._id)) is not None:
            self.detector.hear(*found)
        else:
            peers = {i: (self._hosts[i].handle, self._hosts[i].name) for i in others}
            await host.call(HostInterface.watch_peers, self._place, self._id, peers, self._silence_s)


def groups_of(indexes: list[int]) -> dict[int, list[int]]:
    """Return by the first host of each group who else is in it. Few hosts are groups of one."""
    size = 1 if len(indexes) <= MOST_ASKED else math.isqrt(len(indexes))
    return {indexes[at]: indexes[at + 1 : at + size] for at in range(0, len(indexes), size)}
