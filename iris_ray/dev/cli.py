"""``iris-ray dev``: hold slices, and run a directory's programs on them within a second."""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypedDict

import click

from iris_ray.cli.address import address_option, chosen_address, cluster, head_of_dashboard, words_for_head
from iris_ray.cli.completion import tpu_types
from iris_ray.cli.conventions import ALIASES, INTERRUPTED, interrupted, say_error
from iris_ray.cli.main import Commands, section_of
from iris_ray.cli.options import ENV, JobFlags, ScriptCommand, job_options
from iris_ray.cli.output import ListForm, json_option, list_options
from iris_ray.cli.printing import duration, print_json
from iris_ray.cli.times import Duration
from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import is_job_id
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import GangOptions, default_of
from iris_ray.model.topology import get_tpu_config
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.terminal import live_line

HOSTS = "hosts"
"""See `dev/held_run.py`."""

if TYPE_CHECKING:
    from iris_ray.dev.held_run import HeldRun, Sent

_MAY_BE_A_TYPE = re.compile(r"-|.*\d")
"""Other words are misspelt commands."""
_NOT_TAKEN = ("stall_timeout", "grow_after", "exit_grace", "failure_domain", "name", "working_dir")


class _Dev(Commands):
    """Takes a TPU type in place of a command for ``hold TYPE``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = (*self.entries, *ALIASES, HOSTS, "-h", "--help", "--address")
        is_type = args and args[0] not in names and _MAY_BE_A_TYPE.match(args[0])
        return super().parse_args(ctx, ["hold", *args] if is_type else args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return hosts if cmd_name == HOSTS else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return (HOSTS, hosts, args[1:]) if args[:1] == [HOSTS] else super().resolve_command(ctx, args)


@click.group(cls=_Dev, sections=section_of("dev"))
def dev() -> None:
    """Hold slices to work on: a job of the queue holds them, and a process on every host starts your code at once.

    \b
      iris-ray dev hold v4-32 --name mine              holds a v4-32, and says when it is there
      iris-ray dev run mine -- python train.py         sends what has changed, runs it on all hosts, prints its output
      iris-ray dev ls                                  what you hold
      iris-ray dev stop mine                           gives it back, as does an hour without a run
    """


class HeldSlices(TypedDict):
    """Slices that are held.

    Attributes:
        name: the name under which they are held.
        job_id: the job that holds them.
        hosts: the names of their hosts, once they are there.
    """

    name: str
    job_id: str
    hosts: list[str]


class HeldJob(TypedDict):
    """A job that holds slices for you.

    Attributes:
        name: the name under which it holds them.
        job_id, state, type: its id, state and TPU type.
        slices: the slices that it has now.
        held_since: when the job was submitted.
        waiting: why it waits for slices, or None.
    """

    name: str
    job_id: str
    state: JobState
    type: str | None
    slices: Sequence[str]
    held_since: float
    waiting: PendingReason | None


class GivenBack(TypedDict):
    """Slices that were given back.

    Attributes:
        name: the name under which they were held.
        job_id: the job that held them.
    """

    name: str
    job_id: str


@dev.command(cls=ScriptCommand)
@click.argument("type_", metavar="TPU_TYPE", required=False, shell_complete=tpu_types)
@click.option("--name", metavar="NAME", help="The name of the held slices.  [default: their type]")
@job_options(GangOptions, but=_NOT_TAKEN)
@click.option("--idle", type=Duration(60.0), default="1h", show_default=True,
              help="The slices are given back when nothing has run on them for this time.")  # fmt: skip
@click.option("--at-most", type=Duration(36.0), default="12h", show_default=True,
              help="They are given back this long after the job first had them, used or not.")  # fmt: skip
@click.option("--preload", multiple=True, default=("jax",), show_default=True, metavar="MODULE",
              help="A module to import ahead, if the hosts have it; repeatable.")  # fmt: skip
@json_option(HeldSlices)
@address_option
def hold(
    type_: str | None, flags: JobFlags, idle: float, at_most: float, preload: tuple[str, ...], as_json: bool
) -> None:
    """Hold slices, to run programs on with `iris-ray dev run`.

    \b
      iris-ray dev hold v4-32 --name mine
      iris-ray dev hold v4-32 --name two --num-slices 2 --idle 30m --at-most 4h
      iris-ray dev hold v5litepod-16 --preload jax --preload flax

    It is a job of the queue, dev-NAME, for which fair share, limits and priorities hold as for any other; `iris-ray ls`
    shows it. This command ends when the slices are there. If one is lost, the job gets another one. You can
    hold one job of each name at a time.
    """
    if (type_ is None) == (flags.tpu_type is None):
        raise click.UsageError("give the TPU type once, as TPU_TYPE or by --tpu, such as v4-32.")
    tpu_type = type_ or flags.tpu_type or ""
    get_tpu_config(tpu_type)  # refuses what is not a type
    name = flags.name or tpu_type
    if not is_job_id(name) or "/" in name:
        raise InvalidRequestError(f"--name is {name!r}; give letters, digits, dots, hyphens and underscores")
    if (head := head_of_dashboard()) is not None:
        flags.require_stored_secrets()
        head.run(words_for_head(), env=flags.env)
    from iris_ray.dev.held_job import submit, wait_for_hosts

    options = flags.options | {"env": flags.env, "keep_warm": default_of("keep_warm", "iris-ray submit")}
    with cluster():
        job_id = submit(name, tpu_type, flags.num_slices or 1, idle, at_most, preload, options)
        try:
            with live_line(job_id) as line:
                hosts = wait_for_hosts(name, chosen_address(), job_id, line).hosts
        except KeyboardInterrupt:
            say_error(f"{job_id} goes on, and holds them once it has them; to end it: iris-ray dev stop {name}")
            raise interrupted() from None
    if as_json:
        print_json(HeldSlices(name=name, job_id=job_id, hosts=[host.label for host in hosts]))
        return
    click.echo(f"{job_id} holds {', '.join(host.label for host in hosts)}; now: iris-ray dev run {name} -- python …")


@dev.command(cls=ScriptCommand)
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@ENV
@address_option
def run(name: str, command: tuple[str, ...], env: dict[str, str]) -> None:
    """Send what has changed in the current directory to all held hosts, run a program there, and print its output.

    \b
      iris-ray dev run mine -- python train.py --steps 10
      iris-ray dev run mine -- python -m pytest tests/
      iris-ray dev run mine --env LIBTPU_INIT_ARGS=… -- python train.py
      iris-ray dev run mine -- sh -c 'ls *.log'

    The program has the environment that a task has, with all chips; iris_ray.jax.initialize() joins all hosts. Files
    that git ignores stay here, and so do caches and virtual environments, such as __pycache__ and .venv. Files that
    look like secrets, files above 64 MB and links out of the directory stay as well; a line names up to four.
    `python SCRIPT`, -m and -c, also with -u, run in a fork of a process that has imported the modules of --preload
    already. A new process is started for other flags of Python, for the path of another interpreter of the hosts, or
    if --env sets a variable that acts when a process starts, such as JAX_… or PYTHON….

    Ctrl-C ends the program and all its processes on all hosts. If it fails on one host, it is ended on the others, and
    this command has the exit code of the first failure.
    """
    from iris_ray.dev.code import OF_A_RAY_JOB
    from iris_ray.dev.code_directory import CodeDirectory

    code = CodeDirectory.look(Path.cwd(), is_sent=OF_A_RAY_JOB in os.environ)
    if (head := head_of_dashboard()) is not None:
        click.echo(f"iris-ray: sending {code.in_words()}", err=True)
        with code.package() as package:
            head.run(words_for_head(), env=env, working_dir=package)
    with _begun(name) as held_run:

        def say(sent: "Sent") -> None:
            if sent.files or code.left_out:
                click.echo(f"iris-ray: sent {code.in_words(sent.files, sent.size)}", err=True)

        held_run.start(code, command, env, say)
        exit_code = _shown(held_run)
    raise click.exceptions.Exit(exit_code)


@dev.command()
@list_options(list[HeldJob], "names")
@address_option
def ls(form: ListForm) -> None:
    """The slices that you hold: names, types, and whether they are there yet.

    \b
      iris-ray dev ls
    """
    if (head := head_of_dashboard()) is not None:
        head.run(words_for_head())
    with cluster():
        from iris_ray.dev.held_job import PREFIX, all_held

        found = [
            HeldJob(name=job.name.removeprefix(PREFIX), job_id=job.job_id, state=job.state, type=job.device,
                    slices=job.groups, held_since=job.submitted_at, waiting=job.waiting)
            for job in all_held()
        ]  # fmt: skip
    form.show(found, lambda one: one["name"], ("NAME", "JOB", "STATE", "TYPE", "SLICES", "AGE", "NOTE"), _held_row,
              "you hold nothing; hold a slice: iris-ray dev hold v4-32")  # fmt: skip


def _held_row(one: HeldJob) -> tuple[object, ...]:
    age = duration(time.time() - one["held_since"])
    place = one["type"] or "-", one["slices"] or "-"
    return one["name"], one["job_id"], one["state"].value, *place, age, one["waiting"] or ""


@dev.command()
@click.argument("name")
@json_option(GivenBack)
@address_option
def stop(name: str, as_json: bool) -> None:
    """Give held slices back. What runs there ends.

    \b
      iris-ray dev stop mine
    """
    if (head := head_of_dashboard()) is not None:
        head.run(words_for_head())
    from iris_ray.actors.calls.controller_connection import ControllerConnection
    from iris_ray.actors.protocol.controller_interface import ControllerInterface
    from iris_ray.client.connection import current_user
    from iris_ray.dev.held_job import find, forget

    with cluster():
        job_id, user = find(name).job_id, current_user()
        ControllerConnection().ask(ControllerInterface.cancel, job_id, f"given back by {user}", user)
    forget(name, chosen_address())
    if as_json:
        print_json(GivenBack(name=name, job_id=job_id))
    else:
        click.echo(f"{job_id} is given back")


@click.command(HOSTS)
@click.argument("name")
def hosts(name: str) -> None:
    """Print the addresses and tokens of held hosts, for a notebook that can't ask the cluster."""
    from iris_ray.dev.held_job import find, wait_for_hosts

    with cluster(), live_line(name) as line:
        held = wait_for_hosts(name, chosen_address(), find(name).job_id, line)
    print_json({"job_id": held.job_id, "hosts": [asdict(host) for host in held.hosts]})


@contextmanager
def _begun(name: str) -> Iterator["HeldRun"]:
    """Begin a run: at once if the hosts are those of the run before, else once the cluster says where they are."""
    from iris_ray.dev.held_run import begin, try_remembered

    held_run = try_remembered(name, chosen_address())
    if held_run is None:
        with cluster(), live_line(f"{name}") as line:
            held_run = begin(name, chosen_address(), line)
    with held_run:
        yield held_run


def _shown(held_run: "HeldRun") -> int:
    """Print what the hosts say until the end, pass Ctrl-C on, and return the exit code."""
    from iris_ray.cli.streams import KILLED, LabelledLines, pass_on

    widest = max(len(host.label) for host in held_run.hosts)
    lines = {host: LabelledLines(f"{host.label.ljust(widest)}| ".encode()) for host in held_run.hosts}
    pressed = 0

    def press(_: int, __: FrameType | None) -> Any:
        nonlocal pressed
        pressed += 1
        if pressed == 1:
            held_run.interrupt()
        else:
            held_run.end()

    before = signal.signal(signal.SIGINT, press)
    try:
        for piece in held_run.pieces():
            if piece.note:
                say_error(f"{piece.host.label} {piece.note}")
            elif len(lines) > 1:
                lines[piece.host].print(piece.data, piece.is_err)
            else:
                pass_on(piece.data, piece.is_err)
    finally:
        signal.signal(signal.SIGINT, before)
        for one in lines.values():
            one.print_rest()
    return INTERRUPTED if pressed and held_run.exit_code == KILLED else held_run.exit_code
