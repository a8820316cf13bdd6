"""What the two ends of a tunnel say: frames, each of one channel, and how many bytes of it may be on the way."""

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

WINDOW = 1 << 20
"""So many bytes of a channel are on the way at most, in each direction; its reader grants the next ones."""
CHUNK_BYTES = 64 << 10
PING_S = 10.0
"""Each end says something at least so often."""
SILENCE_S = 60.0
"""An end that has heard nothing for so long gives up."""

OPEN, DATA, ERR, END, OVER, CREDIT, RESIZE, SIGNAL, CLOSE = b"o", b"d", b"e", b"n", b"v", b"c", b"r", b"s", b"x"
"""Kinds of frames of a channel. Facts: of OPEN what to begin; of OVER how it has ended; of CREDIT a number of bytes."""
PING, NEXT, OPENED, TAKEN, BYE = b"P", b"N", b"O", b"T", b"B"
"""Kinds of frames of the tunnel. Facts: of NEXT and OPENED which file follows; of TAKEN which package is read."""
_HEAD = struct.Struct(">cII")


class Frame(NamedTuple):
    """One frame.

    Attributes:
        kind: what it carries.
        channel: of which channel; 0: of the tunnel itself.
        data: its bytes.
    """

    kind: bytes
    channel: int = 0
    data: bytes = b""

    @staticmethod
    def of(kind: bytes, channel: int = 0, **facts: object) -> "Frame":
        return Frame(kind, channel, json.dumps(facts).encode())

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)
        return found

    def packed(self) -> bytes:
        return _HEAD.pack(self.kind, self.channel, len(self.data)) + self.data


class Frames:
    """Takes bytes as they come apart, and yields whole frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            kind, channel, size = _HEAD.unpack_from(self._rest)
            end = _HEAD.size + size
            if len(self._rest) < end:
                return
            found = Frame(kind, channel, bytes(self._rest[_HEAD.size : end]))
            del self._rest[:end]
            yield found


class Credit:
    """How many bytes of a channel may still be sent."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._changed = asyncio.Event()

    async def spend(self, size: int) -> None:
        """Wait until so many bytes may be sent, at most `CHUNK_BYTES`."""
        while self._left < size:
            self._changed.clear()
            await self._changed.wait()
        self._left -= size

    def add(self, size: int) -> None:
        self._left += size
        self._changed.set()
