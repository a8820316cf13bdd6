"""``iris-ray ls``: the jobs of all users."""

import time

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.status import JobStatus
from iris_ray.cli.address import address_option, cluster
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.tables import print_table
from iris_ray.cli.printing.words import duration, state_in_words
from iris_ray.model.lifecycle import JobState

_HEADERS = ("JOB", "USER", "STATE", "TYPE", "SLICES", "ATTEMPT", "AGE", "NOTE")


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Finished jobs, too.")
@click.option("--user", metavar="NAME", help="Only the jobs of this user.")
@json_option
@address_option
def ls(everything: bool, user: str | None, as_json: bool) -> None:
    """Jobs of all users: what runs, what waits, and why.

    \b
      iris-ray ls
      iris-ray ls --all --user ann
    """
    with cluster():
        controller = ControllerConnection()
        jobs, aside = controller.list_jobs(), controller.about().get("set_aside", ())
    shown = [job for job in jobs if (everything or not job.state.finished) and user in (None, job.user)]
    if as_json:
        print_json(shown)
        return
    hidden = len(jobs) - len(shown)
    whose = f" of {user}" if user else ""
    none = f"no {'' if everything else 'unfinished '}jobs{whose}" + (f"; {hidden} others (--all)" if hidden else "")
    print_table(_HEADERS, [listed(job) for job in shown], none)
    if aside:
        some = ", ".join(one.name for one in aside[:4]) + (", …" if aside[4:] else "")
        click.echo(f"\nset aside, for they could not be handled: {some} (why: iris-ray doctor)")


def listed(job: JobStatus) -> tuple[object, ...]:
    """Return the row of a job."""
    state, slices = state_in_words(job), job.groups or "-"
    age = duration(time.time() - job.submitted_at)
    gives_way = f"{job.gives_way[0]} within {max(0.0, job.gives_way[1] - time.time()):.0f} s" if job.gives_way else None
    note = gives_way or job.waiting or (job.state is JobState.RUNNING and job.how_far) or job.error or ""
    return job.job_id, job.user, state, job.device or "-", slices, job.attempt or "-", age, note
