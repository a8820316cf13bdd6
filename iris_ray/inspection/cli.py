"""``iris-ray job stacks``, ``profile`` and ``chips``: what a job's tasks do, and where their time goes."""

import contextlib
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Required, TypedDict

import click
from click.core import ParameterSource

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.address import address_option, cluster, head_of_dashboard
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.conventions import FAILED, require_place
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import counted, print_json, print_output, print_table
from iris_ray.cli.tasks import ALL_TASKS, task_argument
from iris_ray.cli.times import Duration
from iris_ray.errors import InspectionFailedError, InvalidRequestError
from iris_ray.inspection.chip_metrics import ChipUse
from iris_ray.model.checks import unknown_number
from iris_ray.model.lifecycle import TaskState
from iris_ray.terminal import live_line

if TYPE_CHECKING:
    from iris_ray.actors.protocol.status import TaskStatus

_NAMED = 12
"""The limit for tasks that are named where they do the same."""


@click.command()
@task_argument(unfinished_jobs)
@json_option(lambda: GenericAlias(list, module_of("inspection", "client").SameStacks))
@address_option
def stacks(job: str, task: int | None, as_json: bool) -> None:
    """The stack of each thread of a job's tasks, whether they hang or not.

    Tasks with equal stacks are shown once, the largest group first, which often shows which task the others wait for.
    py-spy reads the stacks on the tasks' hosts; the tasks need not do anything for it.

    \b
      iris-ray job stacks train-1a2b3c4d       all tasks that run
      iris-ray job stacks train-1a2b3c4d 3     task 3
    """
    with cluster():
        from iris_ray.inspection import client as inspection

        tasks, process = _tasks(job, task)
        with live_line("iris-ray") as line:
            line.show(f"reading the stacks of {len(tasks)} tasks")
            found = inspection.stacks(tasks, process)
    if as_json:
        print_json(found)
        return
    if not found:
        states = ", ".join(sorted({one.state.value for one in tasks if one.state is not TaskState.RUNNING}))
        click.echo(f"no task runs: {states}", err=True)
    for group in found:
        click.echo(f"== {_named(group.tasks)}" + (f": {group.error}" if group.error else ""), err=bool(group.error))
        if group.stacks is not None:
            print_output(group.stacks.rstrip() + "\n\n")
    if found and all(group.error for group in found):
        raise click.exceptions.Exit(FAILED)


def _tasks(job: str, task: int | None) -> "tuple[list[TaskStatus], int | None]":
    """Return one task of a job, and the number of its process on its host; with None all tasks, and None."""
    controller = ControllerConnection()
    if task is None:
        return controller.ask_all(ControllerInterface.list_tasks, job), None
    status, process = _task(controller, job, task)
    return [status], process


def _task(controller: ControllerConnection, job: str, index: int) -> "tuple[TaskStatus, int]":
    """Return the task with the process of this index, and the number of the process on its host.

    Raises:
        UnknownNameError: there is no such job or process.
    """
    status = controller.ask(ControllerInterface.job_status, job)
    known = range(sum(status.tasks.values()) * status.processes_per_host)
    if index not in known:
        raise unknown_number(f"task of {job}", index, known)
    host, process = divmod(index, status.processes_per_host)
    return controller.ask(ControllerInterface.task_status, job, host), process


def _named(tasks: Sequence[int]) -> str:
    if len(tasks) == 1:
        return f"task {tasks[0]}"
    more = ", …" if len(tasks) > _NAMED else ""
    return f"{len(tasks)} tasks: {', '.join(map(str, tasks[:_NAMED]))}{more}"


def _say_problems(problems: Mapping[str, Sequence[int]], prefix: str = "") -> None:
    """Print each problem to stderr, with the tasks that have it."""
    for why, indexes in problems.items():
        click.echo(f"{prefix}{_named(sorted(indexes))}: {why}", err=True)


# -- profile -----------------------------------------------------------------------------------------------------------
# ``iris-ray job profile``: where the time of a task goes.


class FileWritten(TypedDict):
    """A file that was written.

    Attributes:
        file: its path.
        bytes: its size.
    """

    file: str
    bytes: int


_ENDINGS = {"flamegraph": "svg", "speedscope": "json", "raw": "txt"}
LONGEST_S = 600
SECONDS, SECONDS_OF_JAX = 10, 3


@click.command()
@task_argument(unfinished_jobs)
@click.option(
    "--duration", "seconds", type=Duration(1, LONGEST_S),
    help=f"How long to watch, 10m at most.  [default: {SECONDS}s; {SECONDS_OF_JAX}s with --xprof]",
)  # fmt: skip
@click.option(
    "--output", "-o", metavar="PATH",
    help="Where to write it; - for stdout, with --xprof as a tar file.  [default: JOB-TASK with .svg, .json or .txt by"
    " --format, or JOB-xprof/]",
)  # fmt: skip
@click.option("--format", "layout", type=click.Choice(list(_ENDINGS)), default="flamegraph", show_default=True)
@click.option("--idle", is_flag=True, help="Count waiting threads as well; not with --xprof.")
@click.option("--xprof", is_flag=True, help="What JAX and its chips do, for TensorBoard or XProf.")
@click.option(
    ALL_TASKS, "everywhere", is_flag=True, help="With --xprof: all running tasks of the job, up to 64 at the same time."
)
@json_option(list[FileWritten])
@address_option
@click.pass_context
def profile(
    context: click.Context,
    job: str,
    task: int | None,
    seconds: float | None,
    output: str | None,
    layout: str,
    idle: bool,
    xprof: bool,
    everywhere: bool,
    as_json: bool,
) -> None:
    """Where the time of a task goes: a picture of its Python functions, and those of its child processes.

    py-spy looks into the task on its host a hundred times a second; the task goes on meanwhile. With --xprof, JAX's own
    profiler in the task's process records XLA's operations on the host and on the chips.

    \b
      iris-ray job profile train-1a2b3c4d 0                                   writes train-1a2b3c4d-0.svg
      iris-ray job profile train-1a2b3c4d 0 --duration 30s --format speedscope  for https://www.speedscope.app
      iris-ray job profile train-1a2b3c4d --xprof --all-tasks                  then: xprof train-1a2b3c4d-xprof

    Without TASK it is task 0.
    """
    if as_json and output == "-":
        raise click.UsageError("--json says what was written; with --output - it would mix with that.")
    if xprof:
        if context.get_parameter_source("layout") is not ParameterSource.DEFAULT or idle:
            raise click.UsageError("--format and --idle are not for --xprof")
        if everywhere and task is not None:
            raise click.UsageError(f"{ALL_TASKS} is for all tasks, and {task} is one; leave one of them out")
        _traces(job, None if everywhere else task or 0, _whole(seconds, SECONDS_OF_JAX), output, as_json)
    elif everywhere:
        raise click.UsageError(f"{ALL_TASKS} is for --xprof; name one task")
    else:
        _picture(job, task or 0, _whole(seconds, SECONDS), output, layout, idle, as_json)


def _whole(seconds: float | None, default: int) -> int:
    return default if seconds is None else max(1, round(seconds))


def _picture(job: str, task: int, seconds: int, output: str | None, layout: str, idle: bool, as_json: bool) -> None:
    path = Path(output or f"{_file(job)}-{task}.{_ENDINGS[layout]}")
    if output != "-":
        require_place(path)
    if (head := head_of_dashboard()) is not None:
        words = ["job", "profile", job, str(task), "--duration", str(seconds), "--format", layout, "--output", "-"]
        words += ["--idle"] if idle else []
        if output == "-":
            head.run(words)
        head.write_into(words, path)
        _say_written([path], as_json)
        return
    with cluster():
        from iris_ray.inspection import client as inspection

        status, process = _task(ControllerConnection(), job, task)
        _, address = inspection.place_of(status, process)
        click.echo(f"iris-ray: watching task {task} on {address} for {counted(seconds, 'second')}", err=True)
        with live_line("iris-ray") as line:
            line.show(f"watching task {task} of {job}")
            found = inspection.profile(status, seconds, layout, idle, process)
    if found.waits:
        click.echo("iris-ray: all threads waited all the time: this shows where, as --idle does", err=True)
    if output == "-":
        sys.stdout.buffer.write(found.data)
        return
    path.write_bytes(found.data)
    _say_written([path], as_json)


def _say_written(paths: Iterable[Path], as_json: bool) -> None:
    written = [FileWritten(file=str(path), bytes=path.stat().st_size) for path in paths]
    if as_json:
        print_json(written)
    for one in [] if as_json else written:
        click.echo(f"{one['file']}: {one['bytes']} bytes")


def _file(job: str) -> str:
    return job.replace("/", "-")


def _traces(job: str, task: int | None, seconds: int, output: str | None, as_json: bool) -> None:
    directory = Path(output or f"{_file(job)}-xprof")
    before = set(directory.rglob("*.pb"))

    def say_where() -> None:
        if directory.exists():
            click.echo(f"to see them: xprof {directory}, or tensorboard --logdir {directory}", err=True)
        written = sorted(set(directory.rglob("*.pb")) - before)
        if as_json and written:
            _say_written(written, as_json)

    if (head := head_of_dashboard()) is not None and output != "-":
        words = ["job", "profile", job, *([ALL_TASKS] if task is None else [str(task)]), "--xprof"]
        with tempfile.TemporaryFile() as packed:
            code = head.read([*words, "--duration", str(seconds), "--output", "-"], packed)
            if packed.tell():
                packed.seek(0)
                with tarfile.open(fileobj=packed) as traces:  # others on the head can write to it, so no links
                    files = [one for one in traces if one.isfile() or one.isdir()]
                    traces.extractall(directory, files, filter="data")
                say_where()
        raise click.exceptions.Exit(code)
    if output != "-":
        try:
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                _trace(job, task, seconds, directory)
        finally:
            say_where()
        return
    out = sys.stdout.buffer
    with tempfile.TemporaryDirectory(prefix="iris-ray-") as made, contextlib.redirect_stdout(sys.stderr):
        directory = Path(made, "traces")
        try:
            _trace(job, task, seconds, directory)
        finally:
            if directory.exists():
                with tarfile.open(fileobj=out, mode="w|") as traces:
                    traces.add(directory, ".")


def _trace(job: str, task: int | None, seconds: int, directory: Path) -> None:
    """Write traces where TensorBoard and XProf look for them: ``plugins/profile/RUN/HOST.xplane.pb``."""
    run = directory / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
    try:
        run.mkdir(parents=True)
    except OSError as error:
        raise InvalidRequestError(f"{run} can't be made: {error.strerror}; give another by --output") from None
    try:
        with cluster():
            problems = _write_traces(job, task, seconds, run)
    finally:
        for empty in (run, run.parent, run.parent.parent, directory):
            with contextlib.suppress(OSError):  # it has traces, or something else
                empty.rmdir()
    _say_problems(problems, "iris-ray: ")
    if problems:
        raise click.exceptions.Exit(FAILED)


def _write_traces(job: str, task: int | None, seconds: int, run: Path) -> dict[str, list[int]]:
    """Write the trace of a task, or of all. Return the reasons why some have none, with their indexes."""
    from iris_ray.inspection import client as inspection
    from iris_ray.inspection.host import TRACE_SUFFIX  # these import Ray

    tasks, process = _tasks(job, task)
    if process is not None:
        inspection.place_of(tasks[0], process)
    elif not inspection.running(tasks):
        raise InspectionFailedError(f"no task of {job} runs")
    problems: dict[str, list[int]] = {}
    with live_line("iris-ray") as line:
        line.show(f"watching {job} for {counted(seconds, 'second')}")
        for index, found in inspection.traces(tasks, seconds, process):
            if isinstance(found, InspectionFailedError):
                problems.setdefault(str(found), []).append(index)
                continue
            path = run / f"task-{index}{TRACE_SUFFIX}"
            path.write_bytes(found)
            click.echo(f"{path}: {len(found)} bytes")
    return problems


# -- chips -------------------------------------------------------------------------------------------------------------
# ``iris-ray job chips``: how much the chips of a job are used.


class ChipsOfTask(TypedDict, total=False):
    """The use of a task's chips: either ``chips`` or ``error`` is there.

    Attributes:
        task: the task's index; with several processes on a host, that of the first of them.
        chips: the use of each.
        error: why it is not known.
    """

    task: Required[int]
    chips: list[ChipUse]
    error: str


@click.command()
@task_argument(unfinished_jobs)
@json_option(list[ChipsOfTask])
@address_option
def chips(job: str, task: int | None, as_json: bool) -> None:
    """How much the chips of a job are used now: duty cycle and memory, as libtpu reports them on their hosts.

    The duty cycle is the part of the last seconds in which a chip's TensorCore was busy. libtpu reports nothing before
    the task uses its chips.

    \b
      iris-ray job chips train-1a2b3c4d        all tasks
      iris-ray job chips train-1a2b3c4d 3      task 3
    """
    with cluster():
        from iris_ray.inspection import client as inspection

        tasks, process = _tasks(job, task)
        if process is not None:
            inspection.place_of(tasks[0], process)
        told: list[ChipsOfTask] = []
        rows: list[tuple[object, ...]] = []
        problems: dict[str, list[int]] = {}
        for one, uses in inspection.chips(tasks):
            index = one.indices[0]  # of the host's first process: libtpu tells of all chips of a host
            if isinstance(uses, InspectionFailedError):
                told.append({"task": index, "error": str(uses)})
                problems.setdefault(str(uses), []).append(index)
            else:
                told.append({"task": index, "chips": uses})
                rows += [(index, one.group, one.host, *_use(each)) for each in uses]
    if as_json:
        print_json(told)
    else:
        if rows:
            print_table(("TASK", "SLICE", "HOST", "DEVICE", "DUTY CYCLE", "MEMORY"), rows, "")
        _say_problems(problems)
        if not told:
            click.echo(f"no task of {job} runs", err=True)
    if not rows:
        raise click.exceptions.Exit(FAILED)


def _use(one: ChipUse) -> tuple[object, ...]:
    duty = "-" if one.duty_cycle is None else f"{one.duty_cycle:.0f} %"
    used, total = ("-" if size is None else f"{size / 2**30:.1f}" for size in (one.memory_used, one.memory_total))
    return one.device, duty, f"{used} of {total} GiB"
