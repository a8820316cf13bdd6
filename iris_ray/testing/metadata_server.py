"""The metadata servers of simulated hosts: real HTTP, with the answers of Google's.

The protocol is documented at https://cloud.google.com/compute/docs/metadata/querying-metadata (headers, ETags, long
polls) and https://cloud.google.com/tpu/docs/view-maintenance-notifications. The servers have no credentials.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aiohttp import web

from iris_ray.testing.servers import ServerThread

_PREFIX = "/computeMetadata/v1/"
PREEMPTED = "instance/preempted"
MAINTENANCE_EVENT = "instance/maintenance-event"
UPCOMING_MAINTENANCE = "instance/upcoming-maintenance"

_LONGEST_POLL_S = 3600.0
_WINDOW_S = 4 * 3600.0
_IMMINENT_S = 3600.0


class MetadataFault(Enum):
    """How a metadata server can misbehave."""

    UNAVAILABLE = "answers 503 to every request, as the real one does during maintenance"
    HANGS = "accepts requests and never answers"
    HANGS_UP = "closes every connection, also those that wait for a change"


@dataclass(frozen=True, slots=True)
class MetadataValue:
    """The answer for one key."""

    body: str
    status: int = 200
    content_type: str = "application/text"
    etag: str = field(default_factory=lambda: secrets.token_hex(8))


# The real server's answer if no maintenance is planned; machine types without support answer a plain 404.
NO_MAINTENANCE = MetadataValue(
    '{ "error": "no notifications have been received yet, try again later" }', 503, "application/json"
)


class HostMetadata:
    """The metadata server of one host. Call its methods from any thread but the servers' own, which calls `answer`.

    Attributes:
        address: ``ip:port``, as ``GCE_METADATA_HOST`` has it.
        asked: how often each key was asked for.
    """

    def __init__(self, run: Callable[[Coroutine[Any, Any, None]], None], values: Mapping[str, str]) -> None:
        self.address = ""
        self.asked: Counter[str] = Counter()
        self._run = run
        self._values = {
            PREEMPTED: MetadataValue("FALSE"),
            MAINTENANCE_EVENT: MetadataValue("NONE"),
            UPCOMING_MAINTENANCE: NO_MAINTENANCE,
            **{key: MetadataValue(text) for key, text in values.items()},
        }
        self._fault: MetadataFault | None = None
        self._changed = asyncio.Condition()

    def set(self, key: str, value: MetadataValue | None) -> None:
        """Change the answer for a key; None removes the key."""

        def change() -> None:
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value

        self._run(self._change(change))

    def preempt(self) -> None:
        """Announce the preemption of the host's VM."""
        self.set(PREEMPTED, MetadataValue("TRUE"))

    def announce_maintenance(self, starts_in_s: float, kind: str = "UNSCHEDULED") -> None:
        """Announce maintenance of the host.

        Args:
            starts_in_s: when it begins, in seconds from now.
            kind: ``SCHEDULED`` or ``UNSCHEDULED``.
        """
        start = time.time() + starts_in_s
        announced = {
            "can_reschedule": "false",
            "latest_window_start_time": _rfc3339(start),
            "maintenance_status": "PENDING",
            "type": kind,
            "window_end_time": _rfc3339(start + _WINDOW_S),
            "window_start_time": _rfc3339(start),
        }
        if starts_in_s <= _IMMINENT_S:
            self.set(MAINTENANCE_EVENT, MetadataValue("TERMINATE_ON_HOST_MAINTENANCE"))
        self.set(UPCOMING_MAINTENANCE, MetadataValue(json.dumps(announced), content_type="application/json"))

    def call_off_maintenance(self) -> None:
        """Say that maintenance is no longer planned."""
        self.set(MAINTENANCE_EVENT, MetadataValue("NONE"))
        self.set(UPCOMING_MAINTENANCE, NO_MAINTENANCE)

    def misbehave(self, fault: MetadataFault | None) -> None:
        """Misbehave from now on; None ends that."""

        def change() -> None:
            self._fault = fault

        self._run(self._change(change))

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        self.asked[request.path.removeprefix(_PREFIX)] += 1
        if self._fault is None and request.path == "/":
            return _response("computeMetadata/\n", 200)
        if self._fault is None and (refusal := _refusal(request)):
            return _response(refusal, 403)
        key = request.path.removeprefix(_PREFIX) if request.path.startswith(_PREFIX) else ""
        if self._fault is None and request.query.get("wait_for_change", "").lower() == "true":
            await self._until_changed(key, request.query)
        if self._fault is MetadataFault.HANGS:
            await asyncio.Event().wait()
        if self._fault is MetadataFault.HANGS_UP:
            assert request.transport is not None
            request.transport.abort()
        if self._fault is not None:
            return _response("Service Unavailable\n", 503)
        value = self._values.get(key)
        if value is None:
            return _response(f"The requested URL {request.path} was not found on this server.\n", 404)
        return _response(value.body, value.status, value.content_type, value.etag)

    async def _until_changed(self, key: str, query: Mapping[str, str]) -> None:
        known = query.get("last_etag") or self._etag(key)
        timeout_s = min(_LONGEST_POLL_S, float(query.get("timeout_sec", _LONGEST_POLL_S)))
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._fault or self._etag(key) != known)

    def _etag(self, key: str) -> str:
        value = self._values.get(key)
        return value.etag if value else ""

    async def _change(self, change: Callable[[], None]) -> None:
        async with self._changed:
            change()
            self._changed.notify_all()


class MetadataServers(ServerThread):
    """Serves the metadata of any number of hosts, each at an address of its own, from one thread of this process."""

    def __init__(self) -> None:
        super().__init__("metadata-servers")

    def serve(self, ip: str, values: Mapping[str, str]) -> HostMetadata:
        """Begin to serve a host's metadata.

        Args:
            ip: an address of this machine; the port is any free one.
            values: metadata by key, as in ``{"instance/zone": "projects/1/zones/us-central2-b"}``.
        """
        host = HostMetadata(self.run, values)
        host.address = self.listen(host.answer, ip)
        return host


def _refusal(request: web.BaseRequest) -> str | None:
    """Return why a request is refused (not meant for a metadata server, or through a proxy), or None."""
    if request.headers.get("Metadata-Flavor") != "Google":
        return "Missing Metadata-Flavor:Google header.\n"
    if "X-Forwarded-For" in request.headers:
        return "Requests with an X-Forwarded-For header are refused.\n"
    return None


def _response(body: str, status: int, content_type: str = "text/html", etag: str = "") -> web.Response:
    headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM", "ETag": etag or secrets.token_hex(8)}
    return web.Response(text=body, status=status, content_type=content_type, headers=headers)


def _rfc3339(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
