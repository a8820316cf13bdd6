"""``iris-ray cancel``: end a job."""

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster, dashboard_address
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.options import json_option, yes_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.words import state_in_words
from iris_ray.cli.questions import confirm
from iris_ray.cli.ray_job import stop_ray_job


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@yes_option
@json_option
@address_option
def cancel(job: str, yes: bool, as_json: bool) -> None:
    """End a job, whether it waits or runs: your own, or as an operator that of any user.

    \b
      iris-ray cancel train-1a2b3c4d

    JOB is an id that `iris-ray ls` shows. On a terminal the command asks first; Ctrl-C at that question leaves the job
    alone.
    """
    from iris_ray.client.identity import current_user

    if (dashboard := dashboard_address()) is not None:
        stop_ray_job(dashboard, job, yes, as_json)
        return
    with cluster():
        controller = ControllerConnection()
        before = controller.ask(ControllerInterface.job_status, job)
        if not before.state.finished:
            where = f" on {', '.join(before.groups)}" if before.groups else ""
            confirm(f"Cancel {job} of {before.user}, {state_in_words(before)}{where}?", yes)
            before = controller.ask(ControllerInterface.cancel, job, f"cancelled by {current_user()}", current_user())
    if as_json:
        print_json({"job_id": job, "cancelled": not before.state.finished, "state_before": before.state})
    elif before.state.finished:
        click.echo(f"{job} had already ended: {before.state.value}")
    else:
        click.echo(f"{job} is cancelled; it was {state_in_words(before)}")
