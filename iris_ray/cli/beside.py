"""``iris-ray exec``, ``shell`` and ``port-forward``: commands, terminals and ports beside a running task."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.session import CommandLine, Size
from iris_ray.cli.address import address_option, cluster, dashboard_address
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, say_error
from iris_ray.cli.options import ScriptCommand, marked_arguments
from iris_ray.cli.ray_job import run_through_dashboard
from iris_ray.errors import CommandNotFoundError, InvalidRequestError, SessionError

if TYPE_CHECKING:  # these import Ray
    from iris_ray.client.task_session import RemoteChannel, Show, TaskPlace

T = TypeVar("T")

NOT_FOUND, KILLED = 127, 137
"""The exit codes for a command that can't be started, and for one that was killed, as shells have them."""
INTERRUPT_S = 5.0
"""After Ctrl-C a command has so long to end by itself. A second one ends it at once."""
INPUT_BYTES = 1 << 16


@click.command("exec", cls=ScriptCommand)
@click.argument("name", metavar="JOB[/TASK]", shell_complete=unfinished_jobs)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--all", "everywhere", is_flag=True, help="Beside every task; each line with its host before it.")
@click.option("--stdin", "-i", "takes_input", is_flag=True, help="Send this command's stdin.")
@address_option
def exec_(name: str, command: tuple[str, ...], everywhere: bool, takes_input: bool) -> None:
    """Run a command beside a running task, on its host, with its variables, in its directory and with its Python.

    \b
      iris-ray exec train-1a2b3c4d -- tpu-info                    beside task 0
      iris-ray exec train-1a2b3c4d/3 -- python -c "import flax"   beside task 3
      iris-ray exec train-1a2b3c4d --all -- df -h /tmp            beside every task, each line with its host
      iris-ray exec train-1a2b3c4d -- sh -c 'ls *.log'            a shell only where you ask for one

    The exit code is that of the command, with --all the first that is not 0. Ctrl-C ends the command. Whatever it has
    started ends with it, with this process, and with the task's attempt. It does not get the task's chips: JAX runs on
    the CPU there. Only the job's user and operators may do this.
    """
    job, index = _named(name)
    if everywhere and (takes_input or index is not None):
        raise click.UsageError("--all is for all tasks, without stdin.")
    if (everywhere or takes_input) and not marked_arguments():
        raise click.UsageError("write -- before the command, so that its options are not taken for those of exec.")
    if (dashboard := dashboard_address()) is not None:
        if takes_input:
            raise InvalidRequestError(_needs_a_way(f"exec -i {name} -- {shlex.join(command)}", "stdin"))
        run_through_dashboard(dashboard, ["exec", name, *(["--all"] if everywhere else []), "--", *command])
    with cluster():
        from iris_ray.client.task_session import locate, locate_all

        controller = ControllerConnection()
        if everywhere:
            places, left_out = locate_all(controller, job)
            if left_out:
                say_error(f"left out, for they do not run: tasks {', '.join(map(str, left_out))}")
            codes = _wait_for(_run_everywhere(controller, places, command))
        else:
            codes = [_wait_for(_run(controller, locate(controller, job, index or 0), command, takes_input))]
    raise click.exceptions.Exit(next((code for code in codes if code), OK))


@click.command(cls=ScriptCommand)
@click.argument("name", metavar="JOB[/TASK]", shell_complete=unfinished_jobs)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@address_option
def shell(name: str, command: tuple[str, ...]) -> None:
    """A terminal beside a running task, on its host: the task's shell, or another program.

    \b
      iris-ray shell train-1a2b3c4d              beside task 0
      iris-ray shell train-1a2b3c4d/3 -- htop    a program on a terminal beside task 3

    Keys, colours, Ctrl-C and the size of the window work as over ssh. Whatever is started there ends with the shell,
    with this process, and with the task's attempt. What `iris-ray exec --help` says of variables and chips holds here.
    """
    if dashboard_address() is not None:
        raise InvalidRequestError(_needs_a_way(f"shell {name}", "your keys"))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequestError("a shell needs a terminal; without one: iris-ray exec JOB -- COMMAND")
    job, index = _named(name)
    with cluster():
        from iris_ray.client.task_session import locate

        controller = ControllerConnection()
        code = _wait_for(_on_terminal(controller, locate(controller, job, index or 0), command or None))
    raise click.exceptions.Exit(code)


@click.command("port-forward")
@click.argument("name", metavar="JOB[/TASK]", shell_complete=unfinished_jobs)
@click.argument("ports", metavar="[LOCAL:]REMOTE")
@address_option
def port_forward(name: str, ports: str) -> None:
    """Make a port on the host of a task a port of this machine, for TensorBoard, XProf, Jupyter and the like.

    \b
      iris-ray port-forward train-1a2b3c4d 6006          http://localhost:6006 is port 6006 beside task 0
      iris-ray port-forward train-1a2b3c4d/3 8080:6006   http://localhost:8080 is port 6006 beside task 3

    It listens on this machine's loopback only, with 0 as LOCAL on any free port. When the task moves to another host,
    connections close, and new ones go there. It ends with the job, or at Ctrl-C.
    """
    found = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", ports)
    local, remote = (int(found[1] or found[2]), int(found[2])) if found else (-1, -1)
    if not (0 <= local < 65536 and 0 < remote < 65536):
        raise InvalidRequestError(f"{ports!r} is no port; give REMOTE or LOCAL:REMOTE, such as 6006 or 8080:6006")
    if dashboard_address() is not None:
        way = f"-L {local}:localhost:{local}"
        raise InvalidRequestError(_needs_a_way(f"port-forward {name} {ports}", "connections", way))
    job, index = _named(name)
    with cluster():
        from iris_ray.client.port_forward import PortForward

        forward = PortForward(ControllerConnection(), job, index or 0, remote, lambda line: click.echo(line, err=True))
        _wait_for(forward.run(local))


def _named(name: str) -> tuple[str, int | None]:
    """Return the job and the task in ``JOB``, ``JOB/3`` or ``JOB/task-3``."""
    job, slash, last = name.rpartition("/")
    number = last.removeprefix("task-")
    return (job, int(number)) if slash and number.isdecimal() else (name, None)


def _needs_a_way(words: str, what: str, way: str = "-t") -> str:
    return (
        f"{what} can't travel through the dashboard's port: Ray's job API brings back output and takes nothing. On a"
        f" node of the cluster it works: ssh {way} HEAD iris-ray {words}"
    )


def _wait_for(work: Coroutine[Any, Any, T]) -> T:
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


# -- exec --------------------------------------------------------------------------------------------------------------


async def _run(controller: ControllerConnection, place: "TaskPlace", words: Sequence[str], takes_input: bool) -> int:
    from iris_ray.client.task_session import TaskSession, follow

    try:
        with _CtrlC() as ctrl_c:
            async with TaskSession(controller, place) as session:
                channel = await session.run(CommandLine(tuple(words), takes_input=takes_input))
                ctrl_c.goes_to(channel)
                return ctrl_c.judge(await follow(channel, print_bytes, _stdin() if takes_input else None))
    except CommandNotFoundError as error:
        say_error(str(error))
        return NOT_FOUND


async def _run_everywhere(
    controller: ControllerConnection, places: Sequence["TaskPlace"], words: Sequence[str]
) -> list[int]:
    """Run a command beside several tasks at the same time. Return the exit codes, in the order of the tasks."""
    from iris_ray.client.task_session import TaskSession, follow

    names = [place.host for place in places]
    labels = [
        f"{place.host} task {place.attempt.task_index}" if names.count(place.host) > 1 else place.host
        for place in places
    ]
    with _CtrlC() as ctrl_c:

        async def run(place: "TaskPlace", label: str) -> int:
            lines = LabelledLines(f"{label.ljust(max(map(len, labels)))}| ".encode())
            try:
                async with TaskSession(controller, place) as session:
                    channel = await session.run(CommandLine(tuple(words)))
                    ctrl_c.goes_to(channel)
                    return ctrl_c.judge(await follow(channel, lines.print))
            except SessionError as error:
                say_error(f"{label}: {error}")
                return NOT_FOUND if isinstance(error, CommandNotFoundError) else FAILED
            finally:
                with contextlib.suppress(BrokenPipeError):  # stdout is closed; another task's output has said so
                    lines.print_rest()

        return await asyncio.gather(*map(run, places, labels))


def print_bytes(data: bytes, is_err: bool) -> None:
    """Print output as it came."""
    stream = (sys.stderr if is_err else sys.stdout).buffer
    stream.write(data)
    stream.flush()


class LabelledLines:
    """Prints whole lines, each after a label."""

    def __init__(self, label: bytes) -> None:
        self._label = label
        self._begun = {False: b"", True: b""}

    def print(self, data: bytes, is_err: bool) -> None:
        *lines, self._begun[is_err] = (self._begun[is_err] + data).split(b"\n")
        if lines:
            print_bytes(b"".join(self._label + line + b"\n" for line in lines), is_err)

    def print_rest(self) -> None:
        for is_err, rest in self._begun.items():
            if rest:
                print_bytes(self._label + rest + b"\n", is_err)


class _CtrlC:
    """Passes Ctrl-C on to commands, and ends them at a second one, or if they ignore it for `INTERRUPT_S`.

    One more ends the wait for hosts that don't answer.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.current_task()
        self._channels: list[RemoteChannel] = []
        self._pressed = self._closes = False

    def __enter__(self) -> "_CtrlC":
        self._loop.add_signal_handler(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)

    def goes_to(self, channel: "RemoteChannel") -> None:
        self._channels.append(channel)
        if self._pressed:
            channel.close()

    def judge(self, code: int) -> int:
        """Return the exit code, given that of a command."""
        return INTERRUPTED if self._pressed and code == KILLED else code

    def _press(self) -> None:
        if self._work is not None and (self._closes or not self._channels):
            self._work.cancel()
        elif self._pressed:
            self._close()
        else:
            self._pressed = True
            for channel in self._channels:
                channel.signal(signal.SIGINT)
            self._loop.call_later(INTERRUPT_S, self._close)

    def _close(self) -> None:
        self._closes = True
        for channel in self._channels:
            channel.close()


async def _stdin() -> AsyncIterator[bytes]:
    """Yield what comes on stdin, until its end."""
    loop = asyncio.get_running_loop()
    while sys.stdin is not None:  # it may be closed
        there = loop.create_future()
        with contextlib.suppress(PermissionError):  # of a file, which has its bytes at once
            loop.add_reader(0, _is_ready, there)
            try:
                await there
            finally:
                loop.remove_reader(0)
        try:
            data = os.read(0, INPUT_BYTES)
        except OSError as error:  # a directory, or a terminal that is gone
            say_error(f"stdin can't be read: {error.strerror}")
            return
        if not data:
            return
        yield data


def _is_ready(there: "asyncio.Future[None]") -> None:
    if not there.done():
        there.set_result(None)


# -- shell -------------------------------------------------------------------------------------------------------------

_FULL_SCREEN, _NO_FULL_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
_AS_BEFORE = b"\x1b[m\x1b[?25h\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l"
"""Plain text, a cursor, and no reports of pasted text and of the mouse."""


async def _on_terminal(controller: ControllerConnection, place: "TaskPlace", words: tuple[str, ...] | None) -> int:
    from iris_ray.client.task_session import TaskSession, follow

    async with TaskSession(controller, place) as session:
        command = CommandLine(words, _size(), True, os.environ.get("TERM", "xterm"))
        try:
            channel = await session.run(command)
        except CommandNotFoundError as error:
            say_error(str(error))
            return NOT_FOUND
        loop, work = asyncio.get_running_loop(), asyncio.current_task()
        assert work is not None
        loop.add_signal_handler(signal.SIGWINCH, lambda: channel.resize(_size()))
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, work.cancel)
        with _raw_terminal() as show:
            return await follow(channel, show, _keys(channel))


async def _keys(channel: "RemoteChannel") -> AsyncIterator[bytes]:
    """Yield what is typed, until the terminal is gone; then end the session, also where no SIGHUP says so."""
    async for data in _stdin():
        yield data
    channel.close()


def _size() -> Size:
    columns, rows = os.get_terminal_size(1)
    return Size(rows, columns)


@contextlib.contextmanager
def _raw_terminal() -> Iterator["Show"]:
    """Pass each key on as it is, within; afterwards the terminal is as before. Yield what shows output."""
    before = termios.tcgetattr(0)
    is_full = False

    def show(data: bytes, _: bool) -> None:
        nonlocal is_full
        if (last := max(_FULL_SCREEN, _NO_FULL_SCREEN, key=data.rfind)) in data:
            is_full = last == _FULL_SCREEN
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(1, rest) :]

    try:
        tty.setraw(0, termios.TCSADRAIN)
        yield show
    except BaseException:  # a program there could not put the screen in order
        with contextlib.suppress(OSError):
            os.write(1, _AS_BEFORE + (_NO_FULL_SCREEN if is_full else b""))
        raise
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(0, termios.TCSANOW, before)
