"""``iris-ray tasks``: the tasks of a job."""

import time

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.status import TaskStatus
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.tables import print_table
from iris_ray.cli.printing.words import duration

_HEADERS = ("TASK", "STATE", "ATTEMPT", "RAN", "EXIT", "SLICE", "HOST", "ADDRESS", "ERROR")


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def tasks(job: str, as_json: bool) -> None:
    """The tasks of a job: their states and hosts, for how long each ran, and its exit code.

    With --json also the latest attempts of each task, when they began and ended, and how.

    \b
      iris-ray tasks train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows.
    """
    with cluster():
        found = ControllerConnection().ask_all(ControllerInterface.list_tasks, job)
    if as_json:
        print_json(found)
        return
    print_table(_HEADERS, [_row(task) for task in found], "no tasks")


def _row(task: TaskStatus) -> tuple[object, ...]:
    ran = "-" if task.started_at is None else duration((task.ended_at or time.time()) - task.started_at)
    code = "-" if task.exit_code is None else task.exit_code
    where = task.group or "-", task.host or "-", task.address or "-"
    return task.task_index, task.state.value, task.attempt or "-", ran, code, *where, task.error or ""
