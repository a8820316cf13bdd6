"""Connections that a forwarded port carries, between two ends that are not sessions."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from iris_ray.sessions.channels import PortConnection
from iris_ray.sessions.core import CHUNK_BYTES, Piece, Size
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


class Sends:
    """The other end of a connection to a server that sends so much and closes, and reads nothing."""

    def __init__(self, size: int) -> None:
        self._left = size

    async def pieces(self) -> AsyncIterator[Piece]:
        number = 0
        while self._left:
            number += 1
            size = min(self._left, CHUNK_BYTES)
            self._left -= size
            yield Piece(number, b"x" * size)
        yield Piece(number + 1, over=True)

    async def write(self, data: bytes) -> None: ...

    def resize(self, size: Size) -> None: ...

    def signal(self, number: int) -> None: ...

    def close(self) -> None: ...


def test_slow_reader_never_takes_a_part_for_the_whole() -> None:
    """Its bytes are in the kernel's hands before the process may end, as it does with the job."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.socket()
    for one, option in ((listener, socket.SO_SNDBUF), (client, socket.SO_RCVBUF)):
        one.setsockopt(socket.SOL_SOCKET, option, 16_384)  # the kernel does not change it then
    client.connect(listener.getsockname())
    accepted, _ = listener.accept()
    size = room_between(client, accepted) + 40_000  # the last bytes do not fit

    async def forward() -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        with contextlib.closing(writer):
            async with asyncio.timeout(1.0):
                await carry(Sends(size), reader, writer)

    with contextlib.suppress(TimeoutError):
        asyncio.run(forward())
    accepted.close()  # as at the end of the process
    came = 0
    with client, listener, contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            came += len(data)
        assert came == size


def room_between(reader: socket.socket, writer: socket.socket) -> int:
    """Fill the kernel's buffers of a connection and empty them again. Return the number of bytes."""
    writer.setblocking(False)
    sent = 0
    while True:
        try:
            sent += writer.send(b"x" * CHUNK_BYTES)
        except BlockingIOError:
            break
    left = sent
    while left:
        left -= len(reader.recv(min(left, 1 << 20)))
    return sent
