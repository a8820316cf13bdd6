"""What the two ends of a tunnel say: frames, each of one channel, and how many bytes of it may be on the way."""

import asyncio

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
