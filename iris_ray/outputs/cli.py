"""``iris-ray cp --output``: lists and fetches what tasks have left in ``$IRIS_OUTPUT_DIR``."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.address import cluster, head_of_dashboard, words_for_head
from iris_ray.cli.conventions import OK, say_error
from iris_ray.cli.printing import duration, print_json, print_table
from iris_ray.cli.tasks import named
from iris_ray.terminal import live_line

if TYPE_CHECKING:  # it imports Ray
    from iris_ray.outputs.client import FoundOutput

STDOUT: Final = "-"
"""The target that stands for stdout, which gets a tar stream."""


class OutputFile(TypedDict):
    """A file in the output directory of an attempt.

    Attributes:
        task: the task's index.
        attempt: its attempt.
        path: relative to the output directory.
        bytes: the size of the file.
        changed_at: when it was changed last.
    """

    task: int
    attempt: int
    path: str
    bytes: int
    changed_at: float


@dataclass(frozen=True, slots=True)
class OutputPath:
    """A path in the output directories of a job.

    Attributes:
        job: the job.
        task: the task; None: all for a list, and task 0 for a copy.
        path: relative to the output directory; "": all of it.
    """

    job: str
    task: int | None
    path: str

    @staticmethod
    def of(text: str) -> "OutputPath":
        """Return the path that ``JOB``, ``JOB/3``, ``JOB:PATH`` or ``JOB/3:PATH`` names."""
        name, _, path = text.partition(":")
        return OutputPath(*named(name), path)

    @property
    def name(self) -> str:
        """What a copy in a directory is called."""
        return os.path.basename(self.path.rstrip("/")) or f"{self.job.replace('/', '-')}-task-{self.task or 0}"


def show(there: OutputPath, attempt: int | None, as_json: bool) -> None:
    """List the output files of a job's tasks."""
    if (head := head_of_dashboard()) is not None:
        head.run(words_for_head())
    with cluster():
        from iris_ray.outputs.client import JobOutputs

        with live_line("iris-ray") as line:
            line.show(f"asking the hosts of {there.job}")
            tasks = None if there.task is None else [there.task]
            found = JobOutputs(ControllerConnection(), there.job).find(tasks, attempt, there.path)
    files = [
        OutputFile(
            task=one.attempt.task_index,
            attempt=one.attempt.attempt,
            path=_shown(file.path),
            bytes=file.bytes,
            changed_at=file.changed_at,
        )
        for one in found
        for file in (one.listing.files if one.listing is not None else ())
    ]
    if as_json:
        print_json(files)
    else:
        now = time.time()
        rows = [
            [one["task"], one["attempt"], f"{one['bytes']:,}", duration(max(0.0, now - one["changed_at"])), one["path"]]
            for one in files
        ]
        print_table(["TASK", "ATTEMPT", "BYTES", "CHANGED BEFORE", "PATH"], rows, "no output files")
    _say_what_lacks(found)


def send(there: OutputPath, attempt: int | None, to: IO[bytes]) -> int:
    """Write a file or directory of a task as a tar stream to a file. Return an exit code."""
    if (head := head_of_dashboard()) is not None:
        words = ["cp", "--output", f"{there.job}/{there.task or 0}:{there.path}", STDOUT]
        return head.read([*words, *(["--attempt", str(attempt)] if attempt is not None else [])], to)
    with cluster():
        from iris_ray.outputs.client import JobOutputs

        with live_line("iris-ray") as line:
            line.show(f"asking the hosts of {there.job}")
            written = 0
            outputs = JobOutputs(ControllerConnection(), there.job)
            for piece in outputs.fetch(there.task or 0, attempt, there.path):
                to.write(piece)
                written += len(piece)
                line.show(f"{written:,} bytes")
            to.flush()
        if (left := outputs.left_out).count:
            say_error(f"{left.count:,} of its entries were left out, such as {left.first}")
    return OK


def send_to_stdout(there: OutputPath, attempt: int | None) -> None:
    """Write a file or directory of a task as a tar stream to stdout.

    Raises:
        click.UsageError: stdout is a terminal.
    """
    if sys.stdout.isatty():
        raise click.UsageError("a tar stream is not for a terminal; give a file or directory as the target.")
    if (code := send(there, attempt, sys.stdout.buffer)) != OK:
        raise click.exceptions.Exit(code)


def _say_what_lacks(found: "Sequence[FoundOutput]") -> None:
    for one in found:
        who = f"task {one.attempt.task_index}, attempt {one.attempt.attempt}"
        if one.why is not None:
            say_error(f"{who}: {one.why}")
        elif one.listing is not None:
            if (left := one.listing.count - len(one.listing.files)) > 0:
                say_error(f"{who}: {left:,} more files are not listed; name a directory, as in JOB/3:DIRECTORY")
            if (gone := one.listing.removed).files:
                say_error(
                    f"{who}: {gone.files:,} files, {gone.bytes >> 20:,} MB, were removed to stay within the cluster"
                    " setting task_output_gb and 100,000 files, or to leave a tenth of the disk free; the newest were"
                    " kept"
                )


def _shown(path: str) -> str:
    """Return a path as a terminal and JSON can show it, whatever bytes its name has."""
    text = os.fsencode(path).decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
