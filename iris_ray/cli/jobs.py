"""What runs, what waits and why, and an end to it."""

import time

import click

from iris_ray.actors.wire.controller_connection import ControllerConnection
from iris_ray.actors.wire.status import JobStatus
from iris_ray.cli.completion import all_jobs, unfinished_jobs
from iris_ray.cli.options import address_option, cluster, json_option
from iris_ray.cli.questions import confirm
from iris_ray.cli.tables import counted, duration, one_line, print_facts, print_json, print_table


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
        jobs = ControllerConnection().list_jobs()
    shown = [job for job in jobs if (everything or not job.state.finished) and user in (None, job.user)]
    if as_json:
        print_json(shown)
        return
    hidden = len(jobs) - len(shown)
    of_whom = f" of {user}" if user else ""
    none = f"no {'' if everything else 'unfinished '}jobs{of_whom}" + (f"; {hidden} others (--all)" if hidden else "")
    headers = ("JOB", "USER", "STATE", "TYPE", "SLICES", "ATTEMPT", "AGE", "NOTE")
    print_table(headers, [_row(job) for job in shown], none)


def _row(job: JobStatus) -> tuple[object, ...]:
    slices = ",".join(job.groups) or "-"
    age = duration(time.time() - job.submitted_at)
    note = job.waiting or job.error or ""
    return job.job_id, job.user, state_in_words(job), job.device or "-", slices, job.attempt or "-", age, note


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def status(job: str, as_json: bool) -> None:
    """One job: its state, attempts and budgets.

    \b
      iris-ray status train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows.
    """
    with cluster():
        found = ControllerConnection().job_status(job)
    if as_json:
        print_json(found)
        return
    print_facts(
        {
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
            "failures": f"{found.failures} (retries allowed: {found.max_retries_failure})",
            "preemptions": f"{found.preemptions} (retries allowed: {found.max_retries_preemption})",
            "last error": found.error,
            "waits because": found.waiting,
        }
    )


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
    headers = ("TASK", "STATE", "ATTEMPT", "SLICE", "HOST", "ADDRESS", "ERROR")
    rows = [
        (t.task_index, t.state.value, t.attempt or "-", t.group or "-", t.host or "-", t.address or "-", t.error or "")
        for t in found
    ]
    print_table(headers, rows, "no tasks")


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@json_option
@address_option
def why(job: str, as_json: bool) -> None:
    """Why a job waits: what is missing, and who is before it.

    \b
      iris-ray why train-1a2b3c4d

    JOB is an id that `iris-ray ls` shows.
    """
    with cluster():
        found = ControllerConnection().job_status(job)
    waiting = found.waiting
    if as_json:
        print_json({"job_id": found.job_id, "state": found.state, "answer": found.explanation, "waiting": waiting})
        return
    click.echo(one_line(found.explanation))
    if waiting is None or waiting.shortage is None:
        return
    shortage = waiting.shortage
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


def state_in_words(job: JobStatus) -> str:
    return "starting" if job.starting else job.state.value


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@json_option
@address_option
def cancel(job: str, yes: bool, as_json: bool) -> None:
    """End a job, whether it waits or runs, whosever it is.

    \b
      iris-ray cancel train-1a2b3c4d

    JOB is an id that `iris-ray ls` shows. Asks first if it is on a terminal; Ctrl-C there leaves the job alone.
    """
    from iris_ray.client.identity import current_user

    with cluster():
        controller = ControllerConnection()
        before = controller.job_status(job)
        if not before.state.finished:
            where = f" on {', '.join(before.groups)}" if before.groups else ""
            confirm(f"Cancel {job} of {before.user}, {state_in_words(before)}{where}?", yes)
            before = controller.cancel(job, f"cancelled by {current_user()}")
    if as_json:
        print_json({"job_id": job, "cancelled": not before.state.finished, "state_before": before.state})
    elif before.state.finished:
        click.echo(f"{job} had already ended: {before.state.value}")
    else:
        click.echo(f"{job} is cancelled; it was {state_in_words(before)}")
