"""The directory that ``iris-ray run`` and ``submit`` send along: the one that is named, or the checkout they are in."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from iris_ray.cli.conventions import say_error
from iris_ray.dev.checkout import (
    CUT,
    WHOLE,
    Checkout,
    CodeRecord,
    SeparateIndex,
    is_unreadable,
    keep_record,
    sent_record,
)
from iris_ray.dev.code_directory import CodeDirectory, git_says, looks_secret, secrets_in_words
from iris_ray.errors import InvalidRequestError
from iris_ray.settings import CODE

OF_A_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it in a job of its API, whose directory is on the hosts already."""


@dataclass(frozen=True, slots=True)
class TravellingCode:
    """The code that travels with a job.

    Attributes:
        directory: is sent as it is, by Ray.
        checkout: the checkout of that directory, or of the current one; then it is sent itself.
        record: says which code that is, if it is known.
    """

    directory: str | None
    checkout: Checkout | None
    record: CodeRecord | None = None

    @staticmethod
    def of(working_dir: str | None) -> "TravellingCode":
        """Return the code that travels, given the directory that the user has named."""
        checkout = None
        if OF_A_RAY_JOB in os.environ:
            return TravellingCode(working_dir, None, sent_record())
        if working_dir is not None or CODE.read() is not False:
            try:
                checkout = Checkout.of(Path(working_dir or ".").absolute())
            except InvalidRequestError as error:
                if working_dir is None:
                    say_error(f"your checkout stays here, and only the script travels: {error}")
            if checkout is None and working_dir is None and is_unreadable(Path.cwd()):
                say_error("your checkout stays here, and only the script travels: git can't read it; see: git status")
        record = None if checkout is None else checkout.record
        if record is not None and working_dir is not None:
            record = record.of_whole_directory()
        return TravellingCode(working_dir, checkout, record)

    @property
    def path(self) -> Path:
        """The directory; the current one if no code travels."""
        return Path(self.directory or ".") if self.checkout is None else self.checkout.code.path

    @property
    def travels(self) -> bool:
        return self.directory is not None or self.checkout is not None

    @contextlib.contextmanager
    def for_ray(self) -> Iterator[dict[str, Any]]:
        """Yield the arguments of ``ray.init`` that send the code to the hosts, and print its size."""
        with contextlib.ExitStack() as packed:
            directory = self.directory
            if directory is not None:
                _say_secrets(Path(directory).absolute())
            elif self.checkout is not None:
                directory = str(packed.enter_context(self.checkout.code.package()))
                click.echo(f"iris-ray: sending {self.checkout.record}: {self.checkout.record.sent}", err=True)
            yield {} if directory is None else {"runtime_env": {"working_dir": directory}}

    def keep(self, job_id: str) -> None:
        """Keep which code a job has run; `iris-ray job status` shows it."""
        if self.record is not None:
            keep_record(job_id, self.record)


@contextlib.contextmanager
def restored(record: CodeRecord) -> Iterator[TravellingCode]:
    """Yield the code of a record in a temporary directory, from the clone that this process is in.

    Raises:
        InvalidRequestError: the clone does not have the commit, or the difference is not known whole.
    """
    instead = "or add --current-code, to send the code as it is here now"
    if CUT in record.difference:
        raise InvalidRequestError(
            f"the difference of the job's code is too large to be kept whole; check it out, {instead}"
        )
    here = Path.cwd()
    with SeparateIndex.of(here, record.commit) as index, tempfile.TemporaryDirectory(prefix="iris-ray-") as directory:
        if index is None:
            raise InvalidRequestError(
                f"the job ran commit {record.commit[:12]}, which {here} does not have; go to a clone of its repository,"
                f" git fetch, {instead}"
            )
        if record.difference and not _applied(index, record.difference):
            raise InvalidRequestError(
                "the difference of the job's code can't be applied to its commit, as when changed binary files were"
                f" too large to be kept; {instead}"
            )
        if index.git("checkout-index", "--all", "--quiet", f"--prefix={directory}/") is None:
            raise InvalidRequestError(
                f"git can't write the files of the job's code to {directory}, as on a full disk; make room, {instead}"
            )
        path = Path(directory, git_says(here, "rev-parse", "--show-prefix"))
        if not path.is_dir():
            raise InvalidRequestError(
                f"commit {record.commit[:12]} of the job has no {here}; go to where the job was submitted, {instead}"
            )
        if record.sent == WHOLE:
            say_error(
                "the job had all of its --working-dir. Its commit and difference are restored; files that git ignores,"
                " and files that look like secrets, are missing. --working-dir DIR sends a directory as it is now"
            )
            yield TravellingCode(str(path), None, record)
            return
        code = CodeDirectory.look(path, names=index.names())
        was, restored = (words.partition(";")[0] for words in (record.sent, code.in_words()))
        if was != restored:
            say_error(
                f"the job had {was}; restored are {restored}. Files of submodules and other checkouts within this one"
                f" are not recorded, and git may write some files with other line ends. Check the result, {instead}"
            )
        yield TravellingCode(None, Checkout(code, record), record)


def _applied(index: SeparateIndex, difference: str) -> bool:
    """Return whether a difference of the whole checkout could be applied to an index."""
    patch = index.own / "difference"
    patch.write_bytes(difference.encode(errors="surrogateescape"))
    top = Path(git_says(index.path, "rev-parse", "--show-toplevel"))
    return index.git("apply", "--cached", "--whitespace=nowarn", str(patch), path=top) is not None


def _say_secrets(directory: Path) -> None:
    """Name the files of a directory that look like secrets, and that Ray sends nonetheless."""
    from iris_ray.actors.calls.ray_internals import walk_package  # imports Ray

    names: list[str] = []

    def look(path: Path) -> None:
        if path.is_file() and looks_secret(name := str(path.relative_to(directory))):
            names.append(name)

    walk_package(directory, [], look)
    if names:
        say_error(secrets_in_words(names, travel=True))
