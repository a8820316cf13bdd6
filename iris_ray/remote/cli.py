"""The command line at the address of a dashboard: commands that the head runs, and jobs of Ray's job API."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NoReturn, Unpack

import click

from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.address import Sent, words_for_head
from iris_ray.cli.conventions import (
    FAILED,
    INTERRUPTED,
    OK,
    confirm,
    on_a_terminal,
    private_file,
    really_cancel,
    say_error,
)
from iris_ray.cli.ends import Cancelled
from iris_ray.cli.printing import one_line, print_facts, print_json, print_output
from iris_ray.cli.rerun import without_values
from iris_ray.errors import InvalidRequestError, UnknownNameError
from iris_ray.model.checks import unknown
from iris_ray.remote.laptop_end import Tunnel
from iris_ray.remote.ray_jobs import RayJobConfig, RayJobs, RayJobStatus

PORT = re.compile(rb"http://localhost:(\d+) is port ")
"""The line of a command that forwards a port."""
_OWN = "exec", "dev"
"""Commands that print the output of a program that this person has started."""


class DashboardHead:
    """The head of a cluster of which only the dashboard's port is reachable.

    ``words`` are those of a command of ``iris-ray``, which runs there as this user. ``NoReturn`` methods end this
    command with that one's exit code.

    Args:
        address: the URL of the dashboard.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    @cached_property
    def _jobs(self) -> RayJobs:
        return RayJobs(self._address)

    # -- commands of iris-ray, through a tunnel ----------------------------------------------------------------------

    def run(
        self, words: Sequence[str], *, takes_input: bool = False, on_terminal: bool = False, **sent: Unpack[Sent]
    ) -> NoReturn:
        """Run a command with this command's stdout and stderr.

        Args:
            words: the command.
            takes_input: whether it also gets this command's stdin.
            on_terminal: whether it runs on this terminal.
            sent: what is sent with it.
        """
        raise click.exceptions.Exit(self._code(words, None, takes_input, on_terminal, says=False, **sent))

    def run_in_directory(self, target: str, named: str | None, **sent: Unpack[Sent]) -> NoReturn:
        """Send a directory, and run this command in it as it was typed.

        Args:
            target: the word of this command that may be a script of the directory.
            named: the directory that the user has named; None: the current one, without secrets and data.
            sent: what else is sent.
        """
        path = Path(named or ".")
        there = _program(target, path)[-1]
        words = [there if word == target else word for word in words_for_head()]
        is_person = on_a_terminal() and os.isatty(1)  # a person sees the status of the job, and is asked at Ctrl-C
        with _sent_directory(path, named is not None, sent.get("env_file")) as (directory, packages):
            more: dict[str, Any] = {**sent, "working_dir": directory, "packages": packages, "says": named is not None}
            code = self._code(words, None, on_terminal=is_person, with_secrets=named is not None, **more)
        raise click.exceptions.Exit(code)

    def read(self, words: Sequence[str], to: IO[bytes], given: AsyncIterator[bytes] | None = None) -> int:
        """Run a command, perhaps with given bytes as stdin, write its stdout to a file, and return its exit code."""
        return self._code(words, to) if given is None else self._code(words, to, True, given=given)

    def write_into(self, words: Sequence[str], path: Path) -> None:
        """Run a command, and write its stdout to a new file here. If the command fails, end with its exit code."""
        with private_file(path, "wb") as file:
            if (code := self.read(words, file)) != OK:
                raise click.exceptions.Exit(code)

    def forward(self, words: Sequence[str], local: int, remote: int) -> NoReturn:
        """Forward a port of this machine, or any free one for 0, to a port of the head, which a command forwards there.

        ``remote`` is the port on the task's host, for messages.
        """
        from iris_ray.cli.streams import wait_for

        raise click.exceptions.Exit(wait_for(self._forward(words, local, remote)))

    def _code(
        self,
        words: Sequence[str],
        to: IO[bytes] | None,
        takes_input: bool = False,
        on_terminal: bool = False,
        given: AsyncIterator[bytes] | None = None,
        **more: Any,
    ) -> int:
        """Run a command, and return its exit code.

        Args:
            words: the words after ``iris-ray``.
            to: the file for its stdout; None: this command's stdout.
            takes_input, on_terminal: as for `run`.
            given: its stdin; None: this command's stdin, if it takes input.
            more: as for `Tunnel`.
        """
        if more.get("env"):  # the values come apart: others on the head could see them among a process's words
            words = [*without_values(words)]
        tunnel = Tunnel(self._jobs, **more)
        from iris_ray.cli import streams
        from iris_ray.sessions.client import follow
        from iris_ray.sessions.core import CommandLine

        def show(data: bytes, is_err: bool) -> None:
            if to is None or is_err:
                (streams.pass_on if words[0] in _OWN else streams.print_bytes)(data, is_err)
            else:
                to.write(data)

        async def run() -> int:
            if on_terminal:
                term = os.environ.get("TERM", "xterm")
                async with tunnel:
                    command = CommandLine(tuple(words), streams.terminal_size(), True, term)
                    return await streams.follow_on_terminal(tunnel.run(command))
            with streams.CtrlC() as ctrl_c:
                async with tunnel:
                    channel = tunnel.run(CommandLine(tuple(words), takes_input=takes_input))
                    ctrl_c.goes_to(channel)
                    taken = (given or streams.stdin_bytes()) if takes_input else None
                    return ctrl_c.judge(await follow(channel, show, taken))

        return streams.wait_for(run())

    async def _forward(self, words: Sequence[str], local: int, remote: int) -> int:
        from iris_ray.cli.streams import print_bytes
        from iris_ray.sessions.core import CommandLine
        from iris_ray.sessions.port_forward import LOOPBACK, listen

        at_head = 0

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tunnel.begin_carrying(LOOPBACK, at_head, reader, writer)

        server, port = await listen(accept, local, remote)
        async with server, await asyncio.to_thread(lambda: Tunnel(self._jobs)) as tunnel:
            rest = b""
            async for piece in tunnel.run(CommandLine(tuple(words))).pieces():
                *lines, rest = (rest + piece.err).split(b"\n")
                for line in lines:
                    if found := PORT.match(line):
                        at_head = int(found[1])
                        line = line.replace(found[1], str(port).encode(), 1)
                        await server.start_serving()
                    print_bytes(line + b"\n", True)
            return FAILED if piece.exit_code is None else piece.exit_code

    # -- jobs of Ray's job API ---------------------------------------------------------------------------------------

    def submit_script(
        self,
        target: str,
        arguments: Sequence[str],
        named: str | None,
        follow: bool,
        as_json: bool,
        **sent: Unpack[Sent],
    ) -> None:
        """Send a directory, and run a script or program in it as a job of Ray's job API; print its id."""
        directory, fields = Path(named or "."), dict[str, Any](sent)
        run_id = fields.pop("run_id")
        command = [*_program(target, directory), *arguments]
        config = RayJobConfig(command, directory, with_secrets=named is not None, **fields)
        submitted = self._jobs.submit(config, run_id)
        if as_json:
            print_json({"run_id": submitted})
        else:
            click.echo(submitted)
        if follow:
            self._follow(submitted)

    # If there is no such job of Ray's job API, the head runs the command as it was typed.

    def logs(self, job: str, follow: bool) -> None:
        """Print the output of a job."""

        def show() -> None:
            if follow:
                self._follow(job)
            else:
                print_output(self._jobs.logs(job).encode(errors="backslashreplace"))

        self._if_rays(job, show)

    def status(self, job: str, as_json: bool) -> None:
        """Print the status of a job."""

        def show() -> None:
            found = self._jobs.status(job)
            if as_json:
                print_json(found)
                return
            jobs = ", ".join(found.job_ids) or "none yet"
            facts = {"run": found.run_id, "state": found.state, "message": one_line(found.message), "jobs": jobs}
            print_facts(facts)

        self._if_rays(job, show)

    def cancel(self, jobs: Sequence[str], yes: bool, as_json: bool) -> None:
        """Stop jobs of Ray's job API, and have the head cancel the others: first, since it may refuse one of them."""
        found: dict[str, RayJobStatus] = {}
        for job in jobs:
            with contextlib.suppress(UnknownNameError):
                if "/" not in job:  # no id of Ray's has one
                    found[job] = self._jobs.status(job)
        others = [job for job in jobs if job not in found]
        if as_json and found and others:
            raise InvalidRequestError(
                f"{others[0]} is not a job of Ray's job API, and {next(iter(found))} is; cancel them apart with --json"
            )
        running = [job for job, before in found.items() if not before.finished]
        if running or others:
            confirm(f"Cancel {', '.join([*running, *others])}?", yes)
        if others:
            words = ["cancel", *others, "--yes", *(["--json"] if as_json else [])]
            if (code := self._code(words, None)) != OK:
                raise click.exceptions.Exit(code)
        done = [Cancelled(job_id=job, cancelled=job in running and self._jobs.stop(job),
                          state_before=before.state.upper()) for job, before in found.items()]  # fmt: skip
        if as_json and not others:
            print_json(done)
        for one in [] if as_json else done:
            state = one["state_before"].lower()
            end = "is being stopped" if one["cancelled"] else f"had already ended: {state}"
            click.echo(f"{one['job_id']} {end}")

    def _if_rays(self, job: str, act: Callable[[], None]) -> None:
        """Act on a job of Ray's job API. If there is none of that id, have the head run this command as it was typed.

        Args:
            job: the id.
            act: raises UnknownNameError if there is none.
        """
        with contextlib.suppress(UnknownNameError):
            if "/" not in job:  # no id of Ray's has one
                act()
                return
        self.run(words_for_head())

    def _follow(self, run_id: str) -> None:
        """Print the output of a job until its end. End the command if it did not succeed, or at Ctrl-C."""
        try:
            status = self._jobs.follow(run_id, lambda piece: print_output(piece.encode(errors="backslashreplace")))
        except KeyboardInterrupt:
            if on_a_terminal() and really_cancel("leave it running", default=False):
                self._jobs.stop(run_id)
                say_error(f"{run_id} is being stopped")
            else:
                say_error(f"{run_id} goes on; iris-ray logs -f, status and cancel take its id with the same --address")
            raise click.exceptions.Exit(INTERRUPTED) from None
        if status.state != "succeeded":
            say_error(f"{run_id} has ended: {status.state}: {one_line(status.message)}")
            raise click.exceptions.Exit(FAILED)


# -- directories that are sent -----------------------------------------------------------------------------------------


def _program(target: str, directory: Path) -> list[str]:
    """Return how the cluster runs a target: a script of the directory by Python, anything else as a program.

    Raises:
        InvalidRequestError: there is no such script.
    """
    if not target.endswith(".py"):
        return [target]
    for candidate in (directory / target, Path(target)):
        if candidate.is_file() and candidate.resolve().is_relative_to(directory.resolve()):
            return ["python", str(candidate.resolve().relative_to(directory.resolve()))]
    if Path(target).is_file():
        raise InvalidRequestError(f"{target} is not in {directory}, which is what is sent; give another --working-dir")
    raise InvalidRequestError(f"{unknown('script', target, sorted(path.name for path in directory.glob('*.py')))}")


@contextlib.contextmanager
def _sent_directory(path: Path, whole: bool, variables: str | None) -> Iterator[tuple[Path, list[Path]]]:
    """Print the size of a directory that is sent. Yield it as Ray is to send it, and packages beside it.

    Args:
        path: of the directory.
        whole: whether the user has named it, so that all of it is sent.
        variables: the file whose variables travel apart, if there is one.

    Raises:
        InvalidRequestError: it is too large.
    """
    checkouts, directories = module_of("dev", "checkout"), module_of("dev", "code_directory")
    path = path.absolute()
    checkout = None
    with contextlib.suppress(InvalidRequestError) if whole else contextlib.nullcontext():
        checkout = checkouts.Checkout.of(path, variables)
    record = None if checkout is None else checkout.record
    if record is not None and whole:
        record = record.of_whole_directory()
    with checkouts.record_package(record) as packages:
        if whole:
            yield path, packages
            return
        code = directories.CodeDirectory.look(path, variables) if checkout is None else checkout.code
        what = path if record is None else record
        click.echo(f"iris-ray: sending {what}: {code.in_words()}", err=True)
        with code.package() as package:
            yield package, packages
