"""``iris-ray stacks``: what the threads of tasks do now."""

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.exits import FAILED
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
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
      iris-ray stacks train-1a2b3c4d       all tasks that run
      iris-ray stacks train-1a2b3c4d 3     task 3

    JOB is an id that `iris-ray ls` shows, TASK a number that `iris-ray tasks JOB` shows.
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
