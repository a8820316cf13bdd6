"""``iris-ray wait`` and ``cancel``: the ends of jobs."""

import math
import time
from collections.abc import Sequence
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.cli.address import address_option, cluster, head_of_dashboard
from iris_ray.cli.completion import unfinished_jobs
from iris_ray.cli.conventions import FAILED, OK, TIMED_OUT, confirm, say_error
from iris_ray.cli.options import yes_option
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import counted, one_line, print_json, state_in_words
from iris_ray.cli.times import Duration
from iris_ray.errors import ControllerUnavailableError
from iris_ray.model.durations import written_duration
from iris_ray.model.lifecycle import JobState
from iris_ray.terminal import live_line

LOOK_S = 0.5
CONTROLLER_AWAY_S = 300.0
"""How long the Controller may be away before commands that wait for the end of a job give up.

Jobs run on meanwhile, and a successor knows them.
"""
_NAMED = 5


# -- wait --------------------------------------------------------------------------------------------------------------


class JobEnd(TypedDict):
    """A job that was waited for.

    Attributes:
        job_id, state: of the job.
        finished: whether it has ended.
        error: why the job, or its latest attempt that ended, ended; None if the job succeeded, or no attempt has ended.
    """

    job_id: str
    state: JobState
    finished: bool
    error: str | None


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=unfinished_jobs)
@click.option("--any", "first", is_flag=True, help="Until the first of them has ended, instead of all.")
@click.option("--timeout", type=Duration(), help="Wait for this time at most; then the exit code is 124.")
@json_option(list[JobEnd])
@address_option
def wait(jobs: tuple[str, ...], first: bool, timeout: float | None, as_json: bool) -> None:
    """Wait until jobs have ended. The exit code tells how: 0 if all succeeded, 1 if one did not, 124 after --timeout.

    \b
      iris-ray wait prepare-1a2b3c4d train-5e6f7a8b
      iris-ray wait train-5e6f7a8b --timeout 12h
      iris-ray wait --any train-5e6f7a8b train-9c0d1e2f

    With --any, only jobs that have ended count. Ctrl-C ends the wait, and the jobs continue. If the Controller goes
    away meanwhile, the command waits up to five minutes for the next one.
    """
    with cluster():
        over, ends = _wait(ControllerConnection(), list(dict.fromkeys(jobs)), first, timeout)
    if as_json:
        print_json([JobEnd(job_id=one.job_id, state=one.state, finished=one.state.finished,
                           error=None if one.state is JobState.SUCCEEDED else one.error) for one in ends])  # fmt: skip
    for one in [] if as_json else ends:
        because = f": {one_line(one.error)}" if one.error and one.state is not JobState.SUCCEEDED else ""
        click.echo(f"{one.job_id}: {state_in_words(one)}{because}")
    if not over:
        say_error(f"not over after {written_duration(timeout or 0.0)}; the jobs go on")
        raise click.exceptions.Exit(TIMED_OUT)
    failed = any(one.state.finished and one.state is not JobState.SUCCEEDED for one in ends)
    raise click.exceptions.Exit(FAILED if failed else OK)


def _wait(
    controller: ControllerConnection, jobs: Sequence[str], first: bool, timeout: float | None
) -> tuple[bool, list[JobStatus]]:
    """Wait for the end of jobs. Return whether it has come, and how they stand, in their order."""
    until = math.inf if timeout is None else time.monotonic() + timeout

    def look(at: Sequence[str]) -> dict[str, JobStatus]:
        with controller.waiting(min(CONTROLLER_AWAY_S, until - time.monotonic()), say_error):
            return {job: controller.ask(ControllerInterface.job_status, job) for job in at}

    found = look(jobs)
    with live_line("iris-ray") as line:
        while True:
            left = [job for job, status in found.items() if not status.state.finished]
            if not left or (first and len(left) < len(found)):
                return True, list(found.values())
            if (rest := until - time.monotonic()) <= 0:
                return False, list(found.values())
            line.show(f"waiting for {_some(left)}{f': {_in_words(found[left[0]])}' if len(left) == 1 else ''}")
            time.sleep(min(LOOK_S, rest))
            try:
                found |= look(left)
            except ControllerUnavailableError:
                if time.monotonic() < until:
                    raise


def _in_words(status: JobStatus) -> str:
    from iris_ray.client.job_progress import job_in_words  # imports Ray

    return job_in_words(status)


def _some(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:_NAMED]) + (f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else "")


# -- cancel ------------------------------------------------------------------------------------------------------------


class Cancelled(TypedDict):
    """A job that the command was to end.

    Attributes:
        job_id: its id.
        cancelled: whether the command has ended it; false if it had already ended.
        state_before: its state before, such as ``RUNNING``; ``STARTING`` if it had hosts and no task ran yet.
    """

    job_id: str
    cancelled: bool
    state_before: str


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=unfinished_jobs)
@yes_option
@json_option(list[Cancelled])
@address_option
def cancel(jobs: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """End jobs, whether they wait or run: your own, or any user's if you are an operator.

    \b
      iris-ray cancel train-1a2b3c4d
      iris-ray ls -q --user ann --state pending | xargs iris-ray cancel --yes

    On a terminal the command asks once; Ctrl-C at that question cancels nothing. If one of the ids is unknown,
    or one of the jobs is not yours to cancel, nothing is cancelled. If the cluster names no operators, everybody is
    one. At the address of a dashboard, JOB may also be a job of Ray's job API.
    """
    wanted = list(dict.fromkeys(jobs))
    if (head := head_of_dashboard()) is not None:
        head.cancel(wanted, yes, as_json)
        return
    with cluster():
        done = _cancel(ControllerConnection(), wanted, yes)
    if as_json:
        print_json(done)
    for one in [] if as_json else done:
        if one["cancelled"]:
            click.echo(f"{one['job_id']} is cancelled; it was {one['state_before'].lower()}")
        else:
            click.echo(f"{one['job_id']} had already ended: {one['state_before'].lower()}")


def _cancel(controller: ControllerConnection, jobs: Sequence[str], yes: bool) -> list[Cancelled]:
    from iris_ray.client.connection import current_user

    user = current_user()
    found = [controller.ask(ControllerInterface.job_status, job) for job in jobs]
    running = [status for status in found if not status.state.finished]
    for one in running:
        controller.ask(ControllerInterface.require_own, one.job_id, user, "cancel it")  # all, before one is cancelled
    if running:
        confirm(_question(running), yes)
    before = {one.job_id: controller.ask(ControllerInterface.cancel, one.job_id, f"cancelled by {user}", user)
              for one in running}  # fmt: skip
    # one that was killed meanwhile has ended with another one of them, as jobs of a group do
    ended = {job_id: one for job_id, one in before.items() if one.state is not JobState.KILLED}
    statuses = [ended.get(one.job_id, one) for one in found]
    return [Cancelled(job_id=one.job_id, cancelled=not one.state.finished,
                      state_before="STARTING" if one.starting else one.state.name) for one in statuses]  # fmt: skip


def _question(jobs: Sequence[JobStatus]) -> str:
    if len(jobs) == 1:
        (one,) = jobs
        where = f" on {', '.join(one.groups)}" if one.groups else ""
        return f"Cancel {one.job_id} of {one.user}, {state_in_words(one)}{where}?"
    users = ", ".join(sorted({one.user for one in jobs}))
    return f"Cancel {counted(len(jobs), 'job')} of {users}: {_some([one.job_id for one in jobs])}?"
