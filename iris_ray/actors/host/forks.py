"""The host's side of forked tasks: its zygotes, and the processes that they fork."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from ray.exceptions import RayError

from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.host.forked_task import BEGIN, END, EXIT, PIECE, READY, Begin, end_of, launch_in_frames
from iris_ray.actors.host.user_code import MOST_RESULT_BYTES, raised
from iris_ray.actors.protocol.messages import ProcessReady, TaskLaunch
from iris_ray.framing import ConnectionLost, Frame, Frames
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity, stat_of
from iris_ray.processes.subtree import children
from iris_ray.processes.tree import TOKEN_VARIABLE, ProcessTree, end_processes

logger = logging.getLogger(__name__)

ANSWER_S = 20.0
"""The time in which a zygote must fork; it does nothing else. It is long for a machine that is busy or swaps."""
START_S = 120.0
"""The time for a zygote to start, and for each of its modules to be imported."""
SOON_S = 1.0
"""The time in which a zygote tells what a fork that has ended has left. After that, the host looks itself."""
MOST_ASKED = 32
"""The limit for forks that are asked for at once: the kernel keeps some 250 packets for a process that reads slowly."""
READ_BYTES = 1 << 18

_CREDENTIALS = struct.Struct("3i")
HERE = Path(__file__).with_name("zygote.py")


class ZygoteFailed(Exception):
    """A zygote could not be started, or has ended."""


class ModuleFailed(ZygoteFailed):
    """A module of ``preload`` can't be imported.

    Attributes:
        module: its name.
    """

    problem = "can't be imported"

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"preload={module!r} {self.problem}: {why}")
        self.module = module


class ModuleUnfit(ModuleFailed):
    """A module of ``preload`` does something that a fork can't inherit."""

    problem = "is left to each task to import"


# -- start of a zygote -------------------------------------------------------------------------------------------------

SINGLE_THREADED = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables without which libraries start a thread when they are imported: pyarrow does, and pandas imports it."""


@dataclass(frozen=True, slots=True)
class ZygoteStart:
    """How a zygote is started.

    Args:
        variables: those that its environment has more than the process that starts it.
        without: variables that it does not inherit.
        token: what it and its forks carry in their environment from their start.
    """

    variables: Mapping[str, str]
    without: Sequence[str]
    token: str

    def start(self, channel: socket.socket) -> None:
        """Start a zygote of this process's environment, with this end of its connection. Block until it has started.

        Raises:
            OSError, subprocess.SubprocessError: it can't be started.
        """
        environ = SINGLE_THREADED | {name: value for name, value in os.environ.items() if name not in self.without}
        environ |= {name: _expanded(value) for name, value in self.variables.items()}
        environ[TOKEN_VARIABLE] = self.token
        command = [sys.executable, "-u", str(HERE), str(channel.fileno())]  # a line's beginning is seen as well
        subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            pass_fds=[channel.fileno()],
            start_new_session=True,
            check=True,
        )


def _expanded(value: str) -> str:
    """Return a variable's value with others in it, such as ``$PATH``, as Ray expands those of ``env_vars``."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


class ZygoteDoor:
    """Takes the connection of a zygote that a process in another environment starts on this host.

    Attributes:
        address: where it listens: an abstract socket, which only processes of this host and its network see.
    """

    def __init__(self) -> None:
        self.address = f"\0iris-ray-zygote-{token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._listener.setblocking(False)

    async def taken(self) -> socket.socket:
        """Return the first connection of a process of this user."""
        while True:
            channel, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            pid, user, _ = _CREDENTIALS.unpack(
                channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if user == os.getuid() and pid:  # 0: it is outside of this container
                return channel
            channel.close()

    def close(self) -> None:
        self._listener.close()


# -- zygote ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Fork:
    """A process that a zygote has forked.

    Attributes:
        pid: its number.
        code: the exit code that the zygote has told; None before that.
        left_nothing: whether no process was left of this or any earlier fork that had ended, when the zygote told that.
        over: set when the zygote has told its end, or has ended.
        is_wanted: whether somebody waits for its end.
    """

    pid: int
    code: int | None = None
    left_nothing: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    is_wanted: bool = True

    def ended(self, code: int, orphans: bool) -> None:
        """Note what the zygote has told about its end."""
        self.code, self.left_nothing = code, not orphans
        self.over.set()


class Zygote:
    """A running zygote of this host.

    Args:
        channel: this end of its connection.
        token: what it carries.

    Attributes:
        versions: of its environment.
        tree: the zygote and its forks.
        forked: the processes that it has forked and that have not ended, by pid.
    """

    def __init__(self, channel: socket.socket, token: str) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._token = token
        self._module: str | None = None  # that it imports
        self._is_known = asyncio.Event()
        self._has_begun = asyncio.Event()  # to import a module, or to serve
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked: deque[asyncio.Future[Fork]] = deque()
        self._in_turn = asyncio.Semaphore(MOST_ASKED)
        self._why_ended: ZygoteFailed | None = None
        self._why_retired: ZygoteFailed | None = None
        self.versions: Mapping[str, Any] = {}
        self.tree: ProcessTree | None = None
        self.forked: dict[int, Fork] = {}
        asyncio.get_running_loop().add_reader(channel.fileno(), self._read)

    @property
    def ended(self) -> bool:
        return self._why_ended is not None

    @property
    def is_retired(self) -> bool:
        """Whether it must not fork any more."""
        return self._why_retired is not None

    @property
    def is_idle(self) -> bool:
        """Whether it has no task, and is not asked for any."""
        return not self._has_tasks and not self._asked

    @property
    def _has_tasks(self) -> bool:
        return any(fork.is_wanted for fork in self.forked.values())

    async def known(self) -> None:
        """Return once `tree` is known, or it has ended.

        Raises:
            ZygoteFailed: it has not started, and is ended.
        """
        try:
            async with asyncio.timeout(START_S):
                await self._is_known.wait()
        except TimeoutError:
            self.end()
            raise ZygoteFailed(f"the process that forks tasks has not started within {START_S:g} s") from None
        except BaseException:
            self.end()
            raise

    async def prepare(self, path: Sequence[str], preload: Sequence[str]) -> None:
        """Have it import modules. Return once it can fork.

        Raises:
            ZygoteFailed: it can't, and is ended.
        """
        try:
            try:
                self._channel.send(json.dumps({"path": list(path), "preload": list(preload)}).encode())
            except OSError as error:
                raise ZygoteFailed(f"the process that forks tasks has ended: {error.strerror}") from None
            while not self._ready.done():
                self._has_begun.clear()
                try:
                    async with asyncio.timeout(START_S):  # each module has its own time
                        await self._has_begun.wait()
                except TimeoutError:
                    doing = "started" if self._module is None else "ended"
                    raise self._failure(f"the import has not {doing} within {START_S:g} s") from None
            self._ready.result()
        except BaseException:
            self.end()
            raise

    async def fork(self) -> "ForkedProcess":
        """Return a new process.

        Raises:
            ZygoteFailed: it has ended, or does not answer.
            OSError: the host can't start a process now.
        """
        async with self._in_turn:
            return await self._fork()

    async def _fork(self) -> "ForkedProcess":
        if (why := self._why_ended or self._why_retired) is not None:
            raise why
        mine, theirs = socket.socketpair()
        answer: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                self._asked.append(answer)
                try:
                    socket.send_fds(self._channel, [b"f"], [theirs.fileno()])
                except OSError as error:
                    self._end_with(ZygoteFailed(f"the process that forks tasks does not listen: {error.strerror}"))
            async with asyncio.timeout(ANSWER_S):
                fork = await answer
        except TimeoutError:
            mine.close()
            late = ZygoteFailed(f"the process that forks tasks has not answered within {ANSWER_S:g} s")
            self._retire(late)
            raise late from None
        except BaseException:
            mine.close()
            raise
        return ForkedProcess(fork, mine, self)

    def _retire(self, why: ZygoteFailed) -> None:
        """Ask for no further fork. Its tasks go on, and it ends with the last of them."""
        self._why_retired = why
        if not self._has_tasks:
            self.end()

    def let_go(self, fork: Fork) -> None:
        """Note that nobody waits for the end of a fork any more. A zygote that is stopped never tells it."""
        fork.is_wanted = False
        if self._why_retired is not None and not self.ended:
            self._retire(self._why_retired)

    def orphans(self) -> list[ProcessIdentity]:
        """Return the running children that it has not forked: its tasks have started them, and they have lost their
        parents. None are returned while it forks, because the new child may not be known yet.
        """
        if self.tree is None or self.ended or self._asked:
            return []
        stats = (stat_of(pid) for pid in children(self.tree.pid) if pid not in self.forked)
        return [stat.identity for stat in stats if stat and stat.parent == self.tree.pid and not stat.has_ended]

    def end(self) -> None:
        """End it and all its descendants. Return at once."""
        self._end_with(ZygoteFailed("it was ended"))
        if self.tree is not None:
            asyncio.get_running_loop().run_in_executor(None, _end, self.tree)

    def _read(self) -> None:
        while not self.ended:
            try:
                data = self._channel.recv(1 << 17)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end_with(self._failure("the process that forks tasks has ended"))
                return
            self._take(json.loads(data))

    def _take(self, said: dict[str, Any]) -> None:
        match said:
            case {"importing": module}:
                self._module = module
                self._has_begun.set()
            case {"ready": versions}:
                self.versions = versions
                if not self._ready.done():
                    self._ready.set_result(None)
                self._has_begun.set()
            case {"cannot_import": why}:
                self._end_with(self._failure(why))
            case {"unfit": why} if self._module is not None and not self._ready.done():
                self._end_with(ModuleUnfit(self._module, why))
            case {"unfit": why}:
                self._end_with(ZygoteFailed(f"the process that forks tasks can't be used: {why}"))
            case {"forked": pid}:
                fork = self.forked[pid] = Fork(pid)
                self._answer(lambda asked: asked.set_result(fork))
            case {"retired": why}:
                failure = ZygoteFailed(f"the process that forks tasks can't be used any more: {why}")
                self._answer(lambda asked: asked.set_exception(failure))
                self._retire(failure)
            case {"failed": why}:
                self._answer(lambda asked: asked.set_exception(OSError(f"the host can't start a process now: {why}")))
            case {"ended": pid, "code": code} if pid in self.forked:
                self.forked.pop(pid).ended(code, said.get("orphans", True))
                if self._why_retired is not None:
                    self._retire(self._why_retired)
            case {"pid": pid}:
                self._know(pid)
                self._is_known.set()

    def _failure(self, why: str) -> ZygoteFailed:
        """Return what has failed: the module that it imports, or all of it."""
        if self._module is None or self._ready.done():
            return ZygoteFailed(why)
        return ModuleFailed(self._module, why)

    def _know(self, pid: int) -> None:
        if self.tree is None and (stat := stat_of(pid)) is not None:
            self.tree = ProcessTree(stat.identity, self._token)

    def _answer(self, tell: Callable[["asyncio.Future[Fork]"], None]) -> None:
        asked = self._asked.popleft()
        if not asked.done():
            tell(asked)

    def _end_with(self, why: ZygoteFailed) -> None:
        if self.ended:
            return
        self._why_ended = why
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        self._is_known.set()
        self._has_begun.set()
        for fork in self.forked.values():
            fork.over.set()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._asked]
        for one in waiting:
            if not one.done():
                one.set_exception(why)
        if not self._ready.cancelled():
            self._ready.exception()  # it may be that nobody waits for it
        self._asked.clear()


def _end(tree: ProcessTree) -> None:
    if left := end_processes(tree.search(), tree.search):
        logger.warning("the process that forked tasks can't be ended: %s", ", ".join(left))


# -- forked process ----------------------------------------------------------------------------------------------------


class ForkedProcess:
    """A task's process that a zygote has forked. See `forked_task` for what both say.

    Attributes:
        pid: its number.
    """

    is_fork = True

    def __init__(self, fork: Fork, channel: socket.socket, zygote: Zygote) -> None:
        channel.setblocking(False)
        self.pid = fork.pid
        self._fork = fork
        self._channel = channel
        self._zygote = zygote
        self._frames, self._came = Frames(), deque[Frame]()
        self._identity = None if (stat := stat_of(fork.pid)) is None else stat.identity
        self._runs_task = self._is_gone = False

    async def begin(self, how: Begin) -> ProcessReady:
        """Tell it how to wait. Return once it waits.

        Raises:
            ZygoteFailed: it has ended.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(Frame(BEGIN, data=pickle.dumps(how)))
                frame = await self._receive()
            if frame.kind != READY:
                raise ValueError(f"it sent a frame of kind {frame.kind!r}")
            pid, started, token, ports, problem = json.loads(frame.data)
            ready = ProcessReady(int(pid), int(started), str(token), tuple(map(int, ports)), problem)
            if ready.pid != self.pid:
                raise ValueError(f"it says that it is pid {pid}, and is pid {self.pid}")
        except TimeoutError:
            late = f"the process that was to wait for a task has not answered within {ANSWER_S:g} s"
            raise ZygoteFailed(late) from None
        except (ConnectionLost, OSError, ValueError, TypeError) as error:
            code = self.exit_code()
            how_it_failed = "has failed" if code is None else f"has ended with {code}"
            raise ZygoteFailed(f"the process that was to wait for a task {how_it_failed}: {error}") from None
        self._identity = ProcessIdentity(ready.pid, ready.started)
        return ready

    async def run(self, launch: TaskLaunch) -> TaskEnd | None:
        """Have it run a task. Return how it ended; None if the process is gone without an answer."""
        payload = bytearray()
        try:
            function = launch.pickled_function
            if not isinstance(function, bytes):
                function = await function
        except RayError as error:
            return raised(error)
        self._runs_task = True
        try:
            for frame in launch_in_frames(launch, function):
                await self._send(frame)
            while (frame := await self._receive()).kind == PIECE:
                payload += frame.data
                if len(payload) > MOST_RESULT_BYTES:
                    raise ValueError(f"more than {MOST_RESULT_BYTES >> 20} MiB")
            if frame.kind != END:
                raise ValueError(f"a frame of kind {frame.kind!r}")
            return end_of(frame, bytes(payload))
        except (ConnectionLost, OSError):
            return None
        except ValueError as error:
            return TaskEnd(EndKind.RAISED, Moment.now(), error=f"the task's process has told nonsense: {error}")
        finally:
            self._runs_task = False
            if self._is_gone:
                self._channel.close()

    def let_exit(self) -> None:
        """Have it run its exit handlers and end, now that its function has returned. Return at once."""
        with contextlib.suppress(OSError):
            self._channel.send(Frame(EXIT).packed())

    def kill(self) -> None:
        """End it."""
        if self._identity is not None:
            self._identity.signal(signal.SIGKILL)

    @property
    def zygote_ended(self) -> bool:
        return self._fork.code is None and self._zygote.ended

    def orphans(self) -> list[ProcessIdentity]:
        return self._zygote.orphans()

    async def left_nothing(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await self._fork.over.wait()
        return self._fork.left_nothing

    def exit_code(self) -> int | None:
        return -signal.SIGKILL if self.zygote_ended else self._fork.code

    def close(self) -> None:
        """Close the connection. If `run` is still to read the rest of an answer, it closes it."""
        self._is_gone = True
        self._zygote.let_go(self._fork)
        if not self._runs_task:
            self._channel.close()

    async def _send(self, frame: Frame) -> None:
        await asyncio.get_running_loop().sock_sendall(self._channel, frame.packed())

    async def _receive(self) -> Frame:
        while not self._came:
            data = await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES)
            if not data:
                raise ConnectionLost("it has closed its connection")
            try:
                self._came.extend(self._frames.feed(data))
            except ConnectionLost as error:  # user code has written to it
                raise ValueError(str(error)) from error
        return self._came.popleft()
