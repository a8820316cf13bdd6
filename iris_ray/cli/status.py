"""``iris-ray status``: one job."""

import time

import click

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.status import JobStatus
from iris_ray.cli.address import address_option, cluster, dashboard_address
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.options import json_option
from iris_ray.cli.printing.json_output import print_json
from iris_ray.cli.printing.tables import print_facts
from iris_ray.cli.printing.words import duration, state_in_words
from iris_ray.cli.ray_job import show_ray_job_status


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def status(job: str, as_json: bool) -> None:
    """One job: its state, attempts and retry budgets.

    \b
      iris-ray status train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows.
    """
    if (dashboard := dashboard_address()) is not None:
        show_ray_job_status(dashboard, job, as_json)
        return
    with cluster():
        from iris_ray.dashboard.place import link_to  # imports Ray

        found = ControllerConnection().ask(ControllerInterface.job_status, job)
        page = link_to(f"jobs/{job}")
    if as_json:
        print_json(found)
    else:
        print_facts(_facts(found) | {"page": page})


def _facts(found: JobStatus) -> dict[str, object]:
    return {
        "job": found.job_id,
        "name": found.name if found.name != found.job_id else None,
        "user": found.user,
        "state": state_in_words(found),
        "priority": found.priority.name.lower(),
        "type": found.device,
        "submitted": f"{duration(time.time() - found.submitted_at)} ago",
        "slices": ", ".join(found.groups),
        "tasks": ", ".join(f"{count} {state.value}" for state, count in found.tasks.items() if count),
        "attempt": found.attempt or "none yet",
        "says": found.how_far,
        "slow": "; ".join(found.stragglers),
        "heartbeat": _ago(found.heartbeat_at),
        "failures": f"{found.failures} (retries allowed: {found.max_retries_failure})",
        "preemptions": f"{found.preemptions} (retries allowed: {found.max_retries_preemption})",
        "evictions": found.evictions or None,
        "gives way": f"{found.gives_way[0]}, at the latest in {_left(found.gives_way[1])}" if found.gives_way else None,
        "last error": found.error,
        "waits because": found.waiting,
    }


def _ago(at: float | None) -> str | None:
    return None if at is None else f"{duration(time.time() - at)} ago"


def _left(until: float) -> str:
    return f"{max(0.0, until - time.time()):.0f} s"
