"""Liveness: a pool and a slice notice silent hosts, and a host notices that its pool no longer calls it."""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from ray.exceptions import ActorDiedError, ActorUnschedulableError, OutOfMemoryError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks, repeat
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.host_interface import HostInterface

Key = TypeVar("Key")

PING_S, RETRY_S = 1.0, 0.2
FIRST_PING_S = 0.2
"""The pause before the first ping: a member that starts a task is busy, and the task may return within this time."""
LAG_CHECK_S = 0.25


class FailureDetector(Generic[Key]):
    """Pings members once a second. A member that is silent for `limit_s` is marked lost.

    Time in which this process itself was late does not count: on a machine without free CPU every answer is late.

    Args:
        ping: asks one member.
        keys: the members.
        limit_s: silence after which a member is marked lost; seconds.
        since_first: whether the silence of a member counts from its first answer, since it may still be starting.

    Attributes:
        silent: why a member is marked lost, by member.
        hung: the silent members whose process may still exist. A call of a process that is gone fails at once; a call
            of a hung one would wait.
    """

    def __init__(
        self,
        ping: Callable[[Key], Awaitable[Any]],
        keys: Iterable[Key],
        limit_s: float,
        since_first: bool = False,
    ) -> None:
        self.silent: dict[Key, str] = {}
        self.hung: dict[Key, str] = {}
        self._ping = ping
        self._limit = limit_s
        self._since_first = since_first
        self._late, self._checked = 0.0, asyncio.get_running_loop().time()
        self._found = asyncio.Event()
        self._heard: dict[Key, float] = {}  # when each member answered last
        self._background = BackgroundTasks()
        for key in keys:
            self._background.start(self._watch(key), f"watching {key}")
        self._background.repeat(self._measure_lag, "measuring lag")

    async def found(self) -> None:
        """Return when a member is marked lost."""
        await self._found.wait()

    def hear(self, silent: Mapping[Key, str], hung: Mapping[Key, str]) -> None:
        """Mark members lost that another process has found silent."""
        self.hung.update(hung)
        for key, reason in silent.items():
            self._lost(key, reason)

    def stop(self) -> None:
        """Stop pinging."""
        self._background.cancel()

    async def _watch(self, key: Key) -> None:
        await asyncio.sleep(FIRST_PING_S)
        self._heard[key] = math.inf if self._since_first else self._time()
        await repeat(lambda: self._ask(key), f"watching {key}", RETRY_S)

    async def _ask(self, key: Key) -> bool:
        """Ping a member, and pause once it has answered. Return whether it is lost."""
        call = asyncio.ensure_future(self._received(key))
        try:
            while not call.done():
                left = self._heard[key] + self._limit - self._time()
                if left < 1e-6:  # less than sums of seconds are exact to
                    self.hung[key] = f"has not answered for {self._limit:g} s"
                    self._lost(key, self.hung[key])
                    return True
                await asyncio.wait({call}, timeout=min(left, self._limit))
        finally:
            call.cancel()
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if isinstance(error, (ActorDiedError, ActorUnschedulableError, OutOfMemoryError)):
            self._lost(key, f"is gone ({type(error).__name__})")
            return True
        if error is None:
            self._heard[key] = self._time()
        await asyncio.sleep(PING_S if error is None else RETRY_S)
        return False

    async def _received(self, key: Key) -> None:
        await self._ping(key)

    def _lost(self, key: Key, reason: str) -> None:
        self.silent[key] = reason
        self._found.set()

    def _time(self) -> float:
        """Return the time of a clock that stands still while this process is late."""
        return asyncio.get_running_loop().time() - self._late - self._late_now()

    def _late_now(self) -> float:
        return max(0.0, asyncio.get_running_loop().time() - self._checked - 2 * LAG_CHECK_S)

    async def _measure_lag(self) -> None:
        await asyncio.sleep(LAG_CHECK_S)
        self._late += self._late_now()
        self._checked = asyncio.get_running_loop().time()


async def answers_unless_silent(
    calls: Mapping[Key, Awaitable[Any]], ping: Callable[[Key], Awaitable[Any]], limit_s: float
) -> dict[Key, Any]:
    """Await calls to members as long as the members answer pings.

    Args:
        calls: by member.
        ping: asks one member.
        limit_s: silence after which a member is marked lost; seconds.

    Returns:
        By member, the answer, the exception of a call that raised, or `Unreachable` for a member that is marked lost.
    """
    asks = {key: asyncio.ensure_future(call) for key, call in calls.items()}
    detector = FailureDetector(ping, asks, limit_s)
    try:
        while waiting := {ask for key, ask in asks.items() if not ask.done() and key not in detector.silent}:
            await asyncio.wait(waiting, timeout=PING_S)
        return {key: _outcome(ask) if ask.done() else Unreachable(detector.silent[key]) for key, ask in asks.items()}
    finally:
        detector.stop()
        for ask in asks.values():
            ask.cancel()


def _outcome(ask: "asyncio.Future[Any]") -> Any:
    return asyncio.CancelledError() if ask.cancelled() else ask.exception() or ask.result()


TICK_S = 1.0
SLICE_UNASKED_S = 10.0
"""A SliceActor that was not called for this time stops pinging its hosts: its pool may be gone."""
HOST_UNASKED_S = 60.0
"""A TPUHostActor that was not called for this time ends its tasks and itself: as long as Ray waits for a GCS."""


class Contact:
    """Counts the seconds since an actor was last called: its pool may hang, or the network may have cut the host off.

    The pool marks such a host lost within seconds, and runs the gang elsewhere. So the tasks here must end. Otherwise
    two attempts of a task would write the same checkpoints as long as the network is broken.

    Args:
        limit_s: contact is lost after this time without a call; seconds.
        matters: returns whether anything here must end with the contact; other seconds don't count.
    """

    def __init__(self, limit_s: float, matters: Callable[[], bool]) -> None:
        self._limit_s = limit_s
        self._matters = matters
        self._unasked_s = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the last call is too long ago."""
        return self._unasked_s >= self._limit_s

    def asked(self) -> None:
        """Restart the count after a call."""
        self._unasked_s = 0.0

    async def count(self) -> None:
        """Sleep for one second and count it. A pause in which this whole process did not run counts as one second."""
        await asyncio.sleep(TICK_S)
        self._unasked_s = self._unasked_s + TICK_S if self._matters() else 0.0


MOST_ASKED = 64


class HostWatch:
    """Pings the hosts of a slice once a second, as long as this process is pinged itself.

    More than `MOST_ASKED` hosts are pinged in groups: the first host of a group pings the others and reports the silent
    ones. One process that pings 1,024 hosts would need half a core.

    Args:
        hosts: by index.
        place: the slice, or the place on shared hosts.
        silence_s: a host that has not answered for this time is marked lost; seconds.

    Attributes:
        detector: knows the silent hosts.
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
        """Ping the first host of a group, but only while this process is pinged. Unpinged hosts end their tasks."""
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


class SharedWatches:
    """The watches of one host that all places of a pool there share: one ping a second, however many tasks it runs.

    Args:
        host: the host.
        name: its name.
    """

    def __init__(self, host: Actor[HostInterface], name: str) -> None:
        self._host = host
        self._name = name
        self._latest: dict[float, HostWatch] = {}  # by their limit
        self._users: dict[HostWatch, int] = {}

    def take(self, silence_s: float) -> "WatchUse":
        """Return a watch with this limit; the host has index 0. A host that was marked lost is watched anew."""
        watch = self._latest.get(silence_s)
        if watch is None or watch.detector.silent:
            watch = self._latest[silence_s] = HostWatch({0: self._host}, self._name, silence_s)
        self._users[watch] = self._users.get(watch, 0) + 1
        return WatchUse(watch, lambda: self._leave(watch, silence_s))

    def _leave(self, watch: HostWatch, silence_s: float) -> None:
        self._users[watch] -= 1
        if not self._users[watch]:
            watch.stop()
            del self._users[watch]
            if self._latest.get(silence_s) is watch:
                del self._latest[silence_s]


class WatchUse:
    """The use of a `HostWatch` that others use as well. It has the same methods, and is left with `stop`."""

    def __init__(self, watch: HostWatch, stop: Callable[[], None]) -> None:
        self.detector = watch.detector
        self.asked = watch.asked
        self.stop = stop


def groups_of(indexes: list[int]) -> dict[int, list[int]]:
    """Return the other hosts of each group by the group's first host. Few hosts form groups of one."""
    size = 1 if len(indexes) <= MOST_ASKED else math.isqrt(len(indexes))
    return {indexes[at]: indexes[at + 1 : at + size] for at in range(0, len(indexes), size)}
