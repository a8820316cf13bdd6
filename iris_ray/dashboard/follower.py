"""Asks the Controller for changes, and sends them to every open page: server-sent events, encoded once for all."""

import asyncio
import contextlib
import gzip
import json
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.overview import Position
from iris_ray.actors.protocol.services import installed_services
from iris_ray.dashboard.cluster_view import ClusterView
from iris_ray.dashboard.rows import Diff
from iris_ray.errors import IrisError

DIFFS_KEPT = 120
"""The number of changes that are kept for pages that come back. A page that has missed more reloads all tables."""
MOST_BEHIND = 240
"""The number of unread changes after which the connection of a page is closed. The page reconnects by itself."""

RELOAD = b"event: reload\ndata: {}\n\n"


class OpenPage:
    """An open page, and the queue of its messages; None at the end: it is too far behind, or has lost its place."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def give(self, message: bytes) -> None:
        if self.queue.qsize() == MOST_BEHIND:
            self.queue.put_nowait(None)
        elif self.queue.qsize() < MOST_BEHIND:
            self.queue.put_nowait(message)

    def close(self) -> None:
        """End the page's stream. The page reconnects by itself."""
        self.queue.put_nowait(None)


class Channel:
    """Gives every new page the view's tables, and then all changes."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._instance = os.urandom(4).hex()
        self._number = 0
        self._diffs: deque[tuple[int, bytes]] = deque(maxlen=DIFFS_KEPT)
        self._readers: dict[OpenPage, None] = {}
        self._snapshot: tuple[int, bytes] | None = None
        self._came = asyncio.Event()

    @property
    def version(self) -> str:
        return f"{self._instance}-{self._number}"

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    def publish(self, diff: Diff) -> None:
        """Send a diff to all pages, unless it is empty."""
        if diff.is_empty:
            return
        self._number += 1
        data = encode({"put": diff.put, "drop": diff.drop})
        message = b"id: " + self.version.encode() + b"\nevent: diff\ndata: " + data + b"\n\n"
        self._diffs.append((self._number, message))
        for reader in self._readers:
            reader.give(message)

    def snapshot(self) -> bytes:
        """Return all tables and their version, as JSON compressed with gzip."""
        if self._snapshot is None or self._snapshot[0] != self._number:
            tables = {name: table.rows for name, table in self._view.tables.items()}
            data = encode({"version": self.version, "tables": tables})
            self._snapshot = self._number, gzip.compress(data, 3)
        return self._snapshot[1]

    def open(self, version: str) -> OpenPage:
        """Return a reader for a page that has this version of the tables."""
        reader = OpenPage()
        instance, _, number = version.rpartition("-")
        missed = [message for known, message in self._diffs if number.isdecimal() and known > int(number)]
        if instance != self._instance or not number.isdecimal() or len(missed) != self._number - int(number):
            reader.give(RELOAD)
        for message in missed:
            reader.give(message)
        self._readers[reader] = None
        self._came.set()
        return reader

    def close(self, reader: OpenPage) -> None:
        self._readers.pop(reader, None)

    async def wait_for_reader(self, timeout_s: float) -> None:
        """Return after ``timeout_s``, or when the first page is opened."""
        self._came.clear()
        if self.has_readers:
            await asyncio.sleep(timeout_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._came.wait()


def encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


# -- follower ----------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

POLL_S = 0.5
IDLE_POLL_S = 2.0
"""How often it asks while no page is open, so that the table of events has no gaps."""
ASK_AGAIN_S = 2.0


class Follower:
    """Keeps a view up to date and publishes its changes in the channel.

    Args:
        connect: returns a connection to the Controller; blocks; raises `IrisError` if there is none.
        address: the cluster's address, for people.
    """

    def __init__(
        self, connect: Callable[[], ControllerConnection], view: ClusterView, channel: Channel, address: str
    ) -> None:
        self._connect = connect
        self._view = view
        self._channel = channel
        self._address = address
        self._source: ControllerConnection | None = None
        self._position = Position()
        self._about: dict[str, Any] = {}

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            try:
                more = await self._step()
                pause_s = 0.05 if more else POLL_S if self._channel.has_readers else IDLE_POLL_S
                trouble = None
            except IrisError as error:
                pause_s, trouble = ASK_AGAIN_S, str(error)
            except Exception as error:
                logger.exception("asking the Controller failed; trying again")
                pause_s, trouble = ASK_AGAIN_S, f"{type(error).__name__}: {error}"
            about = {"address": self._address, "trouble": trouble, **self._about}
            self._channel.publish(self._view.take_changes(about))
            await self._channel.wait_for_reader(pause_s)

    async def _step(self) -> bool:
        """Ask once; return whether the Controller has more changes already."""
        if self._source is None:
            self._source = await asyncio.to_thread(self._connect)
        changes = await asyncio.to_thread(self._source.ask, ControllerInterface.changes, self._position)
        if not changes.begin_anew:
            self._view.apply(changes)
        else:
            about = await asyncio.to_thread(self._source.ask, ControllerInterface.about)
            self._about = {name: about[name] for name in ("epoch", "version", "started_at")}
            self._about["services"] = [service.name for service in installed_services()]
            jobs = await asyncio.to_thread(self._source.ask_all, ControllerInterface.list_jobs)
            hosts = await asyncio.to_thread(self._source.ask_all, ControllerInterface.list_workers)
            self._view.begin(jobs, hosts)
        self._position = changes.position
        return changes.more or changes.begin_anew
