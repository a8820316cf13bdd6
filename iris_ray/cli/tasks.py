"""``iris-ray tasks``: the tasks of a job."""

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.cli.address import cluster
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.json_output import print_json
from iris_ray.cli.options import address_option, json_option
from iris_ray.cli.tables import print_table

_HEADERS = ("TASK", "STATE", "ATTEMPT", "SLICE", "HOST", "ADDRESS", "ERROR")


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def tasks(job: str, as_json: bool) -> None:
    """The tasks of a job: their states and hosts.

    \b
      iris-ray tasks train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows.
    """
    with cluster():
        found = ControllerConnection().list_tasks(job)
    if as_json:
        print_json(found)
        return
    rows = [
        (t.task_index, t.state.value, t.attempt or "-", t.group or "-", t.host or "-", t.address or "-", t.error or "")
        for t in found
    ]
    print_table(_HEADERS, rows, "no tasks")
