"""``iris-ray exec``, ``shell`` and ``port-forward``: commands, terminals and ports beside a running task."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster, head_of_dashboard
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.conventions import FAILED, OK, say_error
from iris_ray.cli.options import ScriptCommand, marked_arguments
from iris_ray.cli.streams import (
    CtrlC,
    LabelledLines,
    follow_on_terminal,
    pass_on,
    stdin_bytes,
    terminal_size,
    wait_for,
)
from iris_ray.errors import CommandNotFoundError, InvalidRequestError, SessionError
from iris_ray.sessions.core import CommandLine

if TYPE_CHECKING:  # these import Ray
    from iris_ray.sessions.client import TaskPlace

NOT_FOUND = 127
"""The exit code for a command that can't be started, as shells have it."""


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
    if (head := head_of_dashboard()) is not None:
        flags = [*(["--all"] if everywhere else []), *(["--stdin"] if takes_input else [])]
        head.run(["exec", name, *flags, "--", *command], takes_input=takes_input)
    with cluster():
        from iris_ray.sessions.client import locate, locate_all

        controller = ControllerConnection()
        if everywhere:
            places, left_out = locate_all(controller, job)
            if left_out:
                say_error(f"left out, for they do not run: tasks {', '.join(map(str, left_out))}")
            codes = wait_for(_run_everywhere(controller, places, command))
        else:
            codes = [wait_for(_run(controller, locate(controller, job, index or 0), command, takes_input))]
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
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequestError("a shell needs a terminal; without one: iris-ray exec JOB -- COMMAND")
    if (head := head_of_dashboard()) is not None:
        head.run(["shell", name, *(["--", *command] if command else [])], on_terminal=True)
    job, index = _named(name)
    with cluster():
        from iris_ray.sessions.client import locate

        controller = ControllerConnection()
        code = wait_for(_on_terminal(controller, locate(controller, job, index or 0), command or None))
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
    if (head := head_of_dashboard()) is not None:
        head.forward(["port-forward", name, f"0:{remote}"], local, remote)
    job, index = _named(name)
    with cluster():
        from iris_ray.sessions.port_forward import PortForward

        forward = PortForward(ControllerConnection(), job, index or 0, remote, lambda line: click.echo(line, err=True))
        wait_for(forward.run(local))


def _named(name: str) -> tuple[str, int | None]:
    """Return the job and the task in ``JOB``, ``JOB/3`` or ``JOB/task-3``."""
    job, slash, last = name.rpartition("/")
    number = last.removeprefix("task-")
    return (job, int(number)) if slash and number.isdecimal() else (name, None)


# -- exec --------------------------------------------------------------------------------------------------------------


async def _run(controller: ControllerConnection, place: "TaskPlace", words: Sequence[str], takes_input: bool) -> int:
    from iris_ray.sessions.client import TaskSession, follow

    try:
        with CtrlC() as ctrl_c:
            async with TaskSession(controller, place) as session:
                channel = await session.run(CommandLine(tuple(words), takes_input=takes_input))
                ctrl_c.goes_to(channel)
                return ctrl_c.judge(await follow(channel, pass_on, stdin_bytes() if takes_input else None))
    except CommandNotFoundError as error:
        say_error(str(error))
        return NOT_FOUND


async def _run_everywhere(
    controller: ControllerConnection, places: Sequence["TaskPlace"], words: Sequence[str]
) -> list[int]:
    """Run a command beside several tasks at the same time. Return the exit codes, in the order of the tasks."""
    from iris_ray.sessions.client import TaskSession, follow

    names = [place.host for place in places]
    labels = [
        f"{place.host} task {place.attempt.task_index}" if names.count(place.host) > 1 else place.host
        for place in places
    ]
    with CtrlC() as ctrl_c:

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


# -- shell -------------------------------------------------------------------------------------------------------------


async def _on_terminal(controller: ControllerConnection, place: "TaskPlace", words: tuple[str, ...] | None) -> int:
    from iris_ray.sessions.client import TaskSession

    async with TaskSession(controller, place) as session:
        command = CommandLine(words, terminal_size(), True, os.environ.get("TERM", "xterm"))
        try:
            channel = await session.run(command)
        except CommandNotFoundError as error:
            say_error(str(error))
            return NOT_FOUND
        return await follow_on_terminal(channel)
