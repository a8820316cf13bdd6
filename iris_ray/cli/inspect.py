"""``iris-ray job stacks`` and ``profile``: what the threads of a job's tasks do, and where their time goes."""

import sys
from pathlib import Path

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.conventions import FAILED, require_place
from iris_ray.cli.options import json_option
from iris_ray.cli.printing import counted, print_json
from iris_ray.model.lifecycle import TaskState
from iris_ray.terminal import live_line

_NAMED = 12
"""So many tasks that do the same are named."""


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@click.argument("task", metavar="[TASK]", type=click.IntRange(min=0), required=False)
@json_option
@address_option
def stacks(job: str, task: int | None, as_json: bool) -> None:
    """What each thread of a job's tasks does now, whether they hang or not.

    Tasks that do the same are shown once, those of most tasks first: who waits for whom is often plain from that.
    py-spy reads the stacks on the tasks' hosts; the tasks need not do anything for it.

    \b
      iris-ray job stacks train-1a2b3c4d       all tasks that run
      iris-ray job stacks train-1a2b3c4d 3     task 3

    JOB is an id that `iris-ray ls` shows, TASK a number that `iris-ray job tasks JOB` shows.
    """
    with cluster():
        from iris_ray.client import inspection  # imports Ray

        controller = ControllerConnection()
        if task is None:
            tasks = controller.ask_all(ControllerInterface.list_tasks, job)
        else:
            tasks = [controller.ask(ControllerInterface.task_status, job, task)]
        with live_line("iris-ray") as line:
            line.show(f"reading the stacks of {len(tasks)} tasks")
            found = inspection.stacks(tasks)
    if as_json:
        print_json(found)
        return
    if not found:
        states = ", ".join(sorted({one.state.value for one in tasks if one.state is not TaskState.RUNNING}))
        click.echo(f"no task runs: {states}", err=True)
    for group in found:
        click.echo(_named(group.tasks) + (f": {group.error}" if group.error else ""), err=bool(group.error))
        if group.stacks is not None:
            click.echo(group.stacks.rstrip() + "\n")
    if found and all(group.error for group in found):
        raise click.exceptions.Exit(FAILED)


def _named(tasks: tuple[int, ...]) -> str:
    if len(tasks) == 1:
        return f"== task {tasks[0]}"
    more = ", …" if len(tasks) > _NAMED else ""
    return f"== {len(tasks)} tasks: {', '.join(map(str, tasks[:_NAMED]))}{more}"


# -- profile -----------------------------------------------------------------------------------------------------------
# ``iris-ray job profile``: where the time of a task goes.

_ENDINGS = {"flamegraph": "svg", "speedscope": "json", "raw": "txt"}
LONGEST_S = 600


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@click.argument("task", type=click.IntRange(min=0))
@click.option("--seconds", type=click.IntRange(1, LONGEST_S), default=10, show_default=True, help="How long to watch.")
@click.option("--output", "-o", metavar="FILE", help="Where to write it; - for stdout.  [default: JOB-TASK.svg]")
@click.option("--format", "layout", type=click.Choice(list(_ENDINGS)), default="flamegraph", show_default=True)
@click.option("--idle", is_flag=True, help="Count threads that wait, too.")
@address_option
def profile(job: str, task: int, seconds: int, output: str | None, layout: str, idle: bool) -> None:
    """Where the time of a task goes: a picture of its Python functions, and those of the processes that it has started.

    py-spy looks into the task on its host a hundred times a second; the task goes on meanwhile. For
    what happens on the chips use JAX's own profiler.

    \b
      iris-ray job profile train-1a2b3c4d 0                                   writes train-1a2b3c4d-0.svg
      iris-ray job profile train-1a2b3c4d 0 --seconds 30 --format speedscope  for https://www.speedscope.app

    JOB is an id that `iris-ray ls` shows, TASK a number that `iris-ray job tasks JOB` shows.
    """
    path = Path(output or f"{job.replace('/', '-')}-{task}.{_ENDINGS[layout]}")
    if output != "-":
        require_place(path)
    with cluster():
        from iris_ray.client import inspection  # imports Ray

        status = ControllerConnection().ask(ControllerInterface.task_status, job, task)
        _, address = inspection.place_of(status)
        click.echo(f"iris-ray: watching task {task} on {address} for {counted(seconds, 'second')}", err=True)
        with live_line("iris-ray") as line:
            line.show(f"watching task {task} of {job}")
            found = inspection.profile(status, seconds, layout, idle)
    if output == "-":
        sys.stdout.buffer.write(found)
        return
    path.write_bytes(found)
    click.echo(f"{path}: {len(found)} bytes")
