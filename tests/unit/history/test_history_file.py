"""The file of the history: what it keeps, what goes first, and bad files."""

import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from iris_ray.errors import HistoryUnavailableError
from iris_ray.history import history_file
from iris_ray.history.history_file import APPLICATION_ID, SCHEMA_VERSION, Bounds, HistoryFile, is_passing
from iris_ray.history.rows import CurvePoint, EventRow, JobStory, Sample, UserSample
from tests.support.histories import NOON, History, story
from tests.support.worlds import S, World


@pytest.fixture
def ended(world: World) -> JobStory:
    """A job of a minute."""
    job = world.start(user="ann")
    world.now += 60.0
    world.finish(job)
    return story(world, job)


def of_another(story: JobStory, job_id: str, ended_at: float) -> JobStory:
    return replace(story, job={**story.job, "job_id": job_id, "ended_at": ended_at})


def contents(history: History) -> list[list[tuple[object, ...]]]:
    tables = "jobs", "attempts", "time", "losses", "events", "fleet_samples", "user_samples"
    return [list(history.rows(f"SELECT * FROM {table}")) for table in tables]


def test_writing_again_changes_nothing(history: History, ended: JobStory) -> None:
    event = EventRow(NOON, "host lost", "a/0", None, "gone")
    taken = Sample(NOON, {"v4-16": 16.0}, (UserSample("v4-16", "batch", "ann", "", 8.0),))
    history.file.write([ended, event, taken])
    once = contents(history)
    assert all(rows for rows in (once[0], once[1], once[2], once[4], once[5], once[6]))
    history.file.write([ended, event, taken, ended])
    assert contents(history) == once


def test_job_of_no_team_has_none(history: History, ended: JobStory) -> None:
    history.file.write([ended])
    assert history.rows("SELECT team FROM jobs") == [(None,)]


def test_same_id_in_another_life_is_another_job(history: History, ended: JobStory) -> None:
    later = replace(ended, job={**ended.job, "submitted_at": NOON + 86400})
    history.file.write([ended, later])
    assert history.rows("SELECT job_id, count(*) FROM jobs GROUP BY job_id") == [("job", 2)]


def test_later_writing_completes_the_attempts(history: History, world: World) -> None:
    job = world.submit(max_retries_failure=9)
    for _ in range(7):
        world.now += 40.0
        world.schedule()
        world.now += 1.0
        world.report_all(job, S.RUNNING)
        history.file.write([story(world, job)])
        world.long_run()
        world.report(job, S.FAILED, 1)
        world.confirm(job)
        history.file.write([story(world, job)])
    rows = history.rows("SELECT number, state, cause, host FROM attempts ORDER BY number")
    assert rows == [(number, "failed", "crashed", "a/1") for number in range(1, 8)], "the state remembers five"
    assert history.rows("SELECT count(*) FROM attempts WHERE assigned_at IS NULL OR ended_at IS NULL") == [(0,)]


def test_sums_of_long_jobs_are_by_day(history: History, world: World) -> None:
    job = world.start(user="ann")
    for hours in (6, 24, 10):  # noon to 18:00, to 18:00 of the next day, to 04:00
        world.now += 3600.0 * hours
        history.now += 3600.0 * hours
        history.file.write([story(world, job)])
    rows = history.rows("SELECT day, seconds / 3600, chip_seconds / 3600 FROM time ORDER BY day")
    assert rows == [("2026-11-26", 6, 48), ("2026-11-27", 24, 192), ("2026-11-28", 10, 80)]


def test_jobs_lost_with_their_cluster_end_when_last_seen(history: History, world: World) -> None:
    lost, here = world.start("lost"), world.start("here")
    world.now += 30.0
    history.file.write([story(world, lost), story(world, here)])
    history.file.close_lost(["here"])
    seen = NOON + 30.0
    assert history.rows("SELECT job_id, state, ended_at FROM jobs ORDER BY job_id DESC") == [
        ("lost", "lost", seen),
        ("here", "running", None),
    ]
    assert history.rows("SELECT state, ended_at FROM attempts ORDER BY ended_at") == [
        ("running", None),
        ("lost", seen),
    ]


def test_attempt_that_state_has_forgotten_is_ended(history: History, world: World) -> None:
    job = world.start(max_retries_failure=1)
    running = story(world, job)
    world.long_run()
    world.report(job, S.FAILED)
    world.confirm(job)
    world.schedule()
    later = story(world, job)
    history.file.write([running, replace(later, attempts=later.attempts[1:])])
    assert history.rows("SELECT number, state, ended_at IS NULL FROM attempts") == [(1, "lost", 0), (2, "starting", 1)]


def test_curves_belong_to_their_job(history: History, ended: JobStory) -> None:
    points = [CurvePoint("job", NOON, NOON + 60 * n, 100 * n, {"loss": 3.0 - n}) for n in range(3)]
    unknown = CurvePoint("other", NOON, NOON, 1, {})
    history.file.write([ended, *points, points[0], unknown])
    assert history.rows("SELECT name, count(*), max(value), max(step) FROM curves GROUP BY name") == [
        ("loss", 3, 3.0, 200),
        ("step", 3, 200.0, 200),
    ]
    history.now += 500 * 86400
    history.bounded(days=30).tidy()
    assert history.rows("SELECT * FROM curves") == []


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_old_jobs_events_and_samples_go(history: History, ended: JobStory) -> None:
    old = NOON - 31 * 86400
    history.file.write(
        [
            of_another(ended, "old", old),
            ended,
            EventRow(old, "host lost", "a/0", None, "gone"),
            EventRow(NOON, "host lost", "a/1", None, "gone"),
            Sample(old, {"v4-16": 16.0}, ()),
        ]
    )
    history.bounded(days=30).tidy()
    assert history.rows("SELECT job_id FROM jobs") == [("job",)]
    assert history.rows("SELECT subject FROM events") == [("a/1",)]
    assert history.rows("SELECT count(*) FROM fleet_samples") == [(0,)]
    assert history.rows("SELECT count(*), count(DISTINCT job) FROM attempts") == [(1, 1)], "they go with their jobs"


def test_oldest_go_first_from_a_large_file(history: History, ended: JobStory) -> None:
    history.file.write([of_another(ended, f"job-{number}", NOON + number) for number in range(1500)])
    large = history.file.path.stat().st_size
    history.bounded(megabytes=large / 2 / 2**20).tidy()
    assert history.file.path.stat().st_size <= large / 2
    ((count, first),) = history.rows("SELECT count(*), min(ended_at) FROM jobs")
    assert isinstance(count, int)
    assert 250 <= count <= 750
    assert first == NOON + 1500 - count


def test_file_of_events_alone_is_bounded(history: History) -> None:
    history.file.write([EventRow(NOON + n, "host lost", f"a/{n}", None, "x" * 500) for n in range(1500)])
    large = history.file.path.stat().st_size
    history.bounded(megabytes=large / 2 / 2**20).tidy()
    assert history.file.path.stat().st_size <= large / 2
    assert history.rows("SELECT max(at) FROM events") == [(NOON + 1499,)]


def test_minutes_become_means_of_hours_after_a_day(history: History) -> None:
    def taken(minute: int, busy: float) -> Sample:
        users = (UserSample("v4-16", "batch", "ann", "", busy, 2.0, 16.0),) if busy else ()
        return Sample(NOON + 60 * minute, {"v4-16": 16.0}, users)

    history.file.write([taken(0, 8.0), taken(1, 16.0), taken(2, 0.0), taken(60, 4.0), taken(1500, 8.0)])
    history.now = NOON + 26 * 3600
    for _ in range(2):
        history.file.tidy()
    hours = [(int(NOON), 3600, 8.0), (int(NOON) + 3600, 3600, 4.0), (int(NOON) + 90000, 60, 8.0)]
    assert history.rows("SELECT at, span_s, busy_chips FROM user_samples ORDER BY at") == hours
    assert history.rows("SELECT at, span_s, chips FROM fleet_samples ORDER BY at") == [
        (at, span, 16.0) for at, span, _ in hours
    ]


# -- bad files ---------------------------------------------------------------------------------------------------------


def damage_header(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 500)


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(bytes(data))


def damage_schema(path: Path) -> None:
    """Have SQLite's error hold bytes that are no text."""
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE jobs", b"CREATE \xdd\xddBLE jobs"))


@pytest.mark.parametrize("damage", [damage_header, damage_middle, damage_schema])
def test_corrupt_file_is_set_aside_and_said_once(
    history: History, ended: JobStory, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    history.file.write([of_another(ended, "before", NOON)])
    assert callable(damage)
    damage(history.file.path)
    begun = history.bounded()
    for _ in range(2):
        begun.write([ended])
    assert history.rows("SELECT job_id FROM jobs") == [("job",)]
    aside = history.file.path.with_name("history.sqlite.corrupt-20261126-120000")
    assert aside.exists()
    assert [record.getMessage().count(str(aside)) for record in caplog.records] == [1]


def test_damage_while_it_runs_is_met_by_a_new_file(history: History, ended: JobStory) -> None:
    history.file.write([of_another(ended, f"job-{number}", NOON) for number in range(100)])
    damage_header(history.file.path)
    history.file.write([ended])
    assert history.rows("SELECT job_id FROM jobs") == [("job",)]


@pytest.mark.parametrize(("application", "version", "why"), [(7, 1, "something else"), (None, 99, "newer iris_ray")])
def test_file_of_others_or_newer_is_left_alone(
    history: History, ended: JobStory, application: int | None, version: int, why: str
) -> None:
    history.file.path.parent.mkdir()
    with closing(sqlite3.connect(history.file.path)) as db:
        db.executescript(
            f"CREATE TABLE theirs (a); PRAGMA application_id = {application or APPLICATION_ID};"
            f" PRAGMA user_version = {version};"
        )
    before = history.file.path.read_bytes()
    with pytest.raises(HistoryUnavailableError, match=why) as refused:
        history.file.write([ended])
    assert not is_passing(refused.value)
    assert history.file.path.read_bytes() == before


def test_schema_version_changes_with_schema(history: History) -> None:
    """A change of the schema raises SCHEMA_VERSION, and earlier files are brought up to date."""
    columns = {
        "jobs": "id job_id name user band type state submitted_at attempts failures preemptions error evictions step"
        " says slices team tasks chips started_at ended_at seen_at",
        "attempts": "job gang number state cause slices hosts chips assigned_at started_at ended_at task host exit_code"
        " error lost_s lost_chip_s",
        "time": "job day kind seconds chip_seconds",
        "losses": "job day cause count seconds chip_seconds",
        "curves": "job name at step value",
        "events": "at kind subject job_id what",
        "fleet_samples": "at span_s type chips",
        "user_samples": "at span_s type band user team busy_chips waiting_jobs waiting_chips",
        "changes": "month number",
    }
    history.file.write([])
    found = {table: " ".join(history.ask(f"SELECT * FROM {table}").columns) for table in columns}
    assert (SCHEMA_VERSION, found) == (1, columns)


def test_file_gets_columns_that_it_lacks(history: History, ended: JobStory) -> None:
    history.file.write([])
    with closing(sqlite3.connect(history.file.path)) as db:
        db.executescript("ALTER TABLE jobs DROP COLUMN says; ALTER TABLE attempts DROP COLUMN lost_s")
    history.bounded().write([ended])
    assert history.rows("SELECT says, lost_s FROM jobs JOIN attempts ON job = jobs.id") == [(None, None)]


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """No file can grow beyond that many bytes within."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_loses_nothing_that_was_written(history: History, ended: JobStory) -> None:
    history.file.write([ended])
    more = [of_another(ended, f"job-{number}", NOON) for number in range(600)]
    with full_disk(100_000), pytest.raises(sqlite3.OperationalError) as refused:
        history.file.write(more)
    assert is_passing(refused.value)
    assert history.rows("SELECT count(*) FROM jobs") == [(1,)]
    history.file.write(more)
    assert history.rows("SELECT count(*) FROM jobs") == [(601,)]


def test_locked_file_and_missing_directory_may_pass(
    history: History, ended: JobStory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(history_file, "BUSY_S", 0.0)
    history.file.write([])
    with closing(sqlite3.connect(history.file.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError) as locked:
            history.file.write([ended])
        other.rollback()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file") as away:
        HistoryFile(tmp_path / "file" / "history.sqlite", Bounds(1, 1)).write([ended])
    assert is_passing(locked.value)
    assert is_passing(away.value)
    history.file.write([ended])
