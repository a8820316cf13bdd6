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

from iris_ray.history.history_file import Bounds
from iris_ray.history.rows import CurvePoint, EventRow, Sample, UserSample
from tests.support.command_line import REPOSITORY
from tests.support.histories import NOON, History, story
from tests.support.worlds import S, World

DAY_S = 86400.0
TABLES = "jobs", "attempts", "time", "losses", "curves", "events", "fleet_samples", "user_samples"
NOVEMBER, DECEMBER = NOON, NOON + 7 * DAY_S
needs_pyarrow = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import pyarrow"], capture_output=True, check=False).returncode != 0,
    reason="needs pyarrow: pip install pyarrow",
)


def copied(history: History, target: object, code: int = 0) -> str:
    """What the program prints."""
    words = [sys.executable, "-m", "iris_ray.history.parquet", str(history.file.path), str(target)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


Rows = list[dict[str, Any]]
READ = """
import json, pathlib, sys
from pyarrow import parquet
files = pathlib.Path(sys.argv[1]).glob("*/*.parquet")
print(json.dumps({f"{one.parent.name}/{one.stem}": parquet.read_table(one).to_pylist() for one in files}))
"""


def read(target: Path) -> dict[str, Rows]:
    """The rows of a copy, by table and month. A process of its own reads: Ray behaves otherwise beside pyarrow."""
    done = subprocess.run([sys.executable, "-c", READ, str(target)], capture_output=True, text=True, check=True)
    found: dict[str, Rows] = json.loads(done.stdout)
    return found


def november(target: Path) -> dict[str, Rows]:
    """The rows of a month, by table."""
    return {name.partition("/")[0]: rows for name, rows in read(target).items() if name.endswith("/2026-11")}


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
    copy = read(target)
    for table in TABLES:
        found = [row for month in (11, 12) for row in copy[f"{table}/2026-{month}"]]
        known = two_months.ask(f"SELECT * FROM {table}").as_dicts()
        assert sorted(map(str, found)) == sorted(map(str, known)), table
    (job,), (event,) = copy["jobs/2026-11"], copy["events/2026-12"]
    assert (job["user"], job["state"], job["team"]) == ("ann", "succeeded", None)
    assert event["what"] == "gone ü"
    assert not [*target.rglob("*.part")]


def inodes(target: Path) -> dict[str, int]:
    return {str(file.relative_to(target)): file.stat().st_ino for file in target.rglob("*.parquet")}


@needs_pyarrow
def test_only_months_that_have_changed_are_written_again(two_months: History, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copied(two_months, target)
    before = inodes(target)
    copied(two_months, target)
    assert inodes(target) == before
    two_months.file.write([EventRow(NOVEMBER + 1, "host lost", "a/1", None, "late")])
    copied(two_months, target)
    written = {name for name, inode in inodes(target).items() if inode != before[name]}
    assert {name.partition("/")[2] for name in written} == {"2026-11.parquet"}
    assert len(november(target)["events"]) == 2


@needs_pyarrow
def test_row_that_is_written_long_after_its_time_is_copied(history: History, world: World, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    job = world.start(user="ann")
    history.file.write([story(world, job)])
    copied(history, target)
    world.now += 60.0
    world.finish(job)
    ended = story(world, job)
    history.now += 40 * DAY_S
    history.file.write([EventRow(history.now, "host lost", "a/0", None, "gone")])
    copied(history, target)
    history.file.write([ended])
    copied(history, target)
    (row,) = november(target)["jobs"]
    assert (row["state"], row["ended_at"]) == ("succeeded", ended.job["ended_at"])
    history.file.close_lost([])
    assert [row["state"] for row in november(target)["attempts"]] == ["succeeded"]


@needs_pyarrow
@pytest.mark.parametrize("head", ["the same", "another"])
def test_new_history_adds_to_the_copy_of_the_one_before(
    history: History, world: World, tmp_path: Path, head: str
) -> None:
    """The file was set aside, or the head was replaced: what the Controller still knows is less than the copy has."""
    target = tmp_path / "copy"
    job = world.submit(user="ann", max_retries_failure=9)
    for day in range(3):
        world.schedule()
        world.report_all(job, S.RUNNING)
        world.now += 3600.0
        history.now = NOON + DAY_S * day
        history.file.write([story(world, job)])
        world.report(job, S.FAILED, 1)
        world.confirm(job)
    ended = story(world, job)
    others = [replace(ended, job={**ended.job, "job_id": f"job-{number}"}) for number in range(20)]
    event = EventRow(NOON, "host lost", "a/0", None, "gone")
    seen = [Sample(NOON + 60 * n, {"v4-16": 16.0}, (UserSample("v4-16", "batch", "ann", "", 8.0),)) for n in range(3)]
    history.file.write([*others, event, *seen])
    copied(history, target)
    before = november(target)
    new = history if head == "the same" else History(tmp_path / "new" / "history.sqlite", Bounds(400, 100))
    if head == "the same":
        history.file.path.unlink()
    new.now = NOON + 3 * DAY_S
    world.schedule()
    world.report_all(job, S.RUNNING)
    world.now += 3600.0
    latest = story(world, job)
    new.file.write([replace(latest, attempts=latest.attempts[-1:])])
    new.file.write([replace(ended, job={**ended.job, "job_id": "new"})])
    new.file.tidy()
    for _ in range(2):
        copied(new, target)
        after = november(target)
        assert all(len(after[table]) >= len(rows) for table, rows in before.items())
        assert {row["job_id"] for row in after["jobs"]} == {"job", "new", *(f"job-{n}" for n in range(20))}
        assert len({row["id"] for row in after["jobs"]}) == 22
        (of_it,) = [row["id"] for row in after["jobs"] if row["job_id"] == "job"]
        numbers = [(row["number"], row["state"]) for row in after["attempts"] if row["job"] == of_it]
        assert numbers == [(1, "failed"), (2, "failed"), (3, "lost"), (4, "running")]
        days = {
            row["day"]: row["seconds"] for row in after["time"] if (row["job"], row["kind"]) == (of_it, "unmeasured")
        }
        assert sum(days.values()) == pytest.approx(latest.time["unmeasured"][0]), "sums over days are right"
        assert len(days) == 4, "days keep what they had"
        new.file.write([EventRow(NOON + 1, "host lost", "a/0", None, "gone")])


@needs_pyarrow
def test_history_that_knows_less_of_a_job_changes_nothing(two_months: History, tmp_path: Path) -> None:
    """A backup of the history is played back."""
    target = tmp_path / "copy"
    copied(two_months, target)
    before = november(target)["jobs"]
    with closing(sqlite3.connect(two_months.file.path)) as db, db:
        db.execute("UPDATE jobs SET state = 'running', ended_at = NULL, seen_at = seen_at - 1")
        db.execute("UPDATE changes SET number = number + 1")
    copied(two_months, target)
    assert november(target)["jobs"] == before


@needs_pyarrow
def test_means_of_hours_replace_their_minutes_in_the_copy(history: History, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    history.file.write([Sample(NOON + 60 * n, {"v4-16": 16.0}, ()) for n in range(60)])
    copied(history, target)
    assert len(november(target)["fleet_samples"]) == 60
    history.now += 2 * DAY_S
    history.file.tidy()
    copied(history, target)
    assert [row["span_s"] for row in november(target)["fleet_samples"]] == [3600]


@needs_pyarrow
@pytest.mark.parametrize("table", ["attempts", "jobs"])
def test_month_whose_copy_can_not_be_read_is_left_alone(two_months: History, tmp_path: Path, table: str) -> None:
    target = tmp_path / "copy"
    copied(two_months, target)
    damaged = target / f"{table}/2026-11.parquet"
    damaged.write_bytes(b"PAR1 damaged")
    two_months.file.write([EventRow(at + 1, "host lost", "a/1", None, "late") for at in (NOVEMBER, DECEMBER)])
    said = copied(two_months, target, code=1)
    assert said.count("\n") == 1
    assert f"{damaged} can't be read" in said
    assert damaged.read_bytes() == b"PAR1 damaged"
    damaged.unlink()
    assert {month: len(read(target)[f"events/2026-{month}"]) for month in (11, 12)} == {11: 1, 12: 2}
    copied(two_months, target)
    assert len(november(target)["events"]) == 2
    assert november(target)[table]


@needs_pyarrow
def test_file_that_can_not_be_opened_holds_up_its_own_month_only(two_months: History, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    blocked = target / "jobs/2026-11.parquet"
    blocked.mkdir(parents=True)
    assert f"{blocked} can't be read" in copied(two_months, target, code=1)
    assert read(target)["events/2026-12"]
    blocked.rmdir()
    copied(two_months, target)
    assert november(target)["jobs"]


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
    assert "not a history of this version" in said or "pyarrow is not installed" in said
    assert not (tmp_path / "copy").exists()
