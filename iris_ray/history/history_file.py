"""The file of the history: its schema, its writer, and the deletion of old rows. Everything blocks, without Ray.

The file is opened for each writing, so it may be moved away at any time. Writing the same records again changes
nothing: a job is known by its id and the time of its submission, an attempt by its job, gang and number.
"""

import logging
import random
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from iris_ray.actors.protocol.status import JobStatus, fields_in
from iris_ray.errors import HistoryUnavailableError
from iris_ray.history.rows import AttemptRow, CurvePoint, EventRow, JobStory, OwnColumns, Record, Sample, UserSample

logger = logging.getLogger(__name__)

NAME = "history.sqlite"
SCHEMA_VERSION = 1
"""Raise it with a change of `SCHEMA`, and have `_prepare` bring files of the version before up to date. A further
column of ``jobs`` or ``attempts`` needs neither: files get it when they are next written."""
APPLICATION_ID = 0x69726973
"""Marks the file as ours, in SQLite's header: "iris"."""
BUSY_S = 10.0
"""How long to wait for a reader who holds the file."""
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60
MINUTES_KEPT_S = DAY_S
"""How long samples of minutes are kept. Older ones are replaced by the means of hours."""
_AT_ONCE = 200
"""The number of jobs that are deleted together if the file is too large."""

_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_PASSES = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
})  # fmt: skip


def _columns(kind: type) -> dict[str, str]:
    """Return the fields of a dataclass as columns: their names with the types that SQLite gives their values."""
    return {one.name: _SQL_TYPES.get(one.type, "TEXT") for one in fields(kind)}


def _declared(columns: Mapping[str, str]) -> str:
    return ", ".join(" ".join(column) for column in columns.items())


_SQL_TYPES: Mapping[Any, str] = {int: "INTEGER", int | None: "INTEGER", float: "REAL", float | None: "REAL"}
_STATUS = _columns(JobStatus)
JOB_COLUMNS = {there: _STATUS[name] for name, there in fields_in("history").items()} | _columns(OwnColumns)
ATTEMPT_COLUMNS = _columns(AttemptRow)

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, {_declared(JOB_COLUMNS)}, UNIQUE (job_id, submitted_at)
);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (ended_at);
CREATE INDEX IF NOT EXISTS jobs_by_user ON jobs (user, submitted_at);
CREATE TABLE IF NOT EXISTS attempts (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, {_declared(ATTEMPT_COLUMNS)},
    PRIMARY KEY (job, gang, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS time (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, day TEXT NOT NULL, kind TEXT NOT NULL,
    seconds REAL NOT NULL, chip_seconds REAL NOT NULL, PRIMARY KEY (job, day, kind)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS losses (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, day TEXT NOT NULL, cause TEXT NOT NULL,
    count INTEGER NOT NULL, seconds REAL NOT NULL, chip_seconds REAL NOT NULL, PRIMARY KEY (job, day, cause)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS curves (
    job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, name TEXT NOT NULL, at INTEGER NOT NULL, step INTEGER,
    value REAL NOT NULL, PRIMARY KEY (job, name, at)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    at REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL, job_id TEXT, what TEXT NOT NULL,
    UNIQUE (at, kind, subject, what)
);
CREATE TABLE IF NOT EXISTS fleet_samples (
    at INTEGER NOT NULL, span_s INTEGER NOT NULL, type TEXT NOT NULL, chips REAL NOT NULL,
    PRIMARY KEY (at, span_s, type)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS user_samples (
    at INTEGER NOT NULL, span_s INTEGER NOT NULL, type TEXT NOT NULL, band TEXT NOT NULL, user TEXT NOT NULL,
    team TEXT NOT NULL, busy_chips REAL NOT NULL, waiting_jobs REAL NOT NULL, waiting_chips REAL NOT NULL,
    PRIMARY KEY (at, span_s, type, band, user, team)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (month TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""
"""The tables, as docs/history.md describes them, and ``changes``: the number of the latest change to rows of a month.
A job and all that belongs to it are of the month of its submission, in UTC. Deletions are not changes."""


def _beginning() -> int:
    """Return a random number from which a file counts up: ids and changes of two files differ. It takes 6 bytes."""
    return random.getrandbits(26) << 20


_KEPT = ("started_at", "step", "says")
_KEPT_OF_ATTEMPT = ("cause", "assigned_at", "started_at", "task", "host", "exit_code", "lost_s", "lost_chip_s")
"""Columns whose old values stay if the state has forgotten them."""


def _insert(table: str, columns: Sequence[str], how: str = "INSERT") -> str:
    return f"{how} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' for _ in columns)})"


def _upsert(table: str, columns: Sequence[str], key: Sequence[str], kept: Sequence[str]) -> str:
    """Return the statement that inserts a row, or replaces the row with the same key. A row keeps its ``id``."""
    changes = ", ".join(
        f"{name} = coalesce(excluded.{name}, {table}.{name})" if name in kept else f"{name} = excluded.{name}"
        for name in columns
        if name not in ("id", *key)
    )
    return f"{_insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


_EVENT, _USER = (list(_columns(kind)) for kind in (EventRow, UserSample))
_values_of_attempt, _values_of_event, _values_of_user = (
    attrgetter(*names) for names in (ATTEMPT_COLUMNS, _EVENT, _USER)
)
PUT_JOB = _upsert("jobs", ["id", *JOB_COLUMNS], ("job_id", "submitted_at"), _KEPT)
PUT_ATTEMPT = _upsert("attempts", ["job", *ATTEMPT_COLUMNS], ("job", "gang", "number"), _KEPT_OF_ATTEMPT)
END_FORGOTTEN = """
    UPDATE attempts SET state = 'lost', ended_at = ? WHERE job = ? AND ended_at IS NULL AND number <
    (SELECT max(number) FROM attempts AS later WHERE later.job = attempts.job AND later.gang = attempts.gang)
"""
"""The state remembers few attempts. A forgotten attempt has ended, though no row says how."""
_PUT_EVENT = _insert("events", _EVENT, "INSERT OR IGNORE")
STEP = "step"
"""The name of the curve of a job's steps. Other curves have the names of the numbers in the job's status."""
_PUT_POINT = """
    INSERT OR REPLACE INTO curves (job, at, step, name, value)
    SELECT id, ?, ?, ?, ? FROM jobs WHERE job_id = ? AND submitted_at = ?
"""
_PUT_FLEET = _insert("fleet_samples", ["at", "span_s", "type", "chips"], "INSERT OR REPLACE")
_PUT_USER = _insert("user_samples", ["at", "span_s", *_USER], "INSERT OR REPLACE")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a history.

    Attributes:
        days: the age from which rows are deleted.
        megabytes: the size of the file, in 2**20 bytes, from which the oldest rows are deleted.
    """

    days: float
    megabytes: float


def is_passing(error: Exception) -> bool:
    """Return whether a failed write may succeed later: the file is locked, or its disk is full or not mounted."""
    return isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and _code(error) in _PASSES)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # without its details


class HistoryFile:
    """The file of one cluster's history.

    Args:
        path: of the file. It is made with its directory when something is written.
        bounds: what is kept.
        clock: returns seconds since the epoch.

    Attributes:
        begun: how often an empty file was made, because there was no file, or it was corrupt or had been moved away.
    """

    def __init__(self, path: Path, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._bounds = bounds
        self._clock = clock
        self._was_checked = False
        self.begun = 0

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Record]) -> None:
        """Write records, all or none. A file that can't be read is set aside, and a new one begun.

        Raises:
            sqlite3.Error, OSError: the write failed; see `is_passing`.
            HistoryUnavailableError: the file is not ours, or of a newer version. It is left as it is.
        """
        self._try_twice(lambda db: self._write(db, records))

    def close_lost(self, known: Sequence[str]) -> None:
        """Mark unfinished jobs that the Controller does not know as ended: they were lost with their cluster.

        Args:
            known: ids of all jobs that the Controller has taken over.
        """

        def end(db: sqlite3.Connection) -> None:
            db.execute("CREATE TEMP TABLE known (job_id TEXT PRIMARY KEY)")
            db.executemany("INSERT OR IGNORE INTO known VALUES (?)", [(job_id,) for job_id in known])
            lost = "ended_at IS NULL AND job_id NOT IN (SELECT job_id FROM known)"
            _note_changes(db, _months(db, "submitted_at", f"jobs WHERE {lost}"))
            db.execute(
                "UPDATE attempts SET state = 'lost', ended_at = (SELECT seen_at FROM jobs WHERE id = attempts.job)"
                f" WHERE ended_at IS NULL AND job IN (SELECT id FROM jobs WHERE {lost})"
            )
            db.execute(f"UPDATE jobs SET state = 'lost', ended_at = seen_at WHERE {lost}")

        self._try_twice(end)

    def _try_twice(self, change: Callable[[sqlite3.Connection], None]) -> None:
        try:
            with self._opened() as db:
                change(db)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # what SQLite says of damage may be no text
            if isinstance(error, sqlite3.Error) and _code(error) not in _CORRUPT:
                raise
            self._set_aside(error)
            with self._opened() as db:
                change(db)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the file for one transaction."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.path, timeout=BUSY_S)) as db:
            self._prepare(db)
            with db:
                yield db

    def _prepare(self, db: sqlite3.Connection) -> None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise HistoryUnavailableError(
                f"{self.path} is a database of something else, so no history is written there; name another directory:"
                " iris-ray cluster settings set history=DIRECTORY"
            )
        if version > SCHEMA_VERSION:
            raise HistoryUnavailableError(
                f"{self.path} is a history of a newer iris_ray (schema {version}, this one writes {SCHEMA_VERSION}), so"
                " nothing is added to it; upgrade the Controller, or name another directory: iris-ray cluster settings"
                " set history=DIRECTORY"
            )
        if not tables:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.executescript(
                f"BEGIN; {SCHEMA} INSERT INTO sqlite_sequence VALUES ('jobs', {_beginning()});"
                f" PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
            self.begun += 1
        elif not self._was_checked:
            (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                raise _corrupt(found)
            db.executescript(SCHEMA)  # tables that it lacks
            for table, columns in {"jobs": JOB_COLUMNS, "attempts": ATTEMPT_COLUMNS}.items():
                known = {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}
                for missing in columns.keys() - known:
                    db.execute(f"ALTER TABLE {table} ADD COLUMN {missing} {columns[missing]}")
        self._was_checked = True
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA synchronous = NORMAL")

    def _set_aside(self, error: Exception) -> None:
        """Rename the file, and the journals that SQLite has left beside it."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._clock()))
        aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
        self.path.rename(aside)
        with suppress(FileNotFoundError):
            self.path.with_name(f"{self.path.name}-journal").unlink()  # it would be played back into the new file
        self._was_checked = False
        why = str(error).splitlines()[0]
        logger.warning("the history can't be read (%s); it is now %s, and a new one begins", why, aside)

    def _write(self, db: sqlite3.Connection, records: Sequence[Record]) -> None:
        day = time.strftime("%Y-%m-%d", time.gmtime(self._clock()))
        times = set[float]()  # of months that change
        for record in records:
            match record:
                case JobStory():
                    times.add(float(record.job["submitted_at"] or 0.0))
                    _put_job(db, record, day)
                case EventRow():
                    times.add(record.at)
                    db.execute(_PUT_EVENT, _values_of_event(record))
                case CurvePoint(job_id, submitted_at, at, step, numbers):
                    times.add(submitted_at)
                    points = {**numbers, **({} if step is None else {STEP: step})}
                    then, of_it = (int(at), step), (job_id, submitted_at)
                    db.executemany(_PUT_POINT, [(*then, *point, *of_it) for point in points.items()])
                case Sample():
                    times.add(record.at)
                    at = int(record.at) // MINUTE_S * MINUTE_S
                    db.executemany(_PUT_FLEET, [(at, MINUTE_S, *one) for one in record.chips.items()])
                    db.executemany(_PUT_USER, [(at, MINUTE_S, *_values_of_user(user)) for user in record.users])
        _note_changes(db, {time.strftime("%Y-%m", time.gmtime(at)) for at in times})

    # -- keeping it small -------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Replace old samples of minutes by means of hours, and delete the oldest rows beyond the bounds.

        Raises:
            sqlite3.Error, OSError, HistoryUnavailableError: as `write`.
        """
        now = self._clock()
        self._try_twice(lambda db: _to_hours(db, int(now - MINUTES_KEPT_S) // HOUR_S * HOUR_S))
        self._try_twice(lambda db: _delete_before(db, now - self._bounds.days * DAY_S))
        is_too_large = True
        while is_too_large:
            with self._opened() as db:
                is_too_large = _bytes(db) > self._bounds.megabytes * 2**20 and _delete_oldest(db)
            with self._opened() as db:
                db.executescript("PRAGMA incremental_vacuum")  # with execute, sqlite3 would free a single page


def _corrupt(found: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(found)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _months(db: sqlite3.Connection, at: str, rows: str) -> set[str]:
    return {month for (month,) in db.execute(f"SELECT DISTINCT {month_of(at)} FROM {rows}")}


def month_of(at: str) -> str:
    """Return the expression for the month of a time, such as 2026-11, in UTC."""
    return f"strftime('%Y-%m', {at}, 'unixepoch')"


def _note_changes(db: sqlite3.Connection, months: Collection[str]) -> None:
    """Give months a new number, so that their rows are copied again."""
    (latest,) = db.execute("SELECT max(number) FROM changes").fetchone()
    number = _beginning() if latest is None else latest + 1
    db.executemany("INSERT OR REPLACE INTO changes VALUES (?, ?)", [(month, number) for month in months])


def _put_job(db: sqlite3.Connection, story: JobStory, day: str) -> None:
    db.execute(PUT_JOB, [None, *(story.job[name] for name in JOB_COLUMNS)])
    of_it = story.job["job_id"], story.job["submitted_at"]
    (job,) = db.execute("SELECT id FROM jobs WHERE job_id = ? AND submitted_at = ?", of_it).fetchone()
    db.executemany(PUT_ATTEMPT, [(job, *_values_of_attempt(row)) for row in story.attempts])
    db.execute(END_FORGOTTEN, (story.job["seen_at"], job))
    _put_sums(db, "time", "kind", ("seconds", "chip_seconds"), job, day, story.time)
    _put_sums(db, "losses", "cause", ("count", "seconds", "chip_seconds"), job, day, story.losses)


def _put_sums(
    db: sqlite3.Connection,
    table: str,
    key: str,
    columns: Sequence[str],
    job: int,
    day: str,
    sums: Mapping[str, Sequence[float]],
) -> None:
    """Set the sums of a job on a day so that its sums over all days are ``sums``."""
    totals = ", ".join(f"sum({name})" for name in columns)
    earlier = db.execute(f"SELECT {key}, {totals} FROM {table} WHERE job = ? AND day <> ? GROUP BY {key}", (job, day))
    missing = {name: list(amounts) for name, amounts in sums.items()}
    for name, *amounts in earlier:
        known = missing.get(name, [0] * len(columns))
        missing[name] = [now - before for now, before in zip(known, amounts, strict=True)]
    db.execute(f"DELETE FROM {table} WHERE job = ? AND day = ?", (job, day))
    marks = ", ".join("?" for _ in columns)
    rows = [(job, day, name, *amounts) for name, amounts in missing.items() if any(amounts)]
    db.executemany(f"INSERT INTO {table} (job, day, {key}, {', '.join(columns)}) VALUES (?, ?, ?, {marks})", rows)


def _to_hours(db: sqlite3.Connection, before: int) -> None:
    """Replace the samples of minutes before a time by the means of their hours; the time begins an hour."""
    of_minutes = f"span_s = {MINUTE_S} AND at < {before}"
    taken = f"""(SELECT at / {HOUR_S} AS hour, count(DISTINCT at) AS samples
                 FROM fleet_samples WHERE {of_minutes} GROUP BY hour)"""
    _note_changes(db, _months(db, "at", f"fleet_samples WHERE {of_minutes}"))
    db.execute(
        f"""INSERT OR REPLACE INTO user_samples
            SELECT hour * {HOUR_S}, {HOUR_S}, type, band, user, team, sum(busy_chips) / samples,
                   sum(waiting_jobs) / samples, sum(waiting_chips) / samples
            FROM user_samples JOIN {taken} ON at / {HOUR_S} = hour
            WHERE {of_minutes} GROUP BY hour, type, band, user, team"""
    )
    db.execute(
        f"""INSERT OR REPLACE INTO fleet_samples
            SELECT hour * {HOUR_S}, {HOUR_S}, type, sum(chips) / samples
            FROM fleet_samples JOIN {taken} ON at / {HOUR_S} = hour
            WHERE {of_minutes} GROUP BY hour, type"""
    )
    db.execute(f"DELETE FROM user_samples WHERE {of_minutes}")
    db.execute(f"DELETE FROM fleet_samples WHERE {of_minutes}")


def _delete_before(db: sqlite3.Connection, at: float) -> None:
    """Delete jobs that ended, events and samples before a time."""
    db.execute("DELETE FROM jobs WHERE ended_at < ?", (at,))
    for table in ("events", "fleet_samples", "user_samples"):
        db.execute(f"DELETE FROM {table} WHERE at < ?", (at,))


def _delete_oldest(db: sqlite3.Connection) -> bool:
    """Delete the jobs that ended first, and all rows of the same age; return whether there were any."""
    (oldest,) = db.execute(
        "SELECT max(ended_at) FROM (SELECT ended_at FROM jobs WHERE ended_at IS NOT NULL ORDER BY ended_at LIMIT ?)",
        (_AT_ONCE,),
    ).fetchone()
    if oldest is None:
        (first, last) = db.execute(
            "SELECT min(at), max(at) FROM (SELECT at FROM events UNION ALL SELECT at FROM fleet_samples)"
        ).fetchone()
        if first is None:
            return False
        oldest = first + (last - first) / 10
    _delete_before(db, oldest + 0.001)
    return True


def _bytes(db: sqlite3.Connection) -> int:
    found = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size"))
    count, free, size = found
    return int((count - free) * size)
