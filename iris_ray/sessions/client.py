"""Sessions on the hosts of running tasks: find a task's host, run a command there, connect to one of its ports.

The Controller only says where the task runs, and whether this user may. All bytes go directly between this process and
an actor on the task's host.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import ray

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import TaskStatus
from iris_ray.client.connection import current_user, this_connection
from iris_ray.errors import (
    InvalidRequestError,
    IrisError,
    SessionError,
    TaskMovedError,
    TaskNotRunningError,
    UnknownNameError,
)
from iris_ray.model.checks import require, texts, unknown_number
from iris_ray.model.lifecycle import TaskAttemptId, TaskState, job_of
from iris_ray.sessions.core import CommandLine, Piece, SessionInterface, Size
from iris_ray.sessions.host import start_session

START_S = 60.0
"""The limit for the start of a session's process on a host; seconds."""
TRIES, AGAIN_S = 2, 1.0
"""How often a repeatable question is asked, and the pause between."""
MAY = "run commands on the hosts of its tasks"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where a task runs.

    Attributes:
        attempt: of the task's process.
        node_id, address: Ray's node id and the IP address of its host.
        host: the host's name for people.
    """

    attempt: TaskAttemptId
    node_id: str
    address: str
    host: str

    def __str__(self) -> str:
        return f"task {self.attempt.task_index} of {self.attempt.job_id} on {self.host}"


def locate(controller: ControllerConnection, job_id: str, task_index: int = 0) -> TaskPlace:
    """Return where a task runs.

    Args:
        controller: the Controller.
        job_id: its job.
        task_index: its index; that of a process, where a host has several.

    Raises:
        UnknownNameError: there is no such job or task.
        NotPermittedError: it is another user's job, and this user is not an operator.
        TaskNotRunningError: it does not run; the message says why.
    """
    controller.ask(ControllerInterface.require_own, job_id, current_user(), MAY)
    job = controller.ask(ControllerInterface.job_status, job_id)
    count = sum(job.tasks.values()) * job.processes_per_host
    if task_index not in range(count):
        raise unknown_number(f"task of {job_id}", task_index, range(count))
    task = controller.ask(ControllerInterface.task_status, job_id, task_index // job.processes_per_host)
    place = _place_of(task, task_index)
    if place is None:
        raise TaskNotRunningError(f"task {task_index} of {job_id} does not run: {_why_not(task, job.explanation)}")
    return place


def locate_all(controller: ControllerConnection, job_id: str) -> tuple[list[TaskPlace], list[int]]:
    """Return where a job's tasks run, once for each host of several processes, and the indexes of other tasks.

    Raises:
        UnknownNameError, NotPermittedError: as for `locate`.
        TaskNotRunningError: none runs.
    """
    controller.ask(ControllerInterface.require_own, job_id, current_user(), MAY)
    tasks = controller.ask_all(ControllerInterface.list_tasks, job_id)
    places = {task.indices[0]: _place_of(task, task.indices[0]) for task in tasks}
    found = [place for place in places.values() if place is not None]
    if not found:
        why = controller.ask(ControllerInterface.job_status, job_id).explanation
        raise TaskNotRunningError(f"no task of {job_id} runs: {_why_not(tasks[0], why)}")
    return found, [index for index, place in places.items() if place is None]


def _place_of(task: TaskStatus, process: int) -> TaskPlace | None:
    if task.state is not TaskState.RUNNING or task.node_id is None or task.address is None:
        return None
    attempt = TaskAttemptId(job_of(task.task_id), process, task.attempt)
    host = " ".join(filter(None, (task.group, task.host))) or task.address
    return TaskPlace(attempt, task.node_id, task.address, host)


def _why_not(task: TaskStatus, of_the_job: str) -> str:
    if task.state is TaskState.RUNNING:
        return "its host is gone, and the job will continue elsewhere"
    return "it is being started; try again in a moment" if task.state is TaskState.ASSIGNED else of_the_job


# -- session -----------------------------------------------------------------------------------------------------------


class TaskSession:
    """A session on the host of a running task; use it with ``async with``.

    Args:
        controller: the Controller; it is asked why a session is lost.
        place: where the task runs.
    """

    def __init__(self, controller: ControllerConnection, place: TaskPlace) -> None:
        self.place = place
        self._controller = controller
        self._connection = this_connection()
        self._actor = Actor[SessionInterface](
            start_session(place.node_id, place.address, current_user()), f"the process of the session on {place.host}"
        )

    async def __aenter__(self) -> Self:
        try:
            await self._ask(START_S, SessionInterface.enter, self.place.attempt)
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    async def run(self, command: CommandLine) -> "RemoteChannel":
        """Start a command; see `SessionInterface.start`."""
        return RemoteChannel(self, await self._ask(START_S, SessionInterface.start, command))

    async def connect(self, port: int) -> "RemoteChannel":
        """Connect to a port of the task's host; see `SessionInterface.connect`."""
        return RemoteChannel(self, await self._ask(START_S, SessionInterface.connect, port))

    async def wait_for_tasks_end(self) -> None:
        """Wait until the attempt of the task ends.

        Raises:
            SessionError, TaskMovedError: the session is lost.
        """
        while not await self.ask_again(SessionInterface.task_ended):
            pass

    async def ask_again(self, method: Callable[..., Awaitable[T]], /, *args: object) -> T:
        """Ask a question that may be repeated. Raise like `_ask`."""
        for tries in range(TRIES):
            answer = await self._actor.ask_once(method, *args)
            if not isinstance(answer, Unreachable):
                return answer
            loss = await asyncio.to_thread(self._loss, answer)
            if isinstance(loss, TaskMovedError) or tries == TRIES - 1:
                raise loss
            await asyncio.sleep(AGAIN_S)
        raise AssertionError

    def tell(self, method: Callable[..., Awaitable[None]], /, *args: object) -> None:
        """Call a method, and don't wait for the answer."""
        self._actor.call(method, *args)

    async def _ask(self, deadline_s: float | None, method: Callable[..., Awaitable[T]], /, *args: object) -> T:
        """Return the host's answer.

        Raises:
            SessionError: there is none, or the host refuses; the message says why.
            TaskMovedError: there is none, because the attempt has ended.
        """
        answer = await self._actor.ask_within(deadline_s, method, *args)
        if not isinstance(answer, Unreachable):
            return answer
        raise await asyncio.to_thread(self._loss, answer)

    def _loss(self, missing: Unreachable) -> SessionError:
        """Return why this session is lost: the Controller may know more."""
        job_id, index, attempt = self.place.attempt
        try:
            has_moved = locate(self._controller, job_id, index).attempt.attempt != attempt
        except (TaskNotRunningError, UnknownNameError):
            has_moved = True
        except IrisError:  # nobody knows
            has_moved = False
        if has_moved:
            return moved(self.place)
        return SessionError(
            f"{missing.reason}. The command ends by itself. If the host is lost, the job continues elsewhere: see"
            f" iris-ray job events {job_id}; else try again"
        )

    def _end(self) -> None:
        """End the actor, and so everything of this session."""
        if this_connection() == self._connection:  # without a connection Ray would start a cluster on this machine
            ray.kill(self._actor.handle)


def moved(place: TaskPlace) -> TaskMovedError:
    """Return the error of a session whose task's attempt has ended."""
    job_id, _, attempt = place.attempt
    return TaskMovedError(
        f"attempt {attempt} of {place} has ended, and this session with it; the job may continue on other hosts:"
        f" see iris-ray job events {job_id}"
    )


class Channel(Protocol):
    """A command or a connection elsewhere."""

    def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they come, up to the last one. Raises SessionError if the way to it is lost."""

    async def write(self, data: bytes) -> None:
        """Hand bytes over; no bytes mean the end."""

    def resize(self, size: Size) -> None: ...

    def signal(self, number: int) -> None: ...

    def close(self) -> None: ...


class RemoteChannel:
    """A command or a connection of a session."""

    def __init__(self, session: TaskSession, number: int) -> None:
        self._session = session
        self._number = number
        self._writes = 0

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces as they come, up to the last one.

        Raises:
            TaskMovedError: the attempt of the task has ended.
            SessionError: the session is lost.
        """
        piece = Piece(0)
        while not piece.over:
            piece = await self._session.ask_again(SessionInterface.read, self._number, piece.number)
            yield piece
        if piece.task_ended:
            raise moved(self._session.place)

    async def write(self, data: bytes) -> None:
        """Hand bytes over, and wait until they are taken; no bytes mean the end."""
        self._writes += 1
        await self._session.ask_again(SessionInterface.write, self._number, self._writes, data)

    def resize(self, size: Size) -> None:
        self._session.tell(SessionInterface.resize, self._number, size)

    def signal(self, number: int) -> None:
        self._session.tell(SessionInterface.signal, self._number, number)

    def close(self) -> None:
        self._session.tell(SessionInterface.close, self._number)


# -- commands ----------------------------------------------------------------------------------------------------------

Show = Callable[[bytes, bool], object]
"""Takes a piece of output, and whether it comes from stderr."""
Input = AsyncIterator[bytes]


async def follow(channel: Channel, show: Show, given: Input | None = None) -> int:
    """Show the output of a command, and send it input, until it ends. Return its exit code.

    Raises:
        TaskMovedError, SessionError: as for `RemoteChannel.pieces`.
    """
    sending = None if given is None else asyncio.create_task(_send(channel, given))
    code: int | None = None
    try:
        async for piece in channel.pieces():
            for data, is_err in ((piece.out, False), (piece.err, True)):
                if data:
                    await asyncio.to_thread(show, data, is_err)  # a terminal may make it wait
            code = piece.exit_code
    finally:
        if sending is not None:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, SessionError):
                await sending
    return 137 if code is None else code  # its keeper was killed


async def _send(channel: Channel, given: Input) -> None:
    async for data in given:
        await channel.write(data)
    await channel.write(b"")


def run_beside(job_id: str, task_index: int, command: Sequence[str], given: bytes) -> tuple[int, bytes, bytes]:
    """Run a command on a task's host; see `IrisClient.exec`. Return its exit code, stdout and stderr."""
    require("command", command, texts('["nvidia-smi"]'))
    if not command:
        raise InvalidRequestError('command is empty; give a program and its arguments, such as ["tpu-info"]')
    controller = ControllerConnection()
    place = locate(controller, job_id, task_index)
    parts: dict[bool, list[bytes]] = {False: [], True: []}

    async def all_input() -> AsyncIterator[bytes]:
        yield given

    async def run() -> int:
        async with TaskSession(controller, place) as session:
            channel = await session.run(CommandLine(tuple(command), takes_input=bool(given)))
            return await follow(
                channel, lambda data, is_err: parts[is_err].append(data), all_input() if given else None
            )

    return _in_thread(run), b"".join(parts[False]), b"".join(parts[True])


def _in_thread(work: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine in an event loop of its own, also where one runs already, as in a notebook."""
    done: Future[T] = Future()
    begun: Future[Callable[[], object]] = Future()

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            done.set_result(await work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="iris_ray.session")
    thread.start()
    try:
        return done.result()
    except BaseException:
        if not done.done():  # it is Ctrl-C, and no error of the work
            begun.result()()
        raise
    finally:
        thread.join()
