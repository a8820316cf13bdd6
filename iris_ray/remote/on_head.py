"""Commands of a person who reaches nothing of the cluster but its dashboard: the head runs them, with all streams."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import click

from iris_ray.cli.address import words_for_head
from iris_ray.cli.conventions import FAILED
from iris_ray.errors import SessionError, UnknownNameError
from iris_ray.sessions.core import CommandLine
from iris_ray.sessions.streams import CtrlC, keys, print_bytes, raw_terminal, stdin_bytes, terminal_size

PORT = re.compile(rb"http://localhost:(\d+) is port ")
"""What a command that forwards a port says about it."""


def run_on_head(address: str, words: Sequence[str], takes_input: bool = False) -> NoReturn:
    """Have the head run a command of ``iris-ray``, as this user, and end with its exit code.

    Args:
        address: of the dashboard.
        words: the command.
        takes_input: whether it gets this command's stdin.
    """
    raise click.exceptions.Exit(_until_end(_run(address, words, takes_input, None)))


def code_on_head(address: str, words: Sequence[str], to: IO[bytes]) -> int:
    """Have the head run a command of ``iris-ray``, write its stdout to a file here, and return its exit code."""
    return _until_end(_run(address, words, False, to))


def run_on_head_into(address: str, words: Sequence[str], path: Path) -> NoReturn:
    """Have the head run a command that prints a file, write what it prints to a file here, and end with its code.

    If it fails there is no file.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            code = code_on_head(address, words, file)
        if code == 0:
            part.rename(path)
            click.echo(f"{path}: {path.stat().st_size} bytes")
    finally:
        part.unlink(missing_ok=True)
    raise click.exceptions.Exit(code)


def shell_on_head(address: str, words: Sequence[str]) -> NoReturn:
    """Have the head run a command of ``iris-ray`` on this terminal, and end with its exit code."""
    raise click.exceptions.Exit(_until_end(_run_on_terminal(address, words)))


def forward_through_head(address: str, words: Sequence[str], local: int, remote: int) -> NoReturn:
    """Forward a port of this machine to one of the head, which forwards it to the task.

    Args:
        address: of the dashboard.
        words: the command that forwards a port of the head, whichever is free.
        local: the port of this machine; 0: any.
        remote: the port beside the task, for messages.
    """
    raise click.exceptions.Exit(_until_end(_forward(address, words, local, remote)))


def _until_end(work: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _run(address: str, words: Sequence[str], takes_input: bool, to: IO[bytes] | None) -> int:
    from iris_ray.remote.laptop_end import Tunnel
    from iris_ray.remote.ray_jobs import RayJobs  # these import Ray
    from iris_ray.sessions.client import follow

    def show(data: bytes, is_err: bool) -> None:
        if to is None or is_err:
            print_bytes(data, is_err)
        else:
            to.write(data)

    with CtrlC() as ctrl_c:
        async with Tunnel(await asyncio.to_thread(RayJobs, address)) as tunnel:
            channel = await tunnel.run(CommandLine(tuple(words), takes_input=takes_input))
            ctrl_c.goes_to(channel)
            return ctrl_c.judge(await follow(channel, show, stdin_bytes() if takes_input else None))


async def _run_on_terminal(address: str, words: Sequence[str]) -> int:
    from iris_ray.remote.laptop_end import Tunnel
    from iris_ray.remote.ray_jobs import RayJobs  # these import Ray
    from iris_ray.sessions.client import follow

    async with Tunnel(await asyncio.to_thread(RayJobs, address)) as tunnel:
        term = os.environ.get("TERM", "xterm")
        channel = await tunnel.run(CommandLine(tuple(words), terminal_size(), True, term))
        loop, work = asyncio.get_running_loop(), asyncio.current_task()
        assert work is not None
        loop.add_signal_handler(signal.SIGWINCH, lambda: channel.resize(terminal_size()))
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, work.cancel)
        with raw_terminal() as show:
            return await follow(channel, show, keys(channel))


async def _forward(address: str, words: Sequence[str], local: int, remote: int) -> int:
    from iris_ray.remote.laptop_end import Tunnel
    from iris_ray.remote.ray_jobs import RayJobs
    from iris_ray.sessions.port_forward import LOOPBACK, carry, listen  # these import Ray

    at_head: int | None = None
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            if at_head is not None:
                await carry(await tunnel.connect(LOOPBACK, at_head), reader, writer)
        except (SessionError, ConnectionError, asyncio.CancelledError):  # the head's end of it says why
            pass
        finally:
            connections.discard(task)
            writer.close()

    server, port = await listen(accept, local, remote)
    async with server, Tunnel(await asyncio.to_thread(RayJobs, address)) as tunnel:
        channel = await tunnel.run(CommandLine(tuple(words)))
        rest = b""
        async for piece in channel.pieces():
            *lines, rest = (rest + piece.err).split(b"\n")
            for line in lines:
                if found := PORT.match(line):
                    at_head = int(found[1])
                    line = line.replace(found[1], str(port).encode(), 1)
                    await server.start_serving()
                print_bytes(line + b"\n", True)
        for one in connections:
            one.cancel()
        return FAILED if piece.exit_code is None else piece.exit_code


def ray_job_or_on_head(
    address: str, job: str, about_ray_job: Callable[[], object], before: Callable[[], object] = lambda: None
) -> None:
    """Do something about a job of Ray's job API. If there is none of that id, have the head run what was typed.

    Args:
        address: of the dashboard.
        job: the id.
        about_ray_job: raises UnknownNameError if there is none.
        before: is called before the head runs it.
    """
    with contextlib.suppress(UnknownNameError):
        if "/" not in job:  # no id of Ray's has one
            about_ray_job()
            return
    before()
    run_on_head(address, words_for_head())
