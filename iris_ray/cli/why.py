"""``iris-ray why``: why a job waits."""

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.words import counted, one_line
from iris_ray.scheduler.pending_reason import PendingReason


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@json_option
@address_option
def why(job: str, as_json: bool) -> None:
    """Why a job waits: what is missing, and which jobs come first.

    \b
      iris-ray why train-1a2b3c4d

    JOB is an id that `iris-ray ls` shows.
    """
    with cluster():
        found = ControllerConnection().ask(ControllerInterface.job_status, job)
    waiting = found.waiting
    if as_json:
        print_json({"job_id": found.job_id, "state": found.state, "answer": found.explanation, "waiting": waiting})
        return
    click.echo(one_line(found.explanation))
    if waiting is not None:
        _print_shortage(waiting)


def _print_shortage(waiting: PendingReason) -> None:
    shortage = waiting.shortage
    if shortage is None:
        return
    if shortage.excluded:
        click.echo("\nWhat each condition leaves out:")
        for what, hosts in shortage.excluded:
            click.echo(f"  {one_line(what)}: {counted(hosts, 'host')}")
    if shortage.closest:
        click.echo("\nWhat comes closest:")
        for obstacle in shortage.closest:
            unnamed = [user for user in obstacle.used_by if user not in obstacle.why]
            users = f" (used by {', '.join(unnamed)})" if unnamed else ""
            click.echo(f"  {one_line(obstacle)}{users}")
        if shortage.more:
            click.echo(f"  and {shortage.more} more")
    if waiting.kept:
        click.echo(f"\nKept for it, as it has waited long: {', '.join(waiting.kept)}")
