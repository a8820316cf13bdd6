"""Watches what a host's own metadata server says about the host's future: preemption and maintenance.

A host without a metadata server is no failure: the watch looks for one again, ever more seldom, and logs that once.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from iris_ray.actors.host.maintenance import CalledOff, MaintenanceNews
from iris_ray.actors.host.metadata_client import Answer, MetadataClient, NoAnswer, metadata_hosts, path_of
from iris_ray.model.notices import HostNotice, NoticeKind

logger = logging.getLogger(__name__)

PREEMPTED = "instance/preempted"
UPCOMING_MAINTENANCE = "instance/upcoming-maintenance"
PREEMPTION_NOTICE_S = 30.0
"""How long a spot VM runs on when ``preempted`` turns TRUE. No server says it; the documentation does."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How patient a watch is, all in seconds.

    Args:
        long_poll: how long the server may keep a question until something changes.
        answer: how long any other answer may take, and the answer to a long poll beyond ``long_poll``.
        at_least: the pause between two long polls, if the server does not keep them.
        look: the pause between two questions about maintenance.
        maintenance_lead: how long before its beginning a maintenance is told. It is announced days ahead, and a host
            with a notice gets no new tasks. A maintenance that is put off beyond that is called off for now.
        first_pause, longest_pause: the pause after a missing answer; it doubles from one to the other.
    """

    long_poll: float = 60.0
    answer: float = 5.0
    at_least: float = 1.0
    look: float = 10.0
    maintenance_lead: float = 600.0
    first_pause: float = 1.0
    longest_pause: float = 60.0


class MetadataWatch:
    """Tells each notice once, and once that a maintenance is called off. Does not use Ray.

    Args:
        tell: takes each notice, on the event loop.
        call_off: called when the maintenance that was told last is no longer planned; another one may follow.
        hosts: where the server may be; by default what the environment says, else the well-known places.
        times: how patient the watch is.
        announced: the notice of a maintenance that an earlier watch has told.
    """

    def __init__(
        self,
        tell: Callable[[HostNotice], object],
        call_off: Callable[[], object],
        hosts: Sequence[str] | None = None,
        times: WatchTimes | None = None,
        announced: HostNotice | None = None,
    ) -> None:
        self._tell = tell
        self._call_off = call_off
        self._hosts = metadata_hosts(os.environ) if hosts is None else tuple(hosts)
        self._times = times or WatchTimes()
        self._maintenance = MaintenanceNews(self._times.maintenance_lead, announced)
        self._has_logged_silence = False

    async def run(self) -> None:
        """Watch until cancelled."""
        async with MetadataClient(connect_s=self._times.answer) as client:
            host = await self._persistently(partial(self._find_server, client))
            async with asyncio.TaskGroup() as watches:
                watches.create_task(self._watch_preempted(client, host))
                watches.create_task(self._watch_maintenance(client, host))

    async def _find_server(self, client: MetadataClient) -> str:
        """Return the first of the hosts that answers as a metadata server does; raise NoAnswer if none does."""
        for host in self._hosts:
            try:
                await client.ask(host, "/", {}, self._times.answer)
            except NoAnswer as error:
                self._log_once(error)
            else:
                return host
        raise NoAnswer("no host answers as a metadata server")

    async def _watch_preempted(self, client: MetadataClient, host: str) -> None:
        last = Answer(200, "FALSE", "")
        while True:
            found, asked_at = await self._persistently(partial(self._ask_preempted, client, host, last.etag))
            if (found.body, last.body) == ("TRUE", "FALSE"):
                reason = "the metadata server of the host says that it is being preempted"
                self._tell(HostNotice(NoticeKind.PREEMPTION, reason, time.time() + PREEMPTION_NOTICE_S))
            if found.body == last.body:
                await asyncio.sleep(asked_at + self._times.at_least - asyncio.get_running_loop().time())
            last = found

    async def _ask_preempted(self, client: MetadataClient, host: str, etag: str) -> tuple[Answer, float]:
        """Return the server's answer, as soon as it differs from the one with this etag, and when it was asked."""
        asked_at = asyncio.get_running_loop().time()
        query = {}
        if etag:
            timeout_s = f"{self._times.long_poll:.0f}"
            query = {"wait_for_change": "true", "last_etag": etag, "timeout_sec": timeout_s}
        found = await client.ask(host, path_of(PREEMPTED), query, self._times.long_poll + self._times.answer)
        if found.status != 200:
            raise NoAnswer(f"{host} answers {found.status} for {PREEMPTED}")
        return found, asked_at

    async def _watch_maintenance(self, client: MetadataClient, host: str) -> None:
        ask = partial(client.ask, host, path_of(UPCOMING_MAINTENANCE), {"alt": "json"}, self._times.answer)
        while True:
            found = await self._persistently(ask, self._maintenance.heard_nothing)
            news = self._maintenance.heard(found, time.time())
            if isinstance(news, HostNotice):
                self._tell(news)
            elif news is CalledOff.CALLED_OFF:
                self._call_off()
            await asyncio.sleep(self._times.look)

    async def _persistently(
        self, ask: Callable[[], Coroutine[Any, Any, T]], missed: Callable[[], None] = lambda: None
    ) -> T:
        """Ask until there is an answer, with ever longer pauses. ``missed`` is called after each missing answer."""

        def note(state: RetryCallState) -> None:
            assert state.outcome is not None
            self._log_once(state.outcome.exception())
            missed()

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(NoAnswer),
            wait=wait_exponential(multiplier=self._times.first_pause, max=self._times.longest_pause),
            before_sleep=note,
        )
        return await retrying(ask)

    def _log_once(self, error: BaseException | None) -> None:
        if not self._has_logged_silence:
            self._has_logged_silence = True
            logger.info("no notices from a metadata server for now: %s", error)
