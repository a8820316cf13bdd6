"""The archive of logs: what a task prints is copied while it grows, at its end, and by the next process of the host."""

import threading
from pathlib import Path
from typing import Any

from iris_ray.logs import archive as archive_module
from iris_ray.logs import files as files_module
from iris_ray.logs.archive import LogCopier, copy, copy_left
from iris_ray.logs.files import AttemptLog, LogWriter
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario

STREAM = b"".join(b"%015d" % (number * 16) + b"\n" for number in range(5000))
"""What the task prints: each 16 bytes are their own offset."""
FILE_BYTES, FILES_KEPT, STEP = 20_000, 2, 14_000


def archive() -> Scenario:
    return Scenario(
        "archive",
        _prepare,
        _act,
        _judge,
        (OSError,),
        {"files are buffered": _buffered, "the rest is copied once": _copy_once},
    )


def _log(root: Path) -> AttemptLog:
    return AttemptLog(root, "train", 3, 1)


def _prepare(place: Path) -> None:
    (place / "archive").mkdir()


def _act(place: Path, said: Said, operations: Operations) -> None:
    files_module.RETRY_BYTES = 2 * FILE_BYTES
    archive_module.COPY_S, archive_module.CHUNK_BYTES = 60.0, 8192
    log = _log(place / "host")
    copier = LogCopier(log, place / "archive")
    archive_module.COPY_S = 0.01
    try:
        writer = LogWriter(log, FILE_BYTES, FILES_KEPT)
        for end in range(STEP, 5 * STEP, STEP):
            writer.write(STREAM[end - STEP : end])
            copy([path for _, path in log.files()], place / "archive")
            said("copied", [[start, path.stat().st_size] for start, path in log.files()])
        writer.write(STREAM[4 * STEP : 5 * STEP])
    finally:
        writer.close()
        copier.close()
        for thread in threading.enumerate():
            if thread.name == "copying logs":
                thread.join()
    said("over")


def _contents(root: Path) -> dict[int, bytes]:
    return {start: path.read_bytes() for start, path in _log(root).files()}


def _judge(place: Path, said: list[list[Any]]) -> None:
    there = _contents(place / "archive")
    for word, *more in said:
        for start, size in more[0] if word == "copied" else []:
            assert len(there.get(start, b"")) >= size, f"of the file from {start}, not all {size} bytes"
    copy_left(place / "host", place / "archive")
    here, there = _contents(place / "host"), _contents(place / "archive")
    for found in (here, there):
        wrong = [start for start, data in found.items() if data != STREAM[start : start + len(data)]]
        assert not wrong, f"other bytes than the task has printed, in the files from {wrong}"
    assert here.items() <= there.items(), f"archived {sorted(there)} of {sorted(here)}"
    assert ["over"] not in said or not [*place.rglob("*.uncopied")]


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _buffered() -> None:
    opened = Path.open

    def open_(path: Path, mode: str = "r", buffering: int = -1, **how: Any) -> Any:
        return opened(path, mode, -1 if "b" in mode else buffering, **how)

    Path.open = open_  # type: ignore[method-assign, assignment]


def _copy_once() -> None:
    copied = LogCopier._copy

    def copy_once(copier: LogCopier, is_last: bool = False) -> bool:
        copied(copier, is_last)
        copier._mark.unlink(missing_ok=True)
        return True

    LogCopier._copy = copy_once  # type: ignore[method-assign, assignment]
