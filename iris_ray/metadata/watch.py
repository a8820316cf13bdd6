"""Notices of a host's metadata server: preemption and maintenance."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from iris_ray.model.notices import HostNotice, NoticeKind
from iris_ray.settings import TEST_METADATA_HOST

# -- metadata client ---------------------------------------------------------------------------------------------------
# Every VM on Google Cloud has a metadata server (https://cloud.google.com/compute/docs/metadata/overview). Other
# machines have none.

HOST_VARIABLES = (TEST_METADATA_HOST, "GCE_METADATA_HOST")
"""Environment variables with the server's ``host`` or ``host:port``; the second one is Google's own name."""
WELL_KNOWN_HOSTS = ("metadata.google.internal", "169.254.169.254")

_FLAVOR = {"Metadata-Flavor": "Google"}
MOST_BYTES = 1 << 16
"""The limit for an answer. Where the well-known names are another network's, anything may answer."""


class NoAnswer(Exception):
    """The metadata server can't be reached, or can't answer at the moment."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a metadata server answered; ``etag`` is empty if it sent none."""

    status: int
    body: str
    etag: str


class MetadataClient:
    """Asks metadata servers. Use it as an async context manager.

    Args:
        connect_s: seconds that a connection may take.
    """

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        # No proxy: a metadata server's answers are about the host that asks.
        self._session = aiohttp.ClientSession(trust_env=False, headers=_FLAVOR, auto_decompress=False)

    async def __aenter__(self) -> "MetadataClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, host: str, path: str, query: Mapping[str, str], timeout_s: float) -> Answer:
        """Return what a metadata server answers, HTTP errors included.

        Raises:
            NoAnswer: there is no answer in time, or the answer is not from a metadata server.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=self._connect_s)
        url = f"http://{host}{path}"
        try:
            async with self._session.get(url, params=query, timeout=timeout, allow_redirects=False) as response:
                if response.headers.get("Metadata-Flavor") != "Google":
                    raise NoAnswer(f"{host} is not a metadata server of Google's")
                body = b""
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise NoAnswer(f"{host} answers with more than {MOST_BYTES:,} bytes")
                return Answer(response.status, body.decode(errors="replace").strip(), response.headers.get("ETag", ""))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise NoAnswer(f"{host} does not answer: {error or type(error).__name__}") from error


def metadata_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the addresses of the host's metadata server for a process with this environment, likeliest first."""
    configured = next((environ[name] for name in HOST_VARIABLES if environ.get(name)), None)
    return (configured,) if configured else WELL_KNOWN_HOSTS


def path_of(key: str) -> str:
    """Return the path of a metadata key."""
    return f"/computeMetadata/v1/{key}"


# -- maintenance -------------------------------------------------------------------------------------------------------

DENIALS = 2
"""The number of denials in a row after which a maintenance counts as called off."""


class CalledOff(Enum):
    """An announced maintenance is no longer planned, or not for the near future."""

    CALLED_OFF = "called off"


class MaintenanceNews:
    """Finds the changes in a series of answers: a new maintenance, another date, or a maintenance that is called off.

    Args:
        lead_s: seconds before its beginning at which a maintenance is told. If it is put off beyond that, it is
            called off for now.
        announced: the notice of a maintenance that was told earlier, or None.
    """

    def __init__(self, lead_s: float, announced: HostNotice | None = None) -> None:
        self._lead_s = lead_s
        self._told = announced
        self._denials = 0

    def heard(self, answer: Answer, now: float) -> HostNotice | CalledOff | None:
        """Take the next answer. Return a new notice, `CalledOff` for the last notice, or None if nothing has changed.

        Args:
            answer: to ``upcoming-maintenance?alt=json``.
            now: seconds since the epoch.
        """
        planned = maintenance_notice(answer.body) if answer.status == 200 else None
        if planned is not None and self._is_near(planned, now):
            is_new, self._told, self._denials = planned != self._told, planned, 0
            return planned if is_new else None
        if self._told is None or (planned is None and not denies_maintenance(answer)):
            self._denials = 0
            return None
        self._denials += 1
        if self._denials < DENIALS:
            return None
        self._told, self._denials = None, 0
        return CalledOff.CALLED_OFF

    def heard_nothing(self) -> None:
        """Note that the server did not answer, so that the answers before and after are not in a row."""
        self._denials = 0

    def _is_near(self, planned: HostNotice, now: float) -> bool:
        return planned.deadline is None or planned.deadline - now <= self._lead_s


def maintenance_notice(body: str) -> HostNotice | None:
    """Return the notice in the body of ``upcoming-maintenance?alt=json``; None if nothing is planned.

    If nothing is planned, a server answers an object with an ``error``, an empty object, or the text NONE. The
    documentation spells fields ``window_start_time`` for the metadata server and ``windowStartTime`` for the API.
    """
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    start = fields.get("window_start_time") or fields.get("windowStartTime")
    if not isinstance(start, str):
        return None
    kind = fields.get("maintenance_type") or fields.get("maintenanceType") or fields.get("type") or "of no type"
    try:
        deadline = datetime.fromisoformat(start).timestamp()
    except ValueError:
        deadline = None
    reason = f"the metadata server of the host announces maintenance ({kind}) for {start}"
    return HostNotice(NoticeKind.MAINTENANCE, reason, deadline)


def denies_maintenance(answer: Answer) -> bool:
    """Return whether a metadata server says that no maintenance is planned.

    Usually it says so with a 503 and an object that has an ``error``. A server that is not available also answers 503,
    but without such an object, and denies nothing.
    """
    if answer.status == 404:
        return True
    if answer.status not in (200, 503):
        return False
    try:
        said: Any = json.loads(answer.body)
    except (ValueError, RecursionError):
        return answer.body == "NONE"
    return said == "NONE" or (isinstance(said, dict) and not ({"window_start_time", "windowStartTime"} & said.keys()))


# -- metadata watch ----------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

PREEMPTED = "instance/preempted"
UPCOMING_MAINTENANCE = "instance/upcoming-maintenance"
PREEMPTION_NOTICE_S = 30.0
"""The time that a spot VM runs on after ``preempted`` turns TRUE, from the documentation; no server names it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """The timeouts and pauses of a watch, in seconds.

    Args:
        long_poll: how long the server may hold a question until its answer changes.
        answer: how long any other answer may take, and the answer to a long poll beyond ``long_poll``.
        at_least: the pause between two long polls, if the server does not hold them.
        look: the pause between two questions about maintenance.
        maintenance_lead: as ``lead_s`` of `MaintenanceNews`. Maintenance is announced days ahead, and a host with a
            notice gets no new tasks.
        first_pause, longest_pause: the pause after a missing answer; it doubles from the first to the longest.
    """

    long_poll: float = 60.0
    answer: float = 5.0
    at_least: float = 1.0
    look: float = 10.0
    maintenance_lead: float = 600.0
    first_pause: float = 1.0
    longest_pause: float = 60.0


class MetadataWatch:
    """Tells each notice once, and calls a maintenance off once. Does not use Ray.

    A host may have no metadata server: the watch looks for one with ever longer pauses, and logs that once.

    Args:
        tell: takes each notice, on the event loop.
        call_off: called when the maintenance that was told last is no longer planned; another one may follow.
        hosts: addresses of the server; None: those of `metadata_hosts`.
        times: timeouts and pauses.
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
        """Return the first host that answers as a metadata server does. Raise NoAnswer if none does."""
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
            if found.body == "TRUE" != last.body:
                reason = "the metadata server of the host says that it is being preempted"
                self._tell(HostNotice(NoticeKind.PREEMPTION, reason, time.time() + PREEMPTION_NOTICE_S))
            if found.body == last.body:
                await asyncio.sleep(asked_at + self._times.at_least - asyncio.get_running_loop().time())
            last = found

    async def _ask_preempted(self, client: MetadataClient, host: str, etag: str) -> tuple[Answer, float]:
        """Return the server's answer once it differs from the one with this etag, and the time of the question."""
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
        """Ask until there is an answer, with ever longer pauses. Call ``missed`` after each missing answer."""

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
