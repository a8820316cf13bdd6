"""``iris-ray cp``: copies files and directories to and from a task's host, whole or not at all.

``--output`` is the way to the files in ``$IRIS_OUTPUT_DIR``, which outlive the task: see `iris_ray.outputs`.

A copy is a tar stream through a session, as for ``exec``. Its receiver unpacks it beside the target, and renames it
when all of it has come: `SEND` and `RECEIVE` are programs for the task's Python that do so on the host.
"""

import os
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import GenericAlias
from typing import IO, TYPE_CHECKING, TypedDict

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.services import module_of
from iris_ray.cli.address import address_option, cluster, head_of_dashboard
from iris_ray.cli.conventions import FAILED, INTERRUPTED, OK, USAGE, say_error
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import print_json
from iris_ray.cli.streams import INPUT_BYTES, CtrlC, print_bytes, wait_for
from iris_ray.cli.tasks import named
from iris_ray.errors import InvalidRequestError
from iris_ray.sessions.core import CommandLine
from iris_ray.terminal import live_line

if TYPE_CHECKING:  # it imports Ray
    from iris_ray.sessions.client import TaskPlace

_PLACE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/-]*):(.+)", re.DOTALL)
NAME = "copied"
"""The name of what is copied within the tar stream."""

SEND = """\
import os, sys, tarfile
sys.excepthook = lambda kind, error, trace: print(f"iris-ray: {kind.__name__}: {error}", file=sys.stderr)
path = os.path.expanduser(sys.argv[1])
if not os.path.exists(path):
    print(f"iris-ray: there is no {path} on the task's host", file=sys.stderr)
    sys.exit(2)
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as stream:
    stream.add(os.path.realpath(path), "copied")
"""
RECEIVE = """\
import os, shutil, sys, tarfile, tempfile
sys.excepthook = lambda kind, error, trace: print(f"iris-ray: {kind.__name__}: {error}", file=sys.stderr)
target, name, size = os.path.expanduser(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def refuse(why):
    print(f"iris-ray: {why}", file=sys.stderr)
    sys.exit(2)
def judged(member, path):
    inner = member.replace(name=member.name.removeprefix("copied/"), deep=False)
    if member.islnk():
        inner.linkname = member.linkname.removeprefix("copied/")
    if member.name != "copied":  # a link to its parent would lead out of it at its target
        tarfile.data_filter(inner, os.path.join(path, "copied"))
    return tarfile.data_filter(member, path)
if os.path.isdir(target):
    target = os.path.join(target, name)
place = os.path.dirname(os.path.abspath(target))
if not os.path.isdir(place):
    refuse(f"there is no directory {place} on the task's host")
class Counted:
    read_bytes = 0
    def read(self, most):
        data = sys.stdin.buffer.read(most)
        self.read_bytes += len(data)
        return data
made = tempfile.mkdtemp(prefix=".iris-ray-cp-", dir=place)
try:
    counted = Counted()
    with tarfile.open(fileobj=counted, mode="r|") as stream:
        stream.extractall(made, filter=judged) if hasattr(tarfile, "data_filter") else stream.extractall(made)
    while counted.read(1 << 16):
        pass
    if counted.read_bytes != size:
        sys.exit("iris-ray: the copy was cut off; nothing was changed")
    copied = os.path.join(made, "copied")
    if os.path.isdir(target) or (os.path.isdir(copied) and os.path.lexists(target)):
        refuse(f"{target} exists on the task's host; remove it, or give another name")
    os.replace(copied, target)
    print(target)
finally:
    shutil.rmtree(made, ignore_errors=True)
"""


class Copied(TypedDict):
    """Something that was copied.

    Attributes:
        source, target: the source as it was given, and the path that was written.
        bytes: the size of the files.
    """

    source: str
    target: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TaskPath:
    """A path on the host of a task."""

    job: str
    task: int
    path: str

    @staticmethod
    def of(text: str) -> "TaskPath | None":
        """Return the place that ``JOB/3:PATH`` or ``JOB:PATH`` names; None if the text is a path here."""
        found = _PLACE.fullmatch(text)
        if found is None or text.startswith((".", "/")):
            return None
        job, task = named(found[1])
        return TaskPath(job, task or 0, found[2])


@click.command()
@click.argument("source")
@click.argument("target", required=False)
@click.option("--output", is_flag=True, help="SOURCE is in $IRIS_OUTPUT_DIR of a task, also after its end.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N",
              help="With --output: the attempt.  [default: the latest that has left files]")  # fmt: skip
@json_option(lambda: Copied | GenericAlias(list, module_of("outputs", "cli").OutputFile))
@address_option
def cp(source: str, target: str | None, output: bool, attempt: int | None, as_json: bool) -> None:
    """Copy a file or directory to or from the host of a running task, whole or not at all.

    \b
      iris-ray cp train-1a2b3c4d/3:/tmp/trace.json .       from the host of task 3
      iris-ray cp vocabulary.json train-1a2b3c4d:/tmp      to the host of task 0
      iris-ray cp train-1a2b3c4d:profiles ./profiles       a directory; paths are relative to the task's directory

    One of the two is JOB/TASK:PATH, or JOB:PATH for task 0. Write ./ before a local path that contains a colon. If the
    target is a directory, the copy goes into it under the name of the source. A file is replaced, a directory is not.
    If the source is a link, its target is copied. Links within a directory are copied as links; a directory with links
    that lead out of it is refused. Only the job's user and operators may do this.

    With --output, SOURCE names files that a task has written to $IRIS_OUTPUT_DIR, and the task may have ended:

    \b
      iris-ray cp --output train-1a2b3c4d                  lists those of the latest ten attempts of all tasks
      iris-ray cp --output train-1a2b3c4d/3:profiles       lists a directory of task 3
      iris-ray cp --output train-1a2b3c4d/3 ./of-task-3    copies all of task 3's latest attempt that has left any
      iris-ray cp --output train-1a2b3c4d/3:a.json -       writes a tar stream to stdout

    Such a copy leaves out links out of the directory, FIFOs, sockets, files that can't be opened, and files of more
    than 1 GiB that are mostly holes.
    """
    if attempt is not None and not output:
        raise click.UsageError("--attempt goes with --output.")
    if output:
        _of_output(source, target, attempt, as_json)
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    match TaskPath.of(source), TaskPath.of(target):
        case TaskPath() as there, None:
            name = os.path.basename(there.path.rstrip("/")) or there.job.replace("/", "-")
            send = partial(_run, there, ("python", "-c", SEND, there.path), None)
            written, size, _ = _fetch(there.path, name, Path(target), send)
        case None, TaskPath() as there:
            written, size = _send(Path(source), there)
        case _:
            raise click.UsageError("give one path on a task's host, as JOB/3:PATH, and one here.")
    _show(Copied(source=source, target=written, bytes=size), as_json)


def _of_output(source: str, target: str | None, attempt: int | None, as_json: bool) -> None:
    """List or copy files of ``$IRIS_OUTPUT_DIR``."""
    outputs = module_of("outputs", "cli")
    there = outputs.OutputPath.of(source)
    if target is None:
        outputs.show(there, attempt, as_json)
    elif target == outputs.STDOUT:
        outputs.send_to_stdout(there, attempt)
    else:
        send = partial(outputs.send, there, attempt)
        written, size, left_out = _fetch(source, there.name, Path(target), send, is_foreign=True)
        if left_out:
            say_error(f"{len(left_out):,} links out of the directory were left out, such as {left_out[0]!r}")
        _show(Copied(source=source, target=written, bytes=size), as_json)


def _show(copied: Copied, as_json: bool) -> None:
    if as_json:
        print_json(copied)
    else:
        click.echo(f"{copied['target']}: {copied['bytes']} bytes")


# -- from a host -------------------------------------------------------------------------------------------------------


def _fetch(
    source: str, name: str, target: Path, send: Callable[[IO[bytes]], int], is_foreign: bool = False
) -> tuple[str, int, list[str]]:
    """Copy from a host.

    Args:
        source: what is copied, for messages.
        name: its name in a directory.
        target: where it is to be.
        send: writes it as a tar stream to a file, and returns an exit code.
        is_foreign: whether links out of it are left out; otherwise they are an error.

    Returns:
        The path that was written, the size of its files, and the names of links that were left out.
    """
    target = target.expanduser()
    if target.is_dir():
        target = target / name
    if not target.absolute().parent.is_dir():
        raise InvalidRequestError(f"{target}: {target.absolute().parent} is not a directory")
    left_out: list[str] = []

    def judged(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        try:
            return _within(member, path)
        except tarfile.FilterError:
            if not is_foreign:
                raise
            left_out.append(member.name)
            return None

    place = target.absolute().parent
    with (
        tempfile.TemporaryDirectory(prefix=".iris-ray-cp-", dir=place) as made,
        tempfile.TemporaryFile(dir=place) as stream,
    ):
        code = send(stream)
        if code != OK:
            raise click.exceptions.Exit(code)
        stream.seek(0)
        try:
            with tarfile.open(fileobj=stream) as files:
                size = _size(files)
                files.extractall(made, filter=judged)
        except (tarfile.TarError, OSError) as error:
            raise InvalidRequestError(f"{source} can't be copied: {error}") from None
        copied = Path(made, NAME)
        if not os.path.lexists(copied):
            raise InvalidRequestError(
                f"{source} can't be copied: it has just gone, or it is a link out of the directory"
            )
        if target.is_dir() or (copied.is_dir() and os.path.lexists(target)):
            raise InvalidRequestError(f"{target} exists already; remove it, or give another name")
        os.replace(copied, target)
        return str(target), size, left_out


def _within(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
    """Return a member of a tar stream as it may be written in a directory.

    Raises:
        tarfile.FilterError: it would be outside of what is copied, or is a link out of it.
    """
    inner = member.replace(name=member.name.removeprefix(f"{NAME}/"), deep=False)
    if member.islnk():
        inner.linkname = member.linkname.removeprefix(f"{NAME}/")
    if member.name != NAME:  # a link to its parent would lead out of it at its target
        tarfile.data_filter(inner, os.path.join(path, NAME))
    return tarfile.data_filter(member, path)


# -- to a host ---------------------------------------------------------------------------------------------------------


def _send(source: Path, place: TaskPath) -> tuple[str, int]:
    """Copy to a host. Return the path that was written there, and the size of its files."""
    source = source.expanduser()
    if not source.exists():
        raise InvalidRequestError(f"there is no file or directory {source} here")
    with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as said:
        try:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as files:
                files.add(source.resolve(), NAME)
                copied = _size(files)
        except OSError as error:
            raise InvalidRequestError(f"{source} can't be read: {error.strerror or error}") from None
        length = packed.tell()
        packed.seek(0)
        name = source.name if source.name not in ("", "..") else source.resolve().name
        code = _run(place, ("python", "-c", RECEIVE, place.path, name, str(length)), packed, said)
        if code != OK:
            raise click.exceptions.Exit(code)
        said.seek(0)
        return said.read().decode(errors="replace").strip() or place.path, copied


def _size(files: tarfile.TarFile) -> int:
    return sum(one.size for one in files.getmembers() if one.isreg())


# -- the way -----------------------------------------------------------------------------------------------------------


def _run(place: TaskPath, words: Sequence[str], given: IO[bytes] | None, to: IO[bytes]) -> int:
    """Run a program on a task's host, with a file as its stdin and its stdout. Return its exit code."""
    if (head := head_of_dashboard()) is not None:
        there = ["exec", place.job, str(place.task), *(["--stdin"] if given is not None else []), "--", *words]
        return head.read(there, to, None if given is None else _pieces(given))
    with cluster():
        from iris_ray.sessions.client import locate

        controller = ControllerConnection()
        return wait_for(_beside(controller, locate(controller, place.job, place.task), words, given, to))


async def _beside(
    controller: ControllerConnection, place: "TaskPlace", words: Sequence[str], given: IO[bytes] | None, to: IO[bytes]
) -> int:
    from iris_ray.sessions.client import TaskSession, follow

    with CtrlC() as ctrl_c, live_line("iris-ray") as line:

        def show(data: bytes, is_err: bool) -> None:
            if is_err:
                print_bytes(data, True)
            else:
                to.write(data)
                line.show(f"{to.tell():,} bytes from {place.host}")

        line.show(f"copying to {place.host}" if given is not None else f"copying from {place.host}")
        async with TaskSession(controller, place) as session:
            channel = await session.run(CommandLine(tuple(words), takes_input=given is not None))
            ctrl_c.goes_to(channel)
            code = ctrl_c.judge(await follow(channel, show, None if given is None else _pieces(given)))
    return code if code in (OK, USAGE, INTERRUPTED) else FAILED


async def _pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    while data := file.read(INPUT_BYTES):
        yield data
