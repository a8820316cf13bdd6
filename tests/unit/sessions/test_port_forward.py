"""Connections that a forwarded port carries, between two ends that are not sessions."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from iris_ray.sessions.channels import PortConnection
from iris_ray.sessions.core import Piece, Size
from iris_ray.sessions.port_forward import carry
from tests.support.sessions import Direct


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


async def test_connection_that_is_reset_there_is_reset_here() -> None:
    async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"half of it")
        await reader.readexactly(len(b"question"))
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            port = server.sockets[0].getsockname()[1]
            await carry(Direct(await asyncio.to_thread(PortConnection.open, port, "127.0.0.1")), reader, writer)

    async with (
        await asyncio.start_server(resets, "127.0.0.1", 0) as server,
        await asyncio.start_server(accept, "127.0.0.1", 0) as forwarded,
    ):
        reader, writer = await asyncio.open_connection(*forwarded.sockets[0].getsockname())
        assert await reader.readexactly(4) == b"half"
        writer.write(b"question")
        try:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        finally:
            writer.close()


@pytest.mark.parametrize("sends_end", [True, False])
async def test_server_sees_end_only_if_person_has_sent_one(sends_end: bool) -> None:
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                ended.set_result(await reader.read())
            except ConnectionError as error:
                ended.set_exception(error)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(20):
        port = server.sockets[0].getsockname()[1]
        connection = await asyncio.to_thread(PortConnection.open, port, "127.0.0.1")
        await connection.write(1, b"a question")
        if sends_end:
            await connection.write(2, b"")
            assert await ended == b"a question"
        await connection.drop()
        if not sends_end:
            with pytest.raises(ConnectionResetError):
                await ended


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
