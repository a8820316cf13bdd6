"""Which files and lines are evidence of a crash or a hang: pure functions of names and text."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from iris_ray.model.lifecycle import TaskAttemptId

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
_SECRET = re.compile(
    r"""([\w.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credential|authorization)[\w.-]*["']?\s*[=:]\s*)"""
    r"""((?:bearer\s+|basic\s+)?(?:"[^"]*"|'[^']*'|[^\s,;&]+))""",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+\d.,e]+%?")
_IN_URL = re.compile(r"(\w+://)[^/\s:@]+:[^/\s@]+@")
_HANDLERS = "/var/lib/systemd/coredump", "/var/lib/apport/coredump", "/var/crash"
"""Where systemd and Ubuntu's apport put core dumps, if the kernel gives these to a program."""


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
    """Return the directories in which core dumps of a process may be.

    Args:
        pattern: the kernel's ``core_pattern``.
        directory: the process's working directory; None if it is not known.
    """
    if pattern.startswith("|"):
        return _HANDLERS
    folder = pattern.partition("%")[0].rpartition("/")[0]
    if pattern.startswith("/"):
        return (folder or "/",)
    return () if directory is None else (f"{directory}/{folder}".rstrip("/"),)


def is_dump(name: str, pids: Collection[int]) -> bool:
    """Return whether a file of this name may be a core dump of one of these processes."""
    if any(int(number) in pids for number in re.findall(r"(?<!\d)\d{1,9}(?!\d)", name)):
        return True
    return name == "core" or name.endswith(".crash")


def evidence_lines(data: bytes) -> bytes:
    """Return the last lines of a task's output, and those before them that XLA, MEGASCALE and libtpu have written."""
    lines = data.splitlines()
    before, last = lines[:-LAST_LINES], lines[-LAST_LINES:]
    of_runtime = [line for line in before if _OF_RUNTIME.search(line)][-LAST_OF_RUNTIME:]
    return b"".join(line + b"\n" for line in [*of_runtime, *last])


def masked(text: str) -> str:
    """Return a text without the values of what is named like a secret, and without the passwords in URLs."""

    def hide(found: re.Match[str]) -> str:
        return found[0] if _NUMBER.fullmatch(found[2]) else f"{found[1]}***"

    return _IN_URL.sub(r"\1***@", _SECRET.sub(hide, text))


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
        said.append(f"a core dump of {dumps[0].bytes / 1e6:,.0f} MB ({dumps[0].path} on its host{more})")
    if not said:
        return ""
    command = f"iris-ray cp --output {attempt.job_id}/{attempt.task_index}:{FOLDER} . --attempt {attempt.attempt}"
    return f"see {' and '.join(said)}" + (f": {command}" if are_kept else "")
