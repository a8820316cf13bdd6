"""Finds evidence on a host, and writes it to the output directory of the task's attempt.

`stacks.txt` has the stacks of all threads of all processes of the task, `output.txt` the last lines of its output and
those of the runtime before them, `libtpu.txt` the end of libtpu's own logs, `core-dumps.txt` the path and size of each
core dump, and `chips.jsonl` the use of the chips in the minutes before.
"""

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from iris_ray.actors.protocol.services import module_of
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InspectionFailedError, IrisError, ServiceUnavailableError
from iris_ray.evidence.core import (
    CHIPS,
    DUMPS,
    FOLDER,
    LIBTPU,
    OUTPUT,
    STACKS,
    CoreDump,
    crash_in_words,
    dump_directories,
    evidence_lines,
    is_dump,
    is_log_of_libtpu,
    names_process,
)
from iris_ray.evidence.dumps import MOST_REMEMBERED, remember
from iris_ray.masking import masked, secret_values
from iris_ray.model.lifecycle import TaskAttemptId

TPU_LOG_DIR: Final = "TPU_LOG_DIR"
"""libtpu's variable for the directory of its logs."""
TPU_LOGS: Final = "/tmp/tpu_logs"
CORE_PATTERN, CORE_USES_PID = Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/kernel/core_uses_pid")
MOST_PROCESSES: Final = 16
"""The limit for the processes of a task whose stacks are kept."""
MOST_LOGS, MOST_DUMPS = 8, 20
"""The limits for the logs of libtpu that are kept, and for the core dumps that are named; the newest are."""
MOST_NAMES: Final = 200_000
"""The limit for the names of a directory that are looked at."""
OUTPUT_BYTES, LOG_BYTES, STACKS_BYTES = 4 << 20, 256 << 10, 1 << 20
"""The limits for what is read of a task's output, of each log and of the stacks of a process; bytes."""
STACKS_S, ALL_STACKS_S = 3.0, 5.0
"""The time for py-spy to read the stacks of one process, and of all."""
EARLIER_S: Final = 60.0
"""Files that were changed longer than this before the task began belong to an earlier process of the same number."""
CONNECT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process leaves files.

    Attributes:
        directory: its working directory; None if it is not known.
        tpu_logs: the directory of libtpu's logs.
        secrets: the values of its variables that are named like a secret.
    """

    directory: str | None
    tpu_logs: str
    secrets: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @staticmethod
    def of(environ: Mapping[str, str], directory: str | None = None) -> "Place":
        tpu_logs = os.path.join(directory or "", environ.get(TPU_LOG_DIR) or TPU_LOGS)
        return Place(directory, tpu_logs, secret_values(environ))


@dataclass(frozen=True, slots=True)
class ChipSample:
    """The use of the chips of a host at one moment.

    Attributes:
        at: the time, in seconds since the epoch.
        chips: a `ChipUse` of each, as plain values.
    """

    at: float
    chips: Sequence[Mapping[str, Any]]


def keep_hang(
    host_directory: Path,
    attempt: TaskAttemptId,
    pids: Sequence[int],
    began_at: float,
    place: Place,
    samples: Iterable[ChipSample],
) -> None:
    """Write the evidence of a task that hangs. Where something can't be had, its file says why.

    Args:
        host_directory: iris_ray's directory on the host.
        attempt: of the task.
        pids: its processes, its own first.
        began_at: when it began, in seconds since the epoch.
        place: where it leaves files.
        samples: of its chips, the oldest first.

    Raises:
        ServiceUnavailableError: there is no service ``outputs``.
        OSError: the disk is full, or something else has these names.
    """
    _write(
        host_directory,
        attempt,
        {  # the stacks last: they take the longest
            CHIPS: lambda: "".join(f"{json.dumps(asdict(one))}\n" for one in samples),
            OUTPUT: lambda: _output(host_directory, attempt),
            LIBTPU: lambda: _tails(libtpu_logs(place, pids, began_at)),
            STACKS: lambda: _stacks(host_directory, pids[:MOST_PROCESSES]),
        },
        place.secrets,
    )


def keep_crash(
    host_directory: Path, attempt: TaskAttemptId, pids: Collection[int], began_at: float, place: Place
) -> str:
    """Write the evidence of a task that has crashed, if libtpu or the kernel has left any.

    Args:
        host_directory, attempt, pids, began_at, place: as for `keep_hang`.

    Returns:
        What people are told of it; "" if there is none.
    """
    logs, dumps = libtpu_logs(place, pids, began_at), core_dumps(place, pids, began_at)
    if not (logs or dumps):
        return ""
    if names_process(*_core_pattern()):  # else they may be those of another program
        remember(host_directory, [one.path for one in dumps[-MOST_REMEMBERED:]])
    dumps = dumps[-MOST_DUMPS:]
    parts = {
        LIBTPU: lambda: _tails(logs),
        DUMPS: lambda: "".join(f"{one.bytes:>16,} bytes  {one.path!r}\n" for one in dumps),
    }
    try:
        _write(host_directory, attempt, parts, place.secrets)
    except (OSError, ServiceUnavailableError):
        return crash_in_words(attempt, bool(logs), dumps, are_kept=False)
    return crash_in_words(attempt, bool(logs), dumps, are_kept=True)


def libtpu_logs(place: Place, pids: Collection[int], began_at: float) -> list[Path]:
    """Return the logs that libtpu has written in these processes, the oldest first."""
    found = _files(place.tpu_logs, lambda name: is_log_of_libtpu(name, pids), began_at)
    return [path for _, path, _ in sorted(found)[-MOST_LOGS:]]


def core_dumps(place: Place, pids: Collection[int], began_at: float) -> list[CoreDump]:
    """Return the core dumps of these processes, the oldest first."""
    pattern, uses_pid = _core_pattern()
    found = [
        one
        for directory in dump_directories(pattern, place.directory)
        for one in _files(directory, lambda name: is_dump(name, pids, pattern, uses_pid), began_at)
    ]
    return [CoreDump(str(path), size) for _, path, size in sorted(found)]


def _core_pattern() -> tuple[str, bool]:
    """Return the kernel's `core_pattern` and whether it adds the process's number; "" if that can't be read."""
    try:
        return CORE_PATTERN.read_text().strip(), CORE_USES_PID.read_text().strip() != "0"
    except OSError:
        return "", False


def _files(directory: str, is_one: Callable[[str], bool], began_at: float) -> Iterator[tuple[float, Path, int]]:
    """Yield time, path and size of the files of a directory that were changed since a task began."""
    with contextlib.suppress(OSError), os.scandir(directory) as names:
        for number, one in enumerate(names):
            if number == MOST_NAMES:
                return
            if is_one(one.name):
                with contextlib.suppress(OSError):
                    found = one.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and found.st_mtime >= began_at - EARLIER_S:
                        yield found.st_mtime, Path(one.path), found.st_size


# -- what is written ---------------------------------------------------------------------------------------------------


def _write(
    host_directory: Path, attempt: TaskAttemptId, parts: Mapping[str, Callable[[], str]], secrets: Sequence[str]
) -> None:
    outputs = module_of("outputs", "directory")
    directory = outputs.OutputDirectory.of(outputs.outputs_directory(host_directory), attempt)
    directory.create()
    for name, content in parts.items():
        try:
            text = content()
        except (IrisError, OSError) as error:
            text = f"iris_ray could not get this: {error}\n"
        if text:
            directory.write(FOLDER, name, masked(text, secrets).encode(errors="backslashreplace"))


def _stacks(host_directory: Path, pids: Iterable[int]) -> str:
    found: list[str] = []
    deadline = time.monotonic() + ALL_STACKS_S
    for pid in pids:
        try:  # without stopping it: it makes no progress, and a stopped process could not be stopped once more
            left_s = min(STACKS_S, deadline - time.monotonic())
            if left_s <= 0:
                raise InspectionFailedError(f"no time was left within {ALL_STACKS_S:g} s")
            py_spy = module_of("inspection", "host").py_spy
            found.append(py_spy(["dump", "--nonblocking", "--pid", str(pid)], left_s)[:STACKS_BYTES])
        except (InspectionFailedError, ServiceUnavailableError) as error:
            told = "" if found else _end_of(TaskFiles.of_process(host_directory, pid).stacks, STACKS_BYTES)
            found.append(f"Process {pid}: {error}" + (f"\nIt has written itself:\n{told}" if told else ""))
    return "\n\n".join(found) + "\n"


def _output(host_directory: Path, attempt: TaskAttemptId) -> str:
    logs = module_of("logs", "files")
    log = logs.AttemptLog(logs.logs_directory(host_directory), *attempt)
    if (last := log.tail(0, 0)) is None:
        return ""
    piece = log.read(last.end - OUTPUT_BYTES, OUTPUT_BYTES)
    return evidence_lines(_whole_lines(piece.data, is_cut=piece.offset > 0)).decode(errors="replace")


def _tails(logs: Iterable[Path]) -> str:
    return "\n".join(f"==> {path} <==\n{_end_of(path, LOG_BYTES)}" for path in logs)


def _end_of(path: Path, most_bytes: int) -> str:
    """Return the last lines of a regular file; "" if it can't be read."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                begin = max(0, file.seek(0, os.SEEK_END) - most_bytes)
                file.seek(begin)
                return _whole_lines(file.read(most_bytes), is_cut=begin > 0).decode(errors="replace")
    return ""


def _whole_lines(data: bytes, is_cut: bool) -> bytes:
    """Leave out the first line if its begin is cut off: it may be a secret whose name is not there."""
    return b"(what was before is left out)\n" + data.partition(b"\n")[2] if is_cut else data


# -- what is remembered of tasks that run ------------------------------------------------------------------------------


def place_of(pid: int) -> Place | None:
    """Return where the process of a task leaves files; None if it keeps no copy of its variables."""
    with contextlib.suppress(IrisError):
        found = module_of("sessions", "surroundings").Surroundings.of_process(pid)
        return Place.of(found.environ, found.directory)
    return None


def look_at(pids: Iterable[int], now: float) -> tuple[dict[int, Place], ChipSample | None]:
    """Return where tasks with chips leave files, and the use of their chips; None if libtpu does not tell.

    Args:
        pids: their processes.
        now: the time, in seconds since the epoch.
    """
    places: dict[int, Place] = {}
    chips: dict[int, Mapping[str, Any]] = {}
    for pid in pids:
        with contextlib.suppress(IrisError):
            found = module_of("sessions", "surroundings").Surroundings.of_process(pid)
            places[pid] = Place.of(found.environ, found.directory)
            chips |= {one["device"]: one for one in _chips(found.environ)}
    return places, ChipSample(now, [chips[device] for device in sorted(chips)]) if chips else None


def _chips(environ: Mapping[str, str]) -> list[Mapping[str, Any]]:
    metrics = module_of("inspection", "chip_metrics")
    if not any(map(_answers, metrics.ports(environ))):  # asking takes a slow import
        return []
    return [asdict(one) for one in metrics.chip_use(environ)]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), CONNECT_S).close()
    except OSError:
        return False
    return True
