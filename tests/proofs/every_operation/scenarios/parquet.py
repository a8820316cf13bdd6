"""The copy of the history in Parquet files: it grows by jobs, events and samples, while the history drops old ones."""

import os
import sqlite3
from collections import Counter
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from iris_ray.errors import HistoryUnavailableError
from iris_ray.history import parquet as parquet_module
from iris_ray.history.history_file import Bounds, HistoryFile
from iris_ray.history.parquet import copy_to_parquet
from iris_ray.history.rows import EventRow
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario
from tests.proofs.every_operation.scenarios.history import DAY_S, steps
from tests.support.histories import NOON

LATE = EventRow(NOON - 30.0 * DAY_S, "host lost", "late", None, "of a month whose jobs the history has dropped")
STEPS = [steps()[0], [*steps()[1], LATE], steps()[2]]
TABLES = "jobs", "attempts", "time", "events", "fleet_samples", "user_samples"


def parquet() -> Scenario:
    for module in ("pyarrow", "pyarrow.fs", "pyarrow.parquet"):  # in each process it would take long
        import_module(module)
    return Scenario(
        "parquet",
        _prepare,
        _act,
        _judge,
        (OSError, sqlite3.Error, HistoryUnavailableError),
        {"copy holds what the history holds": _replace, "jobs are written first": _write_jobs_first},
    )


class Files:
    """The files of a copy, through Python's functions, whose operations count; pyarrow's own do not.

    Args:
        real: knows what is there.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def get_file_info(self, path: str) -> Any:
        os.path.exists(path)
        return self._real.get_file_info(path)

    def create_dir(self, path: str, recursive: bool) -> None:
        os.makedirs(path, exist_ok=True)

    def open_output_stream(self, path: str) -> Any:
        return open(path, "wb")

    def open_input_file(self, path: str) -> Any:
        return open(path, "rb")

    def move(self, path: str, to: str) -> None:
        os.rename(path, to)


def _count_files() -> None:
    make = parquet_module._Target.__init__

    def made(target: Any, where: str) -> None:
        make(target, where)
        target._files = Files(target._files)

    parquet_module._Target.__init__ = made  # type: ignore[method-assign, assignment]


def _history(place: Path) -> HistoryFile:
    return HistoryFile(place / "history.sqlite", Bounds(10, 100), lambda: NOON)


def _prepare(place: Path) -> None:
    file = _history(place)
    file.write(STEPS[0])
    copy_to_parquet(file.path, str(place / "copy"))


def _act(place: Path, said: Said, operations: Operations) -> None:
    _count_files()
    file = _history(place)
    file.tidy()
    for step, records in enumerate(STEPS[1:], 1):
        said("writes", step)
        file.write(records)
        copy_to_parquet(file.path, str(place / "copy"))
        said("copied", step)


def _copy(place: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the copy by table."""
    from pyarrow import parquet as files

    return {
        table: [row for path in sorted((place / "copy" / table).glob("*.parquet")) for row in _rows(files, path)]
        for table in TABLES
    }


def _rows(files: Any, path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = files.ParquetFile(path).read().to_pylist()
    return found


def _require(place: Path, whole: set[int], possible: set[int]) -> None:
    """Require the rows of these steps, each once, and otherwise none but of possible ones."""
    copy = _copy(place)
    jobs = Counter(row["job_id"] for row in copy["jobs"])
    events = Counter(row["subject"] for row in copy["events"])
    assert set(jobs.values()) | set(events.values()) <= {1}, (jobs, events)
    for step in range(len(STEPS)):
        there = {job for job in jobs if job.startswith(f"job-{step}-")} | {one for one in events if one == f"a/{step}"}
        expected = {*(f"job-{step}-{number}" for number in range(3)), f"a/{step}"}
        if step in whole:
            assert there == expected, (step, there)
        assert there <= (expected if step in possible else set()), (step, there)
    of_jobs = Counter(row["job"] for row in copy["attempts"])
    if whole == possible:
        assert set(of_jobs) == {row["id"] for row in copy["jobs"]}


def _judge(place: Path, said: list[list[Any]]) -> None:
    copied, possible = {0, *(step for word, step in said if word == "copied")}, {0, *(step for _, step in said)}
    _require(place, copied, possible)
    file, target = _history(place), str(place / "copy")
    copy_to_parquet(file.path, target)
    with closing(sqlite3.connect(file.path)) as db:
        there = {int(job_id.split("-")[1]) for (job_id,) in db.execute("SELECT job_id FROM jobs")}
    _require(place, copied | there, copied | there)
    for records in STEPS[1:]:
        file.write(records)
    copy_to_parquet(file.path, target)
    _require(place, {0, 1, 2}, {0, 1, 2})
    assert not [*(place / "copy").rglob("*.part")]


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _replace() -> None:
    parquet_module._Target.read = lambda *_: None  # type: ignore[method-assign]


def _write_jobs_first() -> None:
    parquet_module._TABLES = ("jobs", *parquet_module._TABLES[:-1])
