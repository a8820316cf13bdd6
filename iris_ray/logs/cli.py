"""``iris-ray logs``: what tasks have printed."""

import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.status import JobStatus
from iris_ray.cli.address import address_option, cluster, head_of_dashboard, words_for_head
from iris_ray.cli.completion import all_jobs
from iris_ray.cli.conventions import FAILED, say_error
from iris_ray.cli.ends import CONTROLLER_AWAY_S
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import print_json, print_output
from iris_ray.cli.tasks import ALL_TASKS, task_argument
from iris_ray.cli.times import Time
from iris_ray.logs.calls import LogCalls
from iris_ray.logs.core import LogPosition, TaskLog
from iris_ray.logs.stream import LogLine, stream_logs
from iris_ray.logs.times import timed_lines
from iris_ray.model.checks import unknown_number
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.terminal import LiveLine, printable

PIECE_BYTES = 1 << 20
_A_TIME = "2026-11-01T14:30:00+0000"
_FIRST_CAUSES = (TaskState.FAILED, TaskState.WORKER_FAILED)


class LogText(TypedDict):
    """The output of a task in one attempt.

    Attributes:
        job_id, task_index, attempt: whose output it is.
        latest_attempt: the number of the task's latest attempt.
        finished: whether the attempt has ended, so that no more will come.
        job_finished: whether the job has ended.
        from_host: whether it was read on the task's host, and not from a copy.
        note: a remark, such as that its beginning was removed; or None.
        text: the output; bytes that are not UTF-8 are escaped.
        times: with ``--timestamps``, when each line of the text came, in seconds since the epoch, or None if that is
            not known; without it, None.
    """

    job_id: str
    task_index: int
    attempt: int
    latest_attempt: int
    finished: bool
    job_finished: bool
    from_host: bool
    note: str | None
    text: str
    times: Sequence[float | None] | None


@click.command()
@task_argument(all_jobs)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Go on until the job is over, through further attempts; with --attempt, until that one ends.",
)
@click.option("--attempt", type=click.IntRange(min=1), metavar="N",
              help="This attempt.  [default: the latest; with --grep, the latest ten]")  # fmt: skip
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Begin with the last N lines.")
@click.option(ALL_TASKS, is_flag=True, help="All tasks, each line with its task before it.")
@click.option("--grep", "-e", "pattern", metavar="PATTERN", help="Only lines that match this regular expression.")
@click.option(
    "--context", "-C", type=click.IntRange(min=0, max=1000), metavar="N", help="With --grep: N lines around each."
)
@click.option("--since", type=Time(), help="Only what was printed since then.")
@click.option("--timestamps", "-t", is_flag=True, help="Print before each line when it was printed.")
@json_option(LogText)
@address_option
def logs(
    job: str,
    task: int | None,
    follow: bool,
    attempt: int | None,
    tail: int | None,
    all_tasks: bool,
    pattern: str | None,
    context: int | None,
    since: float | None,
    timestamps: bool,
    as_json: bool,
) -> None:
    """The output of a task, even after its end.

    \b
      iris-ray logs train-1a2b3c4d                of the task that failed first, or of task 0
      iris-ray logs train-1a2b3c4d 3 --tail 100   the last lines of task 3
      iris-ray logs train-1a2b3c4d 3 --since 10m --timestamps    its last ten minutes, each line with its time
      iris-ray logs -f train-1a2b3c4d             of all tasks, until the job is over
      iris-ray logs train-1a2b3c4d --all-tasks    of all tasks, what there is now
      iris-ray logs train-1a2b3c4d --grep "nan|Traceback" -C 3    searched on the hosts: all tasks, ten attempts

    The output of one task is printed as it is; that of several tasks, at a limited rate. While the job waits, -f says
    why. If the Controller goes away meanwhile, -f waits up to five minutes for the next one. Ctrl-C ends -f, and the
    job continues. --grep ends with code 1 if no line matches. Times are in the time zone of this machine. They may be a
    second early, and in a log file that is older than eight hours by more, such as 3 s after a day: docs/logs.md.
    """
    if pattern is None and context is not None:
        raise click.UsageError("--context is for --grep.")
    if pattern is not None and (follow or as_json or timestamps or tail is not None):
        raise click.UsageError("--grep goes without --follow, --tail, --timestamps and --json.")
    if since is not None and tail is not None:
        raise click.UsageError("give --since or --tail, not both.")
    if all_tasks and task is not None:
        raise click.UsageError("give TASK or --all-tasks, not both.")
    if as_json and (follow or all_tasks):
        raise click.UsageError("--json is for one task, without --follow.")
    if pattern is not None:
        _require_regular_expression(pattern)
    if (head := head_of_dashboard()) is not None:
        if as_json or all_tasks or timestamps or any(one is not None for one in (task, attempt, tail, pattern, since)):
            head.run(words_for_head())  # jobs of Ray's job API have no tasks
        head.logs(job, follow)
        return
    with cluster(), _connection(patient=follow) as controller:
        status = controller.ask(ControllerInterface.job_status, job)
        if pattern is not None:
            _grep(controller, status, task, attempt, pattern, context or 0, since)
            return
        if task is None and not all_tasks:
            several = sum(status.tasks.values()) * status.processes_per_host > 1
            task = None if follow and several else _most_telling(controller, status)
        first = LogPosition(attempt, tail_lines=tail, since=since, with_times=timestamps)
        if as_json:
            _print_as_json(list(_pieces(controller, job, task or 0, first)), timestamps)
        elif task is not None and not follow and not timestamps:
            _print_pieces(_pieces(controller, job, task, first))
        else:
            from iris_ray.logs.client import host_logs  # imports Ray

            with host_logs(controller) as source:
                for line in stream_logs(source, job, task, first, follow=follow):
                    _show(line, prefixed=task is None, timed=timestamps)


@contextmanager
def _connection(patient: bool) -> Iterator[ControllerConnection]:
    """Yield the connection to the Controller; in a patient block, it waits for a missing one, and says so."""
    controller = ControllerConnection()
    with controller.waiting(CONTROLLER_AWAY_S, _say) if patient else nullcontext():
        yield controller


def follow_job(controller: ControllerConnection, job: str, live: LiveLine) -> None:
    """Print the output of all tasks of a job, from its first attempt to the job's end."""
    from iris_ray.logs.client import host_logs  # imports Ray

    with host_logs(controller) as source:
        for line in stream_logs(source, job, every_attempt=True, live=live):
            _show(line, prefixed=True)


def _most_telling(controller: ControllerConnection, status: JobStatus) -> int:
    if status.state in (JobState.FAILED, JobState.WORKER_FAILED):
        tasks = controller.ask_all(ControllerInterface.list_tasks, status.job_id)
        failed = [task for task in tasks if task.state in _FIRST_CAUSES]
        first = min(failed, key=lambda task: math.inf if task.ended_at is None else task.ended_at, default=None)
        return 0 if first is None else first.indices[0]
    return 0


def _pieces(controller: ControllerConnection, job: str, task: int, first: LogPosition) -> Iterator[TaskLog]:
    """Yield all output that exists now, from a position on."""

    def piece_at(position: LogPosition) -> TaskLog:
        log = controller.ask(LogCalls.fetch_task_logs, job, task, position, PIECE_BYTES)
        return log.without_half_character

    piece = piece_at(first)
    end = piece.end
    yield piece
    while piece.next_offset < end and piece.data:
        piece = piece_at(LogPosition(piece.attempt, piece.next_offset, with_times=first.with_times))
        yield piece


def _require_regular_expression(pattern: str) -> None:
    try:
        re.compile(pattern.encode())
    except (re.error, UnicodeEncodeError) as error:
        raise click.UsageError(f"--grep {pattern!r} is not a regular expression of Python's: {error}.") from None


def _grep(
    controller: ControllerConnection,
    status: JobStatus,
    task: int | None,
    attempt: int | None,
    pattern: str,
    context: int,
    since: float | None,
) -> None:
    """Print the lines that match, each with its task before it."""
    from iris_ray.logs.client import host_logs  # imports Ray
    from iris_ray.logs.search import LogSearch

    count = sum(status.tasks.values()) * status.processes_per_host
    if task is not None and task not in range(count):
        raise unknown_number(f"task of {status.job_id}", task, range(count))
    with host_logs(controller) as source:
        tasks = range(count) if task is None else [task]
        searched = source.search(status.job_id, tasks, attempt, LogSearch(pattern, context, since))
    matches, printed = 0, False
    for one in searched:
        log, found = one.log, one.found
        who = f"task-{log.task_index}" + (f".attempt-{log.attempt}" if log.latest_attempt > 1 else "")
        if one.note:
            _say(f"{who}: {one.note}")
        for lines in found.groups if found is not None else ():
            if context and printed:
                print_output(b"--\n")
            print_output(b"".join(f"{who}| ".encode() + line + b"\n" for line in lines))
            printed = True
        if found is not None:
            matches += found.matches
            if found.cut:
                _say(f"{who}: more lines match, and were left out; search for less")
    if not matches:
        raise click.exceptions.Exit(FAILED)


def _print_as_json(pieces: Sequence[TaskLog], timed: bool) -> None:
    first, last = pieces[0], pieces[-1]
    fields = ("job_id", "task_index", "attempt", "latest_attempt", "finished", "job_finished", "from_host")
    facts = {name: getattr(last, name) for name in fields}
    text = b"".join(piece.data for piece in pieces).decode(errors="backslashreplace")
    times = [at for at, _ in timed_lines(part for piece in pieces for part in piece.timed_parts)] if timed else None
    print_json({**facts, "note": first.note, "text": text, "times": times})


def _print_pieces(pieces: Iterable[TaskLog]) -> None:
    for piece in pieces:
        if piece.note:
            _say(piece.note)
        print_output(piece.data)


def _show(line: LogLine, prefixed: bool, timed: bool = False) -> None:
    """Print a line of a task to stdout, or a note about it to stderr.

    Args:
        line: the line.
        prefixed: whether its task stands before it.
        timed: whether its time stands before it.
    """
    if line.note:
        whose = f"task {line.task_index}: " if prefixed and line.task_index is not None else ""
        _say(whose + printable(line.data))
        return
    before = f"task-{line.task_index}| " if prefixed else ""
    if timed:
        at = "-" if line.time is None else time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(line.time))
        before += f"{at:{len(_A_TIME)}} "
    print_output(before.encode() + line.data + b"\n")


def _say(note: str) -> None:
    sys.stdout.flush()
    say_error(note)
