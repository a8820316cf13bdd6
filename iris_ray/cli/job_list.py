"""``iris-ray ls``: the jobs of all users, once or as a picture that follows them."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.cli.address import address_option, cluster, dashboard_address
from iris_ray.cli.options import tpu_option
from iris_ray.cli.output import ListForm, list_options
from iris_ray.cli.printing import counted, duration, format_table, state_in_words, terminal_width
from iris_ray.errors import ControllerUnavailableError
from iris_ray.model.lifecycle import JobState
from iris_ray.model.topology import get_tpu_config

HEADERS: tuple[str, ...] = ("JOB", "USER", "STATE", "TYPE", "SLICES", "ATTEMPT", "AGE", "NOTE")
WATCH_S = 2.0
_STATES = [state.value for state in JobState]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are listed.

    Attributes:
        finished: whether jobs that have ended are.
        user, team, tpu_type: only jobs of this user, team and type; None: all.
        states: only jobs in these states; empty: all.
        limit: only this number of jobs, the latest; None: all.
    """

    finished: bool
    user: str | None
    team: str | None
    tpu_type: str | None
    states: tuple[str, ...]
    limit: int | None

    def of(self, jobs: Sequence[JobStatus]) -> list[JobStatus]:
        found = [job for job in jobs if self._takes(job)]
        return found if self.limit is None else found[max(0, len(found) - self.limit) :]

    def _takes(self, job: JobStatus) -> bool:
        in_state = job.state.value in self.states if self.states else self.finished or not job.state.finished
        in_team = self.team is None or f"{job.team}/".startswith(f"{self.team}/")
        return in_state and in_team and self.user in (None, job.user) and self.tpu_type in (None, job.device)

    def none(self, jobs: int) -> str:
        """Return what a person is told if no job is listed, out of this number."""
        kind = f"{' or '.join(self.states)} " if self.states else "" if self.finished else "unfinished "
        which = f" of {self.user}" if self.user else ""
        which += f" in team {self.team}" if self.team else ""
        which += f" on {self.tpu_type}" if self.tpu_type else ""
        return f"no {kind}jobs{which}" + (f"; {counted(jobs, 'other')} (--all)" if jobs and not self.finished else "")


@click.command()
@click.option("--all", "-a", "finished", is_flag=True, help="Finished jobs as well.")
@click.option("--user", metavar="NAME", help="Only the jobs of this user.")
@click.option("--team", metavar="NAME", help="Only the jobs of this team and its parts.")
@tpu_option("Only jobs on slices of this type.")
@click.option("--state", "states", type=click.Choice(_STATES, case_sensitive=False), multiple=True,
              help="Only jobs in this state, finished ones too; repeatable.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the latest N of them.")
@click.option("--watch", "-w", is_flag=True,
              help="Refresh the list every two seconds, or less often on a large cluster, until Ctrl-C. On a node of"
              " the cluster only.")  # fmt: skip
@list_options(list[JobStatus], "jobs' ids")
@address_option
def ls(
    finished: bool,
    user: str | None,
    team: str | None,
    tpu_type: str | None,
    states: tuple[str, ...],
    limit: int | None,
    watch: bool,
    form: ListForm,
) -> None:
    """Jobs of all users: what runs, what waits, and why.

    \b
      iris-ray ls
      iris-ray ls --all --user ann --limit 20
      iris-ray ls --state failed --state worker_failed --team research
      iris-ray ls --watch
    """
    chosen = Filter(finished, user, team, tpu_type and get_tpu_config(tpu_type).name, states, limit)
    if watch and not (form.is_table and sys.stdout is not None and sys.stdout.isatty()):
        raise click.UsageError("--watch is for a terminal; scripts wait with `iris-ray wait JOB`.")
    if watch and (url := dashboard_address()) is not None:
        raise click.UsageError(
            "--watch works on a node of the cluster only, not at the address of a dashboard; let your shell repeat the"
            f" list instead (watch -n 10 iris-ray ls --address {url})"
        )
    with cluster():
        controller = ControllerConnection()
        if watch:
            _watch(controller, chosen)
        jobs = controller.ask_all(ControllerInterface.list_jobs)
        aside = controller.ask(ControllerInterface.about).get("set_aside", ())
    shown = chosen.of(jobs)
    headers, rows = table_of(shown)
    form.show(shown, attrgetter("job_id"), headers, lambda job: rows[job.job_id], chosen.none(len(jobs)))
    if aside and form.is_table:
        some = ", ".join(one.name for one in aside[:4]) + (", …" if aside[4:] else "")
        click.echo(f"\nset aside, for they could not be handled: {some} (why: iris-ray doctor)")


def table_of(jobs: Sequence[JobStatus]) -> tuple[Sequence[str], dict[str, tuple[object, ...]]]:
    """Return the headers of a table of jobs, and its rows by job id. Columns without any value are left out."""
    columns = {"TEAM": attrgetter("team"), "GROUP": attrgetter("group")}
    more = {header: read for header, read in columns.items() if any(map(read, jobs))}
    rows = {}
    for job in jobs:
        cells = listed(job)
        rows[job.job_id] = *cells[:2], *(read(job) or "-" for read in more.values()), *cells[2:]
    return (*HEADERS[:2], *more, *HEADERS[2:]), rows


def listed(job: JobStatus) -> tuple[object, ...]:
    """Return the row of a job."""
    state, slices = state_in_words(job), job.groups or "-"
    age = duration(time.time() - job.submitted_at)
    note = gives_way(job) or job.waiting or (job.state is JobState.RUNNING and job.how_far) or job.error or ""
    return job.job_id, job.user, state, job.device or "-", slices, job.attempt or "-", age, note


def gives_way(job: JobStatus) -> str | None:
    """Return why and within which time a job leaves its hosts; None if it stays."""
    return f"{job.gives_way[0]} within {max(0.0, job.gives_way[1] - time.time()):.0f} s" if job.gives_way else None


def _watch(controller: ControllerConnection, chosen: Filter) -> None:
    """Draw the table on the whole terminal again and again; the latest jobs stay visible. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            pause, asked = WATCH_S, time.monotonic()
            try:
                jobs = controller.ask_all(ControllerInterface.list_jobs)
                shown = chosen.of(jobs)
                headers, rows = table_of(shown)
                body = format_table(headers, list(rows.values()), terminal_width()) if shown else chosen.none(len(jobs))
                pause = max(WATCH_S, 5 * (time.monotonic() - asked))  # a large cluster answers slowly: ask it less
            except ControllerUnavailableError as error:  # its successor will know
                body = str(error)
            lines = body.splitlines()
            room = max(1, console.height - 3)
            cut = f"  {len(lines) - room} lines above are not shown (--limit)" if len(lines) > room else ""
            lines = lines[:1] + lines[1:][-(room - 1) :] if cut else lines
            live.update(
                Text("\n".join([f"{time.strftime('%H:%M:%S')}  Ctrl-C ends this{cut}", "", *lines])), refresh=True
            )
            time.sleep(pause)
