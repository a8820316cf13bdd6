"""How long a silent host or slice is tolerated. Ray's own health checks take a minute to find a frozen host.

The limit is a host's ``silence_s``: the option ``host_silence`` of its job, or `HOST_SILENCE_S` in
`actors/wire/messages.py`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from ray.exceptions import ActorDiedError, ActorUnschedulableError, OutOfMemoryError

from iris_ray.actors.wire.answers import Unreachable
from iris_ray.actors.wire.background import BackgroundTasks, repeat

Key = TypeVar("Key")

PING_S, RETRY_S = 1.0, 0.2
FIRST_PING_S = 0.2
"""A member that was just told to start a task is busy, and may have returned before the first ping."""
LAG_CHECK_S = 0.25


class FailureDetector(Generic[Key]):
    """Pings members once a second. A member that is silent for `limit_s` is marked lost.

    Time in which this process itself was late does not count: on a machine without free CPU every answer is late.

    Args:
        ping: asks one member.
        keys: the members.
        limit_s: silence after which a member is marked lost; seconds.
        since_first: whether members may still be starting: their silence counts from their first answer.

    Attributes:
        silent: the members that are marked lost, and why.
        hung: those of them whose process may still be there. Asking one that is gone fails at once; asking these waits.
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
        """Mark members lost that somebody else has found silent, who asks them."""
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
    """Await calls to members for as long as they take, but no member that stops answering pings meanwhile.

    Args:
        calls: by member.
        ping: asks one member.
        limit_s: silence after which a member is marked lost; seconds.

    Returns:
        The answers. `Unreachable` for a member that is marked lost, and the exception of a call that raised.
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
