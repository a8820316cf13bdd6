"""Connections that a forwarded port carries, between two ends that are not sessions."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

from iris_ray.sessions.core import Piece, Size
from iris_ray.sessions.port_forward import carry


class Silent:
    """The other end of a connection to a server that neither answers nor closes.

    Attributes:
        closed: is set when this end closes it.
    """

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def pieces(self) -> AsyncIterator[Piece]:
        await self.closed.wait()
        yield Piece(1, over=True)

    async def write(self, data: bytes) -> None: ...

    def resize(self, size: Size) -> None: ...

    def signal(self, number: int) -> None: ...

    def close(self) -> None:
        self.closed.set()


async def test_connection_that_is_reset_here_is_closed_there() -> None:
    channel = Silent()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await carry(channel, reader, writer)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.send(b"question")
            await asyncio.sleep(0.1)
            assert not channel.closed.is_set()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(20):
            await channel.closed.wait()
