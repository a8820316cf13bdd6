"""Which files and lines are evidence of a crash or a hang: pure functions of names and text."""

import io
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from iris_ray.masking import MOST_LINE
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.terminal import one_line

FOLDER: Final = "iris-ray"
"""The name of the folder in a task's output directory."""
STACKS, OUTPUT, LIBTPU, DUMPS, CHIPS = FILES = (
    "stacks.txt",
    "output.txt",
    "libtpu.txt",
    "core-dumps.txt",
    "chips.jsonl",
)
"""The names of its files."""
LAST_LINES, LAST_OF_RUNTIME = 200, 1000
"""The limits for the lines of a task's output that are kept: the last ones, and those of the runtime before them."""

_OF_RUNTIME = re.compile(
    rb"megascale|mxla|xla|libtpu|tpu_driver|hang_detected|pjrt|coordination.?service", re.IGNORECASE
)
_LOG_OF_LIBTPU = re.compile(r"tpu_driver\..+\.log\.[A-Z]+\.\d{8}-\d{6}\.(\d+)")
_HANDLERS = "/var/lib/systemd/coredump", "/var/lib/apport/coredump", "/var/crash"
"""Where systemd and Ubuntu's apport put core dumps, if the kernel gives these to a program."""
_OF_HANDLERS = re.compile(r"core\..+\.\d+\.[\da-f-]{32,36}\.(\d+)\.\d+(?:\.\w+)?|.+\.\d+\.crash")
"""Their names: program, user, boot, process and time; or program and user only."""
_FIELD = re.compile(r"%(.?)")
_OF_FIELDS = {"p": r"(\d+)", "P": r"(\d+)", "%": "%", "": "", "e": ".*", "E": ".*", "f": ".*", "h": ".*"}
"""What a field of ``core_pattern`` becomes; all others are numbers."""


@dataclass(frozen=True, slots=True)
class CoreDump:
    """A core dump on a host.

    Attributes:
        path: where it is.
        bytes: its size.
    """

    path: str
    bytes: int


def is_log_of_libtpu(name: str, pids: Collection[int]) -> bool:
    """Return whether a file of this name is a log that libtpu has written in one of these processes."""
    found = _LOG_OF_LIBTPU.fullmatch(name)
    return found is not None and int(found[1]) in pids


def dump_directories(pattern: str, directory: str | None) -> tuple[str, ...]:
    """Return the directories in which core dumps of a process may be; none if their names differ from dump to dump.

    Args:
        pattern: the kernel's ``core_pattern``.
        directory: the process's working directory; None if it is not known.
    """
    if pattern.startswith("|"):
        return _HANDLERS
    folder = pattern.rpartition("/")[0]
    if "%" in folder:
        return ()
    if pattern.startswith("/"):
        return (folder or "/",)
    return () if directory is None else (f"{directory}/{folder}".rstrip("/"),)


def is_dump(name: str, pids: Collection[int], pattern: str, uses_pid: bool) -> bool:
    """Return whether the kernel gives a core dump of one of these processes this name.

    Args:
        name: the file's name.
        pids: the processes.
        pattern: the kernel's ``core_pattern``.
        uses_pid: the kernel's ``core_uses_pid``.
    """
    found = (_OF_HANDLERS if pattern.startswith("|") else _dump_name(pattern, uses_pid)).fullmatch(name)
    return found is not None and all(pid is None or int(pid) in pids for pid in found.groups())


def names_process(pattern: str, uses_pid: bool) -> bool:
    """Return whether the kernel writes core dumps itself, to files with the number of the process in their names."""
    return not pattern.startswith("|") and _dump_name(pattern, uses_pid).groups > 0


@cache
def _dump_name(pattern: str, uses_pid: bool) -> re.Pattern[str]:
    """Return what matches the names of core dumps, with a group for each number of the process."""
    literal, *fields = _FIELD.split(pattern.rpartition("/")[2])
    said = re.escape(literal)
    for field, text in zip(fields[::2], fields[1::2], strict=True):
        said += _OF_FIELDS.get(field, r"\d+") + re.escape(text)
    if uses_pid and "p" not in fields[::2]:
        said += r"\.(\d+)"
    return re.compile(said, re.DOTALL)


def evidence_lines(data: bytes) -> bytes:
    """Return the last lines of a task's output, and those before them that XLA, MEGASCALE and libtpu have written."""
    of_runtime: deque[bytes] = deque(maxlen=LAST_OF_RUNTIME)
    last: deque[bytes] = deque(maxlen=LAST_LINES)
    for line in io.BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")):  # a list would take 50 times the memory
        if len(last) == LAST_LINES and _OF_RUNTIME.search(last[0][:MOST_LINE]):
            of_runtime.append(last[0])
        last.append(line)
    return b"".join([*of_runtime, *last])


def crash_in_words(attempt: TaskAttemptId, has_logs: bool, dumps: Sequence[CoreDump], are_kept: bool) -> str:
    """Return what people are told of a crash beside its reason; "" if nothing is known.

    Args:
        attempt: of the task that crashed.
        has_logs: whether libtpu has written logs.
        dumps: its core dumps.
        are_kept: whether files about it could be written to its output directory.
    """
    said = ["the last lines of libtpu's logs"] if has_logs and are_kept else []
    if dumps:
        more = f", and {len(dumps) - 1} more" if dumps[1:] else ""
        said.append(f"a core dump of {dumps[0].bytes / 1e6:,.0f} MB ({one_line(dumps[0].path)} on its host{more})")
    if not said:
        return ""
    command = f"iris-ray cp --output {attempt.job_id}/{attempt.task_index}:{FOLDER} . --attempt {attempt.attempt}"
    return f"see {' and '.join(said)}" + (f": {command}" if are_kept else "")
