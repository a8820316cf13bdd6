"""A forwarded port: two connections, one after the other, are carried to a server on the host and back."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any

from iris_ray.errors import SessionError
from iris_ray.sessions.channels import PortConnection
from iris_ray.sessions.core import Piece
from iris_ray.sessions.port_forward import LOOPBACK, carry, listen
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario
from tests.support.sessions import Direct

SENT = [b"one" * 40_000, b"two" * 40_000]
fork = os.fork


def port() -> Scenario:
    return Scenario(
        "port",
        lambda place: None,
        lambda place, said, operations: asyncio.run(_act(said, operations)),
        _judge,
        (OSError, SessionError, asyncio.IncompleteReadError),
        {"a reset looks like an end": _end_cleanly, "the host's connection is kept": _keep},
    )


@contextlib.contextmanager
def _echo(operations: Operations) -> Any:
    """Give the port of a server in a process of its own, in which no operation fails. It sends back what it gets."""
    with socket.create_server((LOOPBACK, 0)) as server:
        pid = fork()
        if pid == 0:
            operations.disarm()
            with contextlib.suppress(BaseException):
                while True:
                    with contextlib.suppress(OSError), server.accept()[0] as connection:
                        while data := connection.recv(1 << 16):
                            connection.sendall(data)
            os._exit(0)
        number = server.getsockname()[1]
    try:
        yield number
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def _act(said: Said, operations: Operations) -> None:
    with _echo(operations) as there:

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await carry(Direct(PortConnection.open(there, LOOPBACK)), reader, writer)
            except (SessionError, ConnectionError):
                pass
            finally:
                writer.close()

        server, here = await listen(accept, 0, there)
        async with server:
            await server.start_serving()
            for number, sent in enumerate(SENT):
                with contextlib.suppress(ConnectionError):
                    said(number, *await asyncio.wait_for(_exchanged(here, sent), 10.0))


async def _exchanged(here: int, sent: bytes) -> tuple[int, bool]:
    """Return how many bytes came back up to a clean end, and whether they are those that were sent."""
    reader, writer = await asyncio.open_connection(LOOPBACK, here)
    try:
        writer.write(sent)
        writer.write_eof()
        found = await reader.read()
        return len(found), found == sent
    finally:
        writer.close()


def _judge(place: Path, said: list[list[Any]]) -> None:
    for number, size, is_whole in said:
        assert is_whole or not size, f"connection {number} ended cleanly after {size} of {len(SENT[number])} bytes"


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _end_cleanly() -> None:
    last = PortConnection._last_piece

    def ended(connection: PortConnection) -> Piece:
        return last(connection)._replace(was_reset=False)

    setattr(PortConnection, "_last_piece", ended)  # noqa: B010


def _keep() -> None:
    close = PortConnection._close
    kept: list[socket.socket] = []

    def closed(connection: PortConnection) -> None:
        if connection._was_reset:
            kept.append(connection._socket.dup())
        close(connection)

    setattr(PortConnection, "_close", closed)  # noqa: B010
