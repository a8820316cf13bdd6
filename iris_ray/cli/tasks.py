"""How commands are told a task: ``JOB/3`` or ``JOB 3``."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from iris_ray.cli.completion import Completion
from iris_ray.cli.options import typed

ALL_TASKS = "--all-tasks"
METAVAR = "JOB[/TASK]"
_TASK = re.compile(r"(.+)/(?:task-)?(\d{1,9})")


class TaskNumber(click.IntRange):
    """The number of a task."""

    note = (
        "Name a task as JOB/3 or as JOB 3. `iris-ray ls` lists jobs, and with --all also jobs that have ended;"
        " `iris-ray job tasks JOB` shows the tasks of a job."
    )

    def __init__(self) -> None:
        super().__init__(min=0)


class JobName(click.types.StringParamType):
    """The name of a job, perhaps with a task."""

    name = "text"
    note = TaskNumber.note

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value


def task_argument(complete: Completion) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command ``JOB[/TASK] [TASK]`` as its arguments ``job`` and ``task``.

    The command gets the number of the task as an int; None if there is none.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_task(job: str, task: int | None, **given: Any) -> Any:
            job, task = named(job, task)
            return command(job=job, task=task, **given)

        with_number = click.argument("task", metavar="[TASK]", type=TaskNumber(), required=False)(with_task)
        return click.argument("job", metavar=METAVAR, type=JobName(), shell_complete=complete)(with_number)

    return decorate


def named(job: str, task: int | None = None) -> tuple[str, int | None]:
    """Return the job and the task in ``JOB``, ``JOB/3`` or ``JOB/task-3``.

    Args:
        job: as given. A number at its end is a task: no job id that iris_ray makes ends so.
        task: the task, if it was given apart; then ``job`` is an id.
    """
    if task is None and (found := _TASK.fullmatch(job)):
        return found[1], int(found[2])
    return job, task


def named_before(job: str, words: Sequence[str]) -> tuple[str, int | None, tuple[str, ...]]:
    """Return the job, the task and the command in ``JOB 3 -- COMMAND``, where ``3`` may also be in the job's name.

    The words must be those of a `ScriptCommand`. After ``--`` everything belongs to the command.
    """
    after = typed()[typed().index("--") + 1 :] if "--" in typed() else ()
    is_apart = len(words) > len(after) and words[0].isdecimal() and len(words[0]) < 10
    job, task = named(job, int(words[0]) if is_apart else None)
    return job, task, tuple(words[1:] if is_apart else words)
