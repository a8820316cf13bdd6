"""Commands about jobs: ``ls``, ``status``, ``tasks``, ``events``, ``why``, ``cancel``."""

import time

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobEvent, JobStatus, TaskStatus
from iris_ray.cli.address import address_option, cluster, head_of_dashboard, words_for_head
from iris_ray.cli.completion import all_jobs, unfinished_jobs
from iris_ray.cli.conventions import confirm
from iris_ray.cli.options import json_option, yes_option
from iris_ray.cli.printing import (
    counted,
    duration,
    one_line,
    print_facts,
    print_json,
    print_output,
    print_table,
    state_in_words,
)
from iris_ray.cli.sent_code import code_of
from iris_ray.model.lifecycle import JobState
from iris_ray.scheduler.pending_reason import PendingReason

_JOB_HEADERS: tuple[str, ...] = ("JOB", "USER", "STATE", "TYPE", "SLICES", "ATTEMPT", "AGE", "NOTE")


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Finished jobs as well.")
@click.option("--user", metavar="NAME", help="Only the jobs of this user.")
@click.option("--team", metavar="NAME", help="Only the jobs of this team and its parts.")
@json_option
@address_option
def ls(everything: bool, user: str | None, team: str | None, as_json: bool) -> None:
    """Jobs of all users: what runs, what waits, and why.

    \b
      iris-ray ls
      iris-ray ls --all --user ann
      iris-ray ls --team research
    """
    with cluster():
        controller = ControllerConnection()
        jobs = controller.ask_all(ControllerInterface.list_jobs)
        aside = controller.ask(ControllerInterface.about).get("set_aside", ())
    shown = [job for job in jobs if (everything or not job.state.finished) and user in (None, job.user)]
    shown = [job for job in shown if team is None or f"{job.team}/".startswith(f"{team}/")]
    if as_json:
        print_json(shown)
        return
    hidden = len(jobs) - len(shown)
    whose = (f" of {user}" if user else "") + (f" in team {team}" if team else "")
    none = f"no {'' if everything else 'unfinished '}jobs{whose}" + (f"; {hidden} others (--all)" if hidden else "")
    columns = {"GROUP": [job.group for job in shown], "TEAM": [job.team for job in shown]}
    headers, rows = _JOB_HEADERS, [listed(job) for job in shown]
    for header, values in columns.items():
        if any(values):
            headers = *headers[:2], header, *headers[2:]
            rows = [(*row[:2], value or "-", *row[2:]) for row, value in zip(rows, values, strict=True)]
    print_table(headers, rows, none)
    if aside:
        some = ", ".join(one.name for one in aside[:4]) + (", …" if aside[4:] else "")
        click.echo(f"\nset aside, for they could not be handled: {some} (why: iris-ray doctor)")


def listed(job: JobStatus) -> tuple[object, ...]:
    """Return the row of a job."""
    state, slices = state_in_words(job), job.groups or "-"
    age = duration(time.time() - job.submitted_at)
    note = gives_way(job) or job.waiting or (job.state is JobState.RUNNING and job.how_far) or job.error or ""
    return job.job_id, job.user, state, job.device or "-", slices, job.attempt or "-", age, note


def gives_way(job: JobStatus) -> str | None:
    """Return why and within which time a job leaves its hosts; None if it stays."""
    return f"{job.gives_way[0]} within {max(0.0, job.gives_way[1] - time.time()):.0f} s" if job.gives_way else None


# -- status ------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("job", shell_complete=all_jobs)
@click.option("--difference", is_flag=True, help="Only what its code differed from the commit by, as git shows it.")
@json_option
@address_option
def status(job: str, difference: bool, as_json: bool) -> None:
    """One job: its state, attempts and retry budgets, and which code it runs.

    \b
      iris-ray job status train-1a2b3c4d
      iris-ray job status train-1a2b3c4d --difference | git apply

    JOB is an id that `iris-ray ls --all` shows.
    """
    if (head := head_of_dashboard()) is not None:
        if difference:
            head.run(words_for_head())
        head.status(job, as_json)
        return
    with cluster():
        from iris_ray.dashboard.place import link_to

        found = ControllerConnection().ask(ControllerInterface.job_status, job)
        page, code = link_to(f"jobs/{job}"), code_of(job)
    if difference:
        print_output("" if code is None else code.difference)
    elif as_json:
        print_json(found)
    else:
        ran = None if code is None else f"{code}; sent {code.sent}"
        print_facts(_facts(found) | {"code": ran, "page": page})


def _facts(found: JobStatus) -> dict[str, object]:
    return {
        "job": found.job_id,
        "name": found.name if found.name != found.job_id else None,
        "user": found.user,
        "team": found.team,
        "group": f"{found.group}: {', '.join(found.group_jobs)}" if found.group else None,
        "state": state_in_words(found),
        "priority": found.priority.name.lower(),
        "type": found.device,
        "submitted": f"{duration(time.time() - found.submitted_at)} ago",
        "slices": ", ".join(found.groups),
        "tasks": ", ".join(f"{count} {state.value}" for state, count in found.tasks.items() if count),
        "attempt": found.attempt or "none yet",
        "says": found.how_far,
        "slow": "; ".join(found.stragglers),
        "heartbeat": f"{duration(time.time() - found.heartbeat_at)} ago" if found.heartbeat_at else None,
        "hangs after": found.stall_limit,
        "failures": f"{found.failures} (retries allowed: {found.max_retries_failure})",
        "preemptions": f"{found.preemptions} (retries allowed: {found.max_retries_preemption})",
        "evictions": found.evictions or None,
        "ends": f"in {duration(found.ends_at - time.time())} at the latest (max_runtime)" if found.ends_at else None,
        "gives way": gives_way(found),
        "last error": found.error,
        "waits because": found.waiting,
        "quota": found.about_team,
    }


# -- tasks -------------------------------------------------------------------------------------------------------------

_TASK_HEADERS = ("TASK", "STATE", "ATTEMPT", "RAN", "EXIT", "SLICE", "HOST", "ADDRESS", "ERROR")


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def tasks(job: str, as_json: bool) -> None:
    """The tasks of a job: their states and hosts, for how long each ran, and its exit code.

    With --json also the latest attempts of each task, when they began and ended, and how.

    \b
      iris-ray job tasks train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows.
    """
    with cluster():
        found = ControllerConnection().ask_all(ControllerInterface.list_tasks, job)
    if as_json:
        print_json(found)
        return
    print_table(_TASK_HEADERS, [_task_row(task) for task in found], "no tasks")


def _task_row(task: TaskStatus) -> tuple[object, ...]:
    ran = "-" if task.started_at is None else duration((task.ended_at or time.time()) - task.started_at)
    code = "-" if task.exit_code is None else task.exit_code
    where = task.group or "-", task.host or "-", task.address or "-"
    return task.task_index, task.state.value, task.attempt or "-", ran, code, *where, task.error or ""


# -- events ------------------------------------------------------------------------------------------------------------

_EVENT_HEADERS = ("WHEN", "AGO", "TASK", "ATTEMPT", "WHAT")


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option
@address_option
def events(job: str, as_json: bool) -> None:
    """What has happened to a job: its submission, its latest attempts and why each ended, its end.

    \b
      iris-ray job events train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows. Of a gang, the latest five attempts are known.
    """
    with cluster():
        found = ControllerConnection().ask(ControllerInterface.job_events, job)
    if as_json:
        print_json(found)
        return
    print_table(_EVENT_HEADERS, [_event_row(event) for event in found], "nothing has happened")


def _event_row(event: JobEvent) -> tuple[object, ...]:
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at))
    number = ("-" if number is None else number for number in (event.task_index, event.attempt))
    return when, duration(time.time() - event.at), *number, event.what


# -- why ---------------------------------------------------------------------------------------------------------------


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
        answer = {"answer": found.explanation, "waiting": waiting, "team": found.team, "about_team": found.about_team}
        print_json({"job_id": found.job_id, "state": found.state, **answer})
        return
    click.echo(one_line(found.explanation))
    if found.about_team is not None:
        click.echo(one_line(found.about_team))
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
        click.echo(f"\nIt gets: {', '.join(waiting.kept)}")
        for what in waiting.waits_for:
            click.echo(f"  waits for {one_line(what)}")


# -- cancel ------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@yes_option
@json_option
@address_option
def cancel(job: str, yes: bool, as_json: bool) -> None:
    """End a job, whether it waits or runs: your own, or any user's if you are an operator.

    \b
      iris-ray cancel train-1a2b3c4d

    JOB is an id that `iris-ray ls` shows. On a terminal the command asks first; Ctrl-C at that question leaves the job
    alone.
    """
    from iris_ray.client.connection import current_user

    if (head := head_of_dashboard()) is not None:
        head.cancel(job, yes, as_json)
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
