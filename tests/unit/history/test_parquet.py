"""The copy of a history in Parquet files, as its program makes it. It needs pyarrow."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iris_ray.history.rows import CurvePoint, EventRow, Sample, UserSample
from tests.support.command_line import REPOSITORY
from tests.support.histories import NOON, History, story
from tests.support.worlds import World

DAY_S = 86400.0
NOVEMBER, DECEMBER = NOON, NOON + 7 * DAY_S
needs_pyarrow = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import pyarrow"], capture_output=True, check=False).returncode != 0,
    reason="needs pyarrow: pip install 'iris-ray[parquet]'",
)


def copied(history: History, target: object, *since: float, code: int = 0) -> str:
    """What the program prints."""
    words = [sys.executable, "-m", "iris_ray.history.parquet", str(history.file.path), str(target), *map(str, since)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file, read by a process of its own: Ray behaves otherwise where pyarrow was imported."""
    script = "import pyarrow.parquet as p, json, sys; print(json.dumps(p.read_table(sys.argv[1]).to_pylist()))"
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture
def two_months(history: History, world: World) -> History:
    """A job, an event and a sample in each of two months; the first job has a curve."""
    job = world.start(user="ann")
    world.now += 60.0
    world.finish(job)
    ended = story(world, job)
    times = {"submitted_at": DECEMBER, "ended_at": DECEMBER + 60, "seen_at": DECEMBER + 60}
    later = replace(ended, job={**ended.job, "job_id": "later", **times})
    curve = CurvePoint("job", NOON, NOON + 30, 7, {"loss": 2.5})
    seen = [Sample(at, {"v4-16": 16.0}, (UserSample("v4-16", "batch", "ann", "", 8.0),)) for at in (NOVEMBER, DECEMBER)]
    events = [EventRow(at, "host lost", "a/0", None, "gone ü") for at in (NOVEMBER, DECEMBER)]
    history.file.write([ended, later, curve, *seen, *events])
    return history


@needs_pyarrow
def test_copy_has_every_row_of_every_table_by_month(two_months: History, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copied(two_months, target)
    tables = "jobs", "attempts", "time", "losses", "curves", "events", "fleet_samples", "user_samples"
    for table in tables:
        found = [row for file in sorted(target.glob(f"{table}/*.parquet")) for row in read(file)]
        known = two_months.ask(f"SELECT * FROM {table}").as_dicts()
        assert sorted(map(str, found)) == sorted(map(str, known)), table
    (november,) = read(target / "jobs/2026-11.parquet")
    assert (november["user"], november["state"], november["team"]) == ("ann", "succeeded", None)
    assert read(target / "events/2026-12.parquet")[0]["what"] == "gone ü"
    assert not [*target.rglob("*.part")]


@needs_pyarrow
def test_only_months_that_have_changed_are_written_again(two_months: History, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copied(two_months, target)
    before = {file: file.stat().st_ino for file in target.rglob("*.parquet")}
    copied(two_months, target, DECEMBER - DAY_S)
    written = {str(file.relative_to(target)) for file, inode in before.items() if file.stat().st_ino != inode}
    assert {name.partition("/")[2] for name in written} == {"2026-12.parquet"}
    assert {name.partition("/")[0] for name in written} >= {"jobs", "attempts", "events", "fleet_samples"}


@needs_pyarrow
def test_place_that_takes_no_files_is_said_in_a_line(two_months: History, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in copied(two_months, tmp_path / "file", code=1)
    said = copied(two_months, "no-such-scheme://x/y", code=1)
    assert said.count("\n") == 1
    assert "no-such-scheme" in said


def test_history_that_is_none_is_left_alone(two_months: History, tmp_path: Path) -> None:
    with closing(sqlite3.connect(two_months.file.path)) as db:
        db.execute("PRAGMA user_version = 7")
    said = copied(two_months, tmp_path / "copy", code=1)
    assert "no history of this version" in said or "pyarrow is not installed" in said
    assert not (tmp_path / "copy").exists()
