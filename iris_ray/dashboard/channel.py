"""What has changed, on its way to every open page: server-sent events, encoded once for all."""

import asyncio
import contextlib
import gzip
import json
import os
from collections import deque
from typing import Any

from iris_ray.dashboard.cluster_view import ClusterView
from iris_ray.dashboard.tables import Diff

DIFFS_KEPT = 120
"""A page that was away for no longer than so many changes goes on where it was."""
MOST_BEHIND = 240
"""A page that does not read is closed when so many changes wait for it. It comes again by itself."""

RELOAD = b"event: reload\ndata: {}\n\n"


class Reader:
    """An open page, and what it was not sent yet. None: it is too far behind."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def give(self, message: bytes) -> None:
        if self.queue.qsize() == MOST_BEHIND:
            self.queue.put_nowait(None)
        elif self.queue.qsize() < MOST_BEHIND:
            self.queue.put_nowait(message)


class Channel:
    """Gives every page the view's tables once, and then what changes.

    Args:
        view: its tables are what a new page gets.
    """

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._instance = os.urandom(4).hex()
        self._number = 0
        self._diffs: deque[tuple[int, bytes]] = deque(maxlen=DIFFS_KEPT)
        self._readers: dict[Reader, None] = {}
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

    def open(self, version: str) -> Reader:
        """Return a reader for a page that has the tables of a version."""
        reader = Reader()
        instance, _, number = version.rpartition("-")
        missed = [message for known, message in self._diffs if number.isdecimal() and known > int(number)]
        if instance != self._instance or not number.isdecimal() or len(missed) != self._number - int(number):
            reader.give(RELOAD)
        for message in missed:
            reader.give(message)
        self._readers[reader] = None
        self._came.set()
        return reader

    def close(self, reader: Reader) -> None:
        self._readers.pop(reader, None)

    async def wait_for_reader(self, timeout_s: float) -> None:
        """Return after so many seconds; earlier if the first page is opened."""
        self._came.clear()
        if self.has_readers:
            await asyncio.sleep(timeout_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._came.wait()


def encode(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
