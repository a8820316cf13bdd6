"""``iris-ray exec``, ``shell`` and ``port-forward``: commands, terminals and ports on the hosts of running tasks."""

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
from iris_ray.cli.tasks import ALL_TASKS, METAVAR, JobName, named, named_before
from iris_ray.errors import CommandNotFoundError, InvalidRequestError, SessionError
from iris_ray.sessions.core import CommandLine

if TYPE_CHECKING:  # these import Ray
    from iris_ray.sessions.client import TaskPlace

NOT_FOUND = 127
"""The exit code for a command that can't be started, as shells have it."""


@click.command("exec", cls=ScriptCommand)
@click.argument("name", metavar=METAVAR, type=JobName(), shell_complete=unfinished_jobs)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[TASK] [--] COMMAND...")
@click.option(ALL_TASKS, "everywhere", is_flag=True, help="On the hosts of all running tasks, named before each line.")
@click.option("--stdin", "-i", "takes_input", is_flag=True, help="Send this command's stdin.")
@address_option
def exec_(name: str, command: tuple[str, ...], everywhere: bool, takes_input: bool) -> None:
    """Run a command on the host of a running task, with the task's variables, working directory and Python.

    \b
      iris-ray exec train-1a2b3c4d -- tpu-info                    on the host of task 0
      iris-ray exec train-1a2b3c4d/3 -- python -c "import flax"   on the host of task 3
      iris-ray exec train-1a2b3c4d --all-tasks -- df -h /tmp      on the hosts of all running tasks
      iris-ray exec train-1a2b3c4d -- sh -c 'ls *.log'            with a shell, which expands *.log

    The exit code is that of the command; with --all-tasks, the first that is not 0. Ctrl-C ends the command.
    The command, and every process that it has started, also ends if this process ends or the task's attempt ends. The
    command does not get the task's chips: JAX runs on the CPU in it. Only the job's user and operators may run one.
    """
    job, index, command = named_before(name, command)
    if not command:
        raise click.UsageError("give the command to run, after --: exec JOB 3 -- COMMAND.")
    if everywhere and (takes_input or index is not None):
        raise click.UsageError(f"{ALL_TASKS} is for all tasks, without stdin.")
    if (everywhere or takes_input) and not marked_arguments():
        raise click.UsageError("write -- before the command, so that its options are not taken for those of exec.")
    if (head := head_of_dashboard()) is not None:
        flags = [*([ALL_TASKS] if everywhere else []), *(["--stdin"] if takes_input else [])]
        head.run(["exec", *_words(job, index), *flags, "--", *command], takes_input=takes_input)
    with cluster():
        from iris_ray.sessions.client import locate, locate_all

        controller = ControllerConnection()
        if everywhere:
            places, left_out = locate_all(controller, job)
            if left_out:
                say_error(f"these tasks do not run, and were left out: {', '.join(map(str, left_out))}")
            codes = wait_for(_run_everywhere(controller, places, command))
        else:
            codes = [wait_for(_run(controller, locate(controller, job, index or 0), command, takes_input))]
    raise click.exceptions.Exit(next((code for code in codes if code), OK))


@click.command(cls=ScriptCommand)
@click.argument("name", metavar=METAVAR, type=JobName(), shell_complete=unfinished_jobs)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[TASK] [-- COMMAND...]")
@address_option
def shell(name: str, command: tuple[str, ...]) -> None:
    """Open a terminal on the host of a running task, with a shell or another program.

    \b
      iris-ray shell train-1a2b3c4d              a shell on the host of task 0
      iris-ray shell train-1a2b3c4d/3 -- htop    htop on the host of task 3

    Keys, colours, Ctrl-C and the window's size work as over ssh. Every process that you start in the terminal ends with
    the shell, with this process, or with the task's attempt. The program has the task's variables and working
    directory, but not its chips: see `iris-ray exec --help`.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequestError("a shell needs a terminal; without one: iris-ray exec JOB -- COMMAND")
    job, index, command = named_before(name, command)
    if (head := head_of_dashboard()) is not None:
        head.run(["shell", *_words(job, index), *(["--", *command] if command else [])], on_terminal=True)
    with cluster():
        from iris_ray.sessions.client import locate

        controller = ControllerConnection()
        code = wait_for(_on_terminal(controller, locate(controller, job, index or 0), command or None))
    raise click.exceptions.Exit(code)


@click.command("port-forward")
@click.argument("name", metavar=METAVAR, type=JobName(), shell_complete=unfinished_jobs)
@click.argument("words", nargs=-1, required=True, metavar="[TASK] [LOCAL:]REMOTE")
@address_option
def port_forward(name: str, words: tuple[str, ...]) -> None:
    """Forward a port of this machine to the host of a task, for TensorBoard, XProf, Jupyter and the like.

    \b
      iris-ray port-forward train-1a2b3c4d 6006          http://localhost:6006 leads to port 6006 on task 0's host
      iris-ray port-forward train-1a2b3c4d/3 8080:6006   http://localhost:8080 leads to port 6006 on task 3's host

    It listens on this machine's loopback interface only, and with the URL of a dashboard on that of the head as well;
    with 0 as LOCAL, on any free port. When the task moves to another host, open connections close, and new ones lead to
    the new host. It ends when the job ends, or at Ctrl-C.
    """
    *task, ports = words
    if len(task) > 1 or not all(one.isdecimal() and len(one) < 10 for one in task):
        raise click.UsageError(f"give a task's number and a port, such as JOB 3 6006; not {' '.join(words)!r}.")
    job, index = named(name, *map(int, task))
    found = re.fullmatch(r"(?:(\d{1,5}):)?(\d{1,5})", ports)
    local, remote = (int(found[1] or found[2]), int(found[2])) if found else (-1, -1)
    if not (0 <= local < 65536 and 0 < remote < 65536):
        raise InvalidRequestError(f"{ports!r} is not a port; give REMOTE or LOCAL:REMOTE, such as 6006 or 8080:6006")
    if (head := head_of_dashboard()) is not None:
        head.forward(["port-forward", *_words(job, index), f"0:{remote}"], local, remote)
    with cluster():
        from iris_ray.sessions.port_forward import PortForward

        forward = PortForward(ControllerConnection(), job, index or 0, remote, lambda line: click.echo(line, err=True))
        wait_for(forward.run(local))


def _words(job: str, index: int | None) -> list[str]:
    """Return how the head is told a job and its task."""
    return [job] if index is None else [job, str(index)]


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
    """Run a command on the hosts of several tasks at once. Return the exit codes, in the order of the tasks."""
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
