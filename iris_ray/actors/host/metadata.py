"""What a host's own metadata server says about its future: preemption and maintenance.

Every VM on Google Cloud has one (https://cloud.google.com/compute/docs/metadata/overview). Anywhere else there is
none, which is no failure: the watch looks for it again, ever more seldom, and says so once.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp

from iris_ray.model.notices import HostNotice, NoticeKind

logger = logging.getLogger(__name__)

HOST_VARIABLES = ("IRIS_RAY_METADATA_HOST", "GCE_METADATA_HOST")
"""The server's ``host`` or ``host:port``, for those who have it elsewhere; the second one is Google's own name."""

WELL_KNOWN_HOSTS = ("metadata.google.internal", "169.254.169.254")
PREEMPTED = "instance/preempted"
UPCOMING_MAINTENANCE = "instance/upcoming-maintenance"
PREEMPTION_NOTICE_S = 30.0
"""What a spot VM has left when ``preempted`` turns TRUE; it is not told anywhere."""
DENIALS = 2
"""So many looks in a row must say that an announced maintenance is not planned any more, before that is believed."""

_FLAVOR = {"Metadata-Flavor": "Google"}


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """How patient a watch is, all in seconds.

    Args:
        long_poll: how long the server may keep a question until something changes.
        answer: how long it may take for anything else, and longer than that for a long poll.
        at_least: between two long polls, should the server not keep them.
        look: between two looks for maintenance.
        maintenance_lead: how long before its beginning a maintenance is told. It is announced days ahead, and a host
            that is to go takes nothing new. One that is put off beyond that is called off for now.
        first_pause, longest_pause: after no answer; it doubles from one to the other.
    """

    long_poll: float = 60.0
    answer: float = 5.0
    at_least: float = 1.0
    look: float = 10.0
    maintenance_lead: float = 600.0
    first_pause: float = 1.0
    longest_pause: float = 60.0


class NoAnswer(Exception):
    """The metadata server can't be reached, or has nothing sensible to say at the moment."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: str
    etag: str


class MetadataWatch:
    """Tells of each notice once, and when a maintenance that it told of is not planned any more. Knows no Ray.

    Args:
        tell: gets the notices, on the event loop.
        call_off: called when the latest notice of a maintenance does not hold any more; a later one may follow.
        hosts: where the server may be; by default what the environment says, else the well-known places.
        times: how patient it is.
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
        self._announced = announced
        self._failures_are_known = False

    async def run(self) -> None:
        """Watch until cancelled."""
        # No proxy: a metadata server speaks about the host that asks.
        async with aiohttp.ClientSession(trust_env=False, headers=_FLAVOR, auto_decompress=False) as session:
            host = await self._find(session)
            async with asyncio.TaskGroup() as watches:
                watches.create_task(self._watch_preempted(session, host))
                watches.create_task(self._watch_maintenance(session, host))

    async def _find(self, session: aiohttp.ClientSession) -> str:
        """The first of the hosts that answers as a metadata server does."""
        pauses = Pauses(self._times)
        while True:
            for host in self._hosts:
                try:
                    await self._ask(session, host, "/", {}, self._times.answer)
                except NoAnswer as error:
                    self._note(error)
                else:
                    return host
            await pauses.pause()

    async def _watch_preempted(self, session: aiohttp.ClientSession, host: str) -> None:
        pauses, last = Pauses(self._times), Answer(200, "FALSE", "")
        patience_s = self._times.long_poll + self._times.answer
        while True:
            asked_at = time.monotonic()
            question = {}
            if last.etag:
                wait_s = f"{self._times.long_poll:.0f}"
                question = {"wait_for_change": "true", "last_etag": last.etag, "timeout_sec": wait_s}
            try:
                found = await self._ask(session, host, v1(PREEMPTED), question, patience_s)
                if found.status != 200:
                    raise NoAnswer(f"{host} answers {found.status} for {PREEMPTED}")
            except NoAnswer as error:
                self._note(error)
                await pauses.pause()
                continue
            pauses.over()
            if (found.body, last.body) == ("TRUE", "FALSE"):
                reason = "the metadata server of the host says that it is being preempted"
                self._tell(HostNotice(NoticeKind.PREEMPTION, reason, time.time() + PREEMPTION_NOTICE_S))
            if found.body == last.body:
                await asyncio.sleep(asked_at + self._times.at_least - time.monotonic())
            last = found

    async def _watch_maintenance(self, session: aiohttp.ClientSession, host: str) -> None:
        pauses, told, denials = Pauses(self._times), self._announced, 0
        while True:
            try:
                found = await self._ask(session, host, v1(UPCOMING_MAINTENANCE), {"alt": "json"}, self._times.answer)
            except NoAnswer as error:
                self._note(error)
                denials = 0
                await pauses.pause()
                continue
            pauses.over()
            planned = maintenance_notice(found.body) if found.status == 200 else None
            if planned is not None and self._is_near(planned):
                if planned != told:
                    self._tell(planned)
                told, denials = planned, 0
            elif told is not None and (planned is not None or denies_maintenance(found)):
                denials += 1
                if denials == DENIALS:
                    told, denials = None, 0
                    self._call_off()
            else:
                denials = 0
            await asyncio.sleep(self._times.look)

    def _is_near(self, planned: HostNotice) -> bool:
        return planned.deadline is None or planned.deadline - time.time() <= self._times.maintenance_lead

    async def _ask(
        self, session: aiohttp.ClientSession, host: str, path: str, query: Mapping[str, str], timeout_s: float
    ) -> Answer:
        """Whatever a metadata server answers, errors included; raises `NoAnswer` if nobody or somebody else does."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=self._times.answer)
        try:
            async with session.get(
                f"http://{host}{path}", params=query, timeout=timeout, allow_redirects=False
            ) as response:
                body = await response.read()
                if response.headers.get("Metadata-Flavor") != "Google":
                    raise NoAnswer(f"{host} is no metadata server of Google's")
                return Answer(response.status, body.decode(errors="replace").strip(), response.headers.get("ETag", ""))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise NoAnswer(f"{host} does not answer: {error or type(error).__name__}") from error

    def _note(self, error: NoAnswer) -> None:
        if not self._failures_are_known:
            self._failures_are_known = True
            logger.info("no notices from a metadata server for now: %s", error)


class Pauses:
    """Ever longer ones, until they are over."""

    def __init__(self, times: WatchTimes) -> None:
        self._times = times
        self._next = times.first_pause

    async def pause(self) -> None:
        pause, self._next = self._next, min(self._times.longest_pause, 2 * self._next)
        await asyncio.sleep(pause)

    def over(self) -> None:
        self._next = self._times.first_pause


def metadata_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Where a process with this environment finds its host's metadata server, the likeliest place first."""
    told = next((environ[name] for name in HOST_VARIABLES if environ.get(name)), None)
    return (told,) if told else WELL_KNOWN_HOSTS


def v1(key: str) -> str:
    """The path of a metadata key."""
    return f"/computeMetadata/v1/{key}"


def maintenance_notice(body: str) -> HostNotice | None:
    """What ``upcoming-maintenance?alt=json`` says; None for the many ways to say that nothing is planned.

    These are an object with an ``error``, an empty one, and the text NONE. The documentation has the names of the
    fields in both spellings, ``window_start_time`` for the metadata server and ``windowStartTime`` for the API.
    """
    try:
        fields: Any = json.loads(body)
    except ValueError:
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
    """Whether a metadata server says that no maintenance is planned; a server that can't say denies nothing.

    Its usual way is a 503 with an object that has an ``error``. A server that is just not available answers 503, too,
    but with no such object.
    """
    if answer.status == 404:
        return True
    if answer.status not in (200, 503):
        return False
    try:
        said: Any = json.loads(answer.body)
    except ValueError:
        return answer.body == "NONE"
    return said == "NONE" or (isinstance(said, dict) and not ({"window_start_time", "windowStartTime"} & said.keys()))
