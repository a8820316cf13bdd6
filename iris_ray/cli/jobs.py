"""Commands about one job: ``status``, ``tasks``, ``events``, ``why``."""

import time
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.status import JobEvent, JobStatus, TaskStatus
from iris_ray.cli.address import address_option, cluster, head_of_dashboard, words_for_head
from iris_ray.cli.completion import all_jobs, unfinished_jobs
from iris_ray.cli.job_list import gives_way
from iris_ray.cli.output import ListForm, json_option, list_options
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

# -- status ------------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("job", shell_complete=all_jobs)
@click.option(
    "--difference",
    is_flag=True,
    help="Only its code's difference from the commit; a large one only names binary files.",
)
@json_option(lambda: JobStatus | module_of("remote", "ray_jobs").RayJobStatus)
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


def _ago(at: float | None) -> str | None:
    return None if at is None else f"{duration(time.time() - at)} ago"


def _facts(found: JobStatus) -> dict[str, object]:
    return {
        "job": found.job_id,
        "name": found.name if found.name != found.job_id else None,
        "user": found.user,
        "team": found.team,
        "group": f"{found.group}: {', '.join(found.group_jobs)}" if found.group else None,
        "state": state_in_words(found),
        "priority": found.priority.name.lower() + (f": {found.priority_reason}" if found.priority_reason else ""),
        "type": found.device,
        "submitted": _ago(found.submitted_at),
        "started": _ago(found.started_at),
        "ended": _ago(found.ended_at),
        "slices": ", ".join(found.groups),
        "tasks": ", ".join(f"{count} {state.value}" for state, count in found.tasks.items() if count),
        "attempt": found.attempt or "none yet",
        "says": found.how_far,
        "slow": "; ".join(found.stragglers),
        "heartbeat": _ago(found.heartbeat_at),
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
@list_options(list[TaskStatus], "tasks as JOB/NUMBER")
@address_option
def tasks(job: str, form: ListForm) -> None:
    """The tasks of a job: the state, host, run time and exit code of each.

    With --json also the latest attempts of each task, when they began and ended, and how. If a host runs several
    processes of a job, they share a line, such as 2-3 for the second host of two processes each; -q names the first.

    \b
      iris-ray job tasks train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows.
    """
    with cluster():
        found = ControllerConnection().ask_all(ControllerInterface.list_tasks, job)
    form.show(found, lambda task: f"{job}/{task.indices[0]}", _TASK_HEADERS, _task_row, "no tasks")


def _task_row(task: TaskStatus) -> tuple[object, ...]:
    ran = "-" if task.started_at is None else duration((task.ended_at or time.time()) - task.started_at)
    code = "-" if task.exit_code is None else task.exit_code
    where = task.group or "-", task.host or "-", task.address or "-"
    first, last = task.indices[0], task.indices[-1]
    index = first if first == last else f"{first}-{last}"
    return index, task.state.value, task.attempt or "-", ran, code, *where, task.error or ""


# -- events ------------------------------------------------------------------------------------------------------------

_EVENT_HEADERS = ("WHEN", "AGO", "TASK", "ATTEMPT", "WHAT")


@click.command()
@click.argument("job", shell_complete=all_jobs)
@json_option(list[JobEvent])
@address_option
def events(job: str, as_json: bool) -> None:
    """What has happened to a job: its submission, its latest attempts and why each ended, its end.

    \b
      iris-ray job events train-1a2b3c4d

    JOB is an id that `iris-ray ls --all` shows. Of each gang, the present attempt and the five before it are known. The
    latest 500 events are shown.
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


class Why(TypedDict):
    """Why a job waits.

    Attributes:
        job_id, state: of the job.
        answer: why it waits, or that it does not, in a sentence.
        waiting: the same as data; None if no part of it waits.
        team: the team for which it counts; empty for none.
        about_team: how the quota of that team stands, in a sentence; None without teams.
    """

    job_id: str
    state: JobState
    answer: str
    waiting: PendingReason | None
    team: str
    about_team: str | None


@click.command()
@click.argument("job", shell_complete=unfinished_jobs)
@json_option(Why)
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
        print_json(Why(job_id=found.job_id, state=found.state, answer=found.explanation, waiting=waiting,
                       team=found.team, about_team=found.about_team))  # fmt: skip
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
