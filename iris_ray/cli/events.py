"""``iris-ray events``: what has happened to a job."""

import time

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.status import JobEvent
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.tables import print_table
from iris_ray.cli.printing.words import duration

_HEADERS = ("WHEN", "AGO", "TASK", "ATTEMPT", "WHAT")


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def events(job: str, as_json: bool) -> None:
    """What has happened to a job: its submission, its latest attempts and why each ended, its end.

    \b
      iris-ray events train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows. Of a gang, the latest five attempts are known.
    """
    with cluster():
        found = ControllerConnection().ask(ControllerInterface.job_events, job)
    if as_json:
        print_json(found)
        return
    print_table(_HEADERS, [_row(event) for event in found], "nothing has happened")


def _row(event: JobEvent) -> tuple[object, ...]:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at))
    number = ("-" if number is None else number for number in (event.task_index, event.attempt))
    return when, duration(time.time() - event.at), *number, event.what
