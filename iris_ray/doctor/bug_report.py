"""``iris-ray bug-report``: one file with what other commands say about a job, for a person to read and then to send."""

import contextlib
import io
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import click

import iris_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.address import address_given, address_option, cluster, head_of_dashboard
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.conventions import INTERRUPTED, TERMINATED, private_file, require_place
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import print_json, print_output
from iris_ray.errors import IrisError
from iris_ray.masking import masked
from iris_ray.model.lifecycle import TaskState
from iris_ray.terminal import live_line

LINES = 200
"""So many of the last lines are kept of the task that failed first."""
_WARNING = """\
Read this before you send it, and delete what others must not see. The log and the stacks are what your program printed
and does; secrets that could be recognized are masked. Of environment variables there are names only."""


class ReportWritten(TypedDict):
    """A report that was written.

    Attributes:
        file: its path.
        lines: how many lines it has.
    """

    file: str
    lines: int


@click.command("bug-report")
@click.argument("job", shell_complete=all_jobs)
@click.option("--output", "-o", metavar="FILE", help="Where to write it; - for stdout.  [default: JOB.report.txt]")
@json_option(ReportWritten)
@address_option
def bug_report(job: str, output: str | None, as_json: bool) -> None:
    """Write one text file about a job, to read and then to send: what happened, why, where, and with which versions.

    It has the job's state, tasks and events with their causes, its goodput, the last lines of the task that failed
    first, the stacks of running tasks, the names of a running task's variables, the slices, the settings, and what
    `iris-ray doctor` says of this machine, with the account of its Google credentials, of the cluster and of its hosts.
    Of up to four tasks that crashed or hung, it has the ends of libtpu's logs, the names of core dumps, and stacks.

    \b
      iris-ray bug-report train-1a2b3c4d                 writes train-1a2b3c4d.report.txt
      iris-ray bug-report train-1a2b3c4d -o - | less

    JOB is an id that `iris-ray ls --all` shows. This takes half a minute, and changes nothing.
    """
    if output == "-" and as_json:
        raise click.UsageError("--json says where the report is; with --output - it would mix with the report.")
    path = Path(output or f"{job.replace('/', '-')}.report.txt")
    if output != "-":
        require_place(path)
    if (head := head_of_dashboard()) is not None:
        words = ["bug-report", job, "--output", "-"]
        if output == "-":
            head.run(words)
        head.write_into(words, path)
        _say_written(path, as_json)
        return
    with cluster():
        ControllerConnection().ask(ControllerInterface.job_status, job)  # raises if there is no such job
        text = "\n".join(_sections(job))
    if output == "-":
        print_output(f"{text}\n")
        return
    with private_file(path) as file:
        file.write(text)
    _say_written(path, as_json)


def _say_written(path: Path, as_json: bool) -> None:
    lines = len(path.read_text(encoding="utf-8", errors="replace").splitlines()) if path.is_file() else 0
    if as_json:
        print_json(ReportWritten(file=str(path), lines=lines))
    else:
        click.echo(f"{path}: {lines} lines. Read it before you send it")


def _sections(job: str) -> Iterator[str]:
    """Yield the parts of the report."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    here = f"iris_ray {iris_ray.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield f"iris-ray bug-report {job}, {now}\n{here}\n\n{_WARNING}\n"
    tasks = ControllerConnection().ask_all(ControllerInterface.list_tasks, job)
    runs = any(task.state is TaskState.RUNNING for task in tasks)
    for command in (
        f"job status {job}",
        f"why {job}",
        f"job tasks {job}",
        f"job events {job}",
        f"job goodput {job}",
        f"logs {job} --tail {LINES}",
        *([f"job stacks {job}"] if runs else []),
        "host ls",
        "cluster settings",
        "cluster controller status",
        "doctor",
    ):
        with live_line("iris-ray") as line:
            line.show(f"asking: {command}")
            said = _said_by(*command.split())
            if command.startswith(("logs ", "job stacks ")):
                said = masked(said)
            yield f"== iris-ray {command}\n\n{said}"
    yield from _evidence(job)
    if runs:
        yield f"== names of the variables of a task\n\n{_names(job)}\n"


def _evidence(job: str) -> Iterator[str]:
    """Yield what was kept of tasks that crashed in libtpu or hung, or why it can't be had."""
    try:
        for title, text in module_of("evidence", "client").kept_evidence(ControllerConnection(), job):
            yield f"== {title}\n\n{text}\n"
    except IrisError as error:
        yield f"== files about tasks that crashed or hung\n\n{error}\n"


def _said_by(*words: str) -> str:
    """Return the output of a command, with its errors."""
    from iris_ray.cli.main import main

    address = address_given(click.get_current_context())
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        options = () if address is None else ("--address", address)
        code = main.main([*options, *words], prog_name="iris-ray", standalone_mode=False)
    if code in (INTERRUPTED, TERMINATED):
        raise KeyboardInterrupt
    printed.seek(0)
    return printed.read()


def _names(job: str) -> str:
    """Return the names of the variables of the first task that runs, or why they can't be had."""
    tasks = ControllerConnection().ask_all(ControllerInterface.list_tasks, job)
    try:
        inspection = module_of("inspection", "client")
        return next(" ".join(inspection.variables(task)) for task in tasks if task.state is TaskState.RUNNING)
    except (IrisError, StopIteration) as error:
        return str(error) or "no task is running now"
