"""Forwards a port of this machine to one on the host of a task, wherever the task runs."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.errors import ControllerUnavailableError, InvalidRequestError, SessionError, TaskNotRunningError
from iris_ray.sessions.channels import reset_when_closed
from iris_ray.sessions.client import Channel, TaskPlace, TaskSession, locate
from iris_ray.sessions.core import CHUNK_BYTES

LOOK_S = 1.0
"""The interval between two checks whether a moved task runs again, and between two tries of its host; seconds."""
LOOPBACK = "127.0.0.1"


class PortForward:
    """A port on this machine's loopback whose connections end on the task's host.

    Args:
        controller: the Controller.
        job_id, task_index: the task.
        remote: the port on its host.
        say: prints a line for the person.
    """

    def __init__(
        self,
        controller: ControllerConnection,
        job_id: str,
        task_index: int,
        remote: int,
        say: Callable[[str], object],
    ) -> None:
        self._controller = controller
        self._job_id = job_id
        self._task_index = task_index
        self._remote = remote
        self._say = say
        self._session: TaskSession | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._trouble: str | None = None  # the last message to the person

    async def run(self, local: int) -> None:
        """Forward until the job has ended.

        Args:
            local: the port on this machine; 0: any free one.

        Raises:
            InvalidRequestError: the port on this machine is taken, or only root may have it.
            TaskNotRunningError: the task does not run, at the beginning.
            SessionError: its host refuses, at the beginning.
        """
        place: TaskPlace | None = await asyncio.to_thread(locate, self._controller, self._job_id, self._task_index)
        server, port = await listen(self._accept, local, self._remote)
        async with server:
            first = True
            while place is not None:
                try:
                    async with TaskSession(self._controller, place) as session:
                        self._session = session
                        await server.start_serving()
                        self._say(f"http://localhost:{port} is port {self._remote} on the host of {place}")
                        first, self._trouble = False, None
                        await session.wait_for_tasks_end()
                        self._say(f"attempt {place.attempt.attempt} of {place} has ended; connections are closed")
                except SessionError as error:
                    if first:
                        raise
                    self._say_once(str(error))
                    await asyncio.sleep(LOOK_S)
                finally:
                    self._session = None
                    await self._close_all()
                place = await self._next_place()

    async def _next_place(self) -> TaskPlace | None:
        """Wait until the task runs, and return where; None if the job has ended."""
        while True:
            try:
                job = await asyncio.to_thread(self._controller.ask, ControllerInterface.job_status, self._job_id)
                if job.state.finished:
                    self._say(f"{self._job_id} has ended: {job.state.value}")
                    return None
                return await asyncio.to_thread(locate, self._controller, self._job_id, self._task_index)
            except (TaskNotRunningError, ControllerUnavailableError) as error:
                self._say_once(f"{error}; this waits for it")
            await asyncio.sleep(LOOK_S)

    def _say_once(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(trouble)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if self._session is not None:
                await carry(await self._session.connect(self._remote), reader, writer)
        except SessionError as error:
            if self._session is not None:
                self._say(str(error))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _close_all(self) -> None:
        for one in self._connections:
            one.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections))


async def listen(
    accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], local: int, remote: int
) -> tuple[asyncio.Server, int]:
    """Take a port of this machine's loopback. Return a server that does not serve yet, and the port.

    Args:
        accept: serves a connection.
        local: the port; 0: any free one.
        remote: the port to which it leads.

    Raises:
        InvalidRequestError: the port is taken, or only root may have it.
    """
    try:
        server = await asyncio.start_server(accept, LOOPBACK, local, start_serving=False)
    except OSError as error:
        raise InvalidRequestError(
            f"port {local} of this machine can't be used ({error.strerror}); give another one before a colon, or 0"
            f" for any that is free: 0:{remote}"
        ) from None
    port: int = server.sockets[0].getsockname()[1]
    return server, port


async def carry(channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes both ways, as fast as the slower side takes them, until the other side closes.

    Unless the connection has ended there, and all its bytes have come, it is reset here: otherwise its client would
    take a part for the whole.
    """
    is_whole = False
    reset_when_closed(writer.get_extra_info("socket"), True)
    writer.transport.set_write_buffer_limits(0)  # `drain` waits for all: this process may end, the kernel goes on
    sending = asyncio.create_task(_send(channel, reader))
    try:
        async for piece in channel.pieces():
            writer.write(piece.out)
            await writer.drain()
            is_whole = piece.over and not piece.was_reset
    finally:
        if is_whole:
            reset_when_closed(writer.get_extra_info("socket"), False)
        else:
            writer.transport.abort()
        channel.close()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, SessionError):
            await sending


async def _send(channel: Channel, reader: asyncio.StreamReader) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            await channel.write(data)
    except ConnectionError:  # the client has gone, and reads no answer
        channel.close()
    else:
        await channel.write(b"")
