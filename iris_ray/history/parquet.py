"""Copies a history to Parquet files in a directory or a bucket, for tools that read those; a program of its own.

``python -m iris_ray.history.parquet history.sqlite gs://bucket/history`` writes a file of each table and month, such as
``jobs/2026-11.parquet``. The month of a job, and of all that belongs to it, is that of its submission, in UTC; of
events and samples it is that in which they were. Only months with changes are written.

The copy only grows: a month's rows are merged into its existing files, which an earlier history may have written.
The file of ``jobs`` is written last, with the number of the month's latest change. So a month whose copy was broken
off is copied again.
"""

import fcntl
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from iris_ray.errors import HistoryUnavailableError
from iris_ray.history.history_file import (
    APPLICATION_ID,
    ATTEMPT_COLUMNS,
    BUSY_S,
    END_FORGOTTEN,
    HOUR_S,
    JOB_COLUMNS,
    MINUTE_S,
    PUT_ATTEMPT,
    PUT_JOB,
    SCHEMA,
    SCHEMA_VERSION,
    month_of,
)

_SUMS = {"time": ("kind", "seconds", "chip_seconds"), "losses": ("cause", "count", "seconds", "chip_seconds")}
_SAMPLES = "fleet_samples", "user_samples"
_TABLES = "attempts", *_SUMS, "curves", "events", *_SAMPLES, "jobs"
_KINDS = {"INTEGER": "int64", "REAL": "float64", "TEXT": "string"}
_AT_ONCE = 50_000
MOST_S = 3600
"""The process is killed after this number of seconds: its Controller may have died, and a bucket may hang."""
_CHANGE = b"iris_ray.change"
"""The key of a change's number in the metadata of a file."""


def copy_to_parquet(path: Path, target: str) -> list[str]:
    """Copy the months of a history that have changed since they were copied. Return the names of the files.

    A month whose copy has a file that can't be read is left alone; the others are copied before that is raised.

    Args:
        path: of the history.
        target: a directory, or the URL of one in a bucket, such as ``gs://bucket/history``.

    Raises:
        HistoryUnavailableError: there is no history of this version there, or a file of the copy can't be read.
        ImportError: pyarrow is not installed.
        OSError, ValueError, sqlite3.Error: the history can't be read, or the place of the copy is not available.
    """
    if not path.is_file():
        raise HistoryUnavailableError(f"there is no history at {path}")
    files, written, unreadable = _Target(target), list[str](), list[HistoryUnavailableError]()
    with _alone(path):
        with _merging(path) as db:
            changes = db.execute("SELECT month, number FROM history.changes ORDER BY month").fetchall()
        for month, number in changes:
            try:
                if files.change_of(month) != number:
                    written += _copy(path, files, month)
            except HistoryUnavailableError as error:
                unreadable.append(error)
    if unreadable:
        raise unreadable[0]
    return written


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process copies this history, such as one that a Controller has left behind."""
    with open(f"{path}.copying", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _merging(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an empty history in a temporary file, and the one at a path as ``history``."""
    with closing(sqlite3.connect("", timeout=BUSY_S, uri=True, isolation_level=None)) as db:
        db.execute("ATTACH ? AS history", (f"file:{quote(str(path))}?mode=ro",))
        found = [db.execute(f"PRAGMA history.{name}").fetchone()[0] for name in ("application_id", "user_version")]
        if found != [APPLICATION_ID, SCHEMA_VERSION]:
            raise HistoryUnavailableError(f"{path} is not a history of this version of iris_ray")
        db.executescript(SCHEMA)
        yield db


def _copy(path: Path, files: "_Target", month: str) -> Iterator[str]:
    """Write the files of a month, and yield their names."""
    with _merging(path) as db:
        db.execute("BEGIN")
        for table in _TABLES:
            files.read(table, month, db)
        # from here on all tables are as they are at one moment, and the history can't be written
        (number,) = db.execute("SELECT number FROM history.changes WHERE month = ?", (month,)).fetchone()
        _add_jobs(db, month)
        _add_samples(db, month)
        db.execute("COMMIT")
        for table in _TABLES:
            yield files.write(table, month, db, number)


def _add_jobs(db: sqlite3.Connection, month: str) -> None:
    """Add the jobs of a month with all their rows, unless the copy alone knows their end, or has seen them later."""
    names = ", ".join(f"new.{name}" for name in ("id", *JOB_COLUMNS))
    both = "jobs AS old ON old.job_id = new.job_id AND old.submitted_at = new.submitted_at"
    jobs = db.execute(
        f"SELECT {names} FROM history.jobs AS new LEFT JOIN main.{both} WHERE {month_of('new.submitted_at')} = ? AND"
        " (old.id IS NULL OR (old.ended_at IS NOT NULL, old.seen_at) <= (new.ended_at IS NOT NULL, new.seen_at))",
        (month,),
    ).fetchall()
    db.execute("CREATE TEMP TABLE added (theirs INTEGER PRIMARY KEY, id INTEGER, seen_at REAL)")
    db.executemany(PUT_JOB, jobs)
    db.executemany(
        "INSERT INTO added SELECT new.id, old.id, new.seen_at"
        f" FROM history.jobs AS new JOIN main.{both} WHERE new.id = ?",
        [job[:1] for job in jobs],
    )
    rows = "FROM history.{} JOIN added ON theirs = job"
    db.executemany(PUT_ATTEMPT, db.execute(f"SELECT id, {', '.join(ATTEMPT_COLUMNS)} {rows.format('attempts')}"))
    db.executemany(END_FORGOTTEN, db.execute("SELECT seen_at, id FROM added"))
    db.execute(f"INSERT OR REPLACE INTO curves SELECT id, name, at, step, value {rows.format('curves')}")
    for table, (key, *amounts) in _SUMS.items():
        _add_sums(db, table, key, amounts, rows.format(table))


def _add_sums(db: sqlite3.Connection, table: str, key: str, amounts: Sequence[str], rows: str) -> None:
    """Add the sums of jobs by day. A new history has a job's sums on one day: those of earlier days are taken off."""
    db.execute(f"CREATE TEMP TABLE since AS SELECT id, min(day) AS day {rows} GROUP BY id")
    columns = ", ".join((key, *amounts))
    db.execute(f"DELETE FROM {table} WHERE EXISTS (SELECT 1 FROM since WHERE id = job AND since.day <= {table}.day)")
    db.execute(f"INSERT INTO {table} (job, day, {columns}) SELECT id, day, {columns} {rows}")
    taken, changes = (", ".join(map(form.format, amounts)) for form in ("-sum({0})", "{0} = {0} + excluded.{0}"))
    db.execute(
        f"INSERT INTO {table} (job, day, {columns}) SELECT job, since.day, {key}, {taken} FROM {table}"
        f" JOIN since ON id = job WHERE {table}.day < since.day GROUP BY job, {key}"
        f" ON CONFLICT (job, day, {key}) DO UPDATE SET {changes}"
    )
    db.execute("DROP TABLE since")


def _add_samples(db: sqlite3.Connection, month: str) -> None:
    """Add the events and samples of a month. The mean of an hour replaces its minutes."""
    at = f"WHERE {month_of('at')} = ?"
    db.execute(f"INSERT OR IGNORE INTO events SELECT * FROM history.events {at}", (month,))
    for table in _SAMPLES:
        db.execute(
            f"DELETE FROM {table} WHERE span_s = {MINUTE_S} AND at / {HOUR_S} * {HOUR_S} IN"
            f" (SELECT at FROM history.fleet_samples WHERE span_s = {HOUR_S})"
        )
        db.execute(f"INSERT OR REPLACE INTO {table} SELECT * FROM history.{table} {at}", (month,))


class _Target:
    """The directory of the copy, here or in a bucket."""

    def __init__(self, target: str) -> None:
        from pyarrow import fs

        is_path = target.startswith("/")
        found: tuple[Any, str] = (fs.LocalFileSystem(), target) if is_path else fs.FileSystem.from_uri(target)
        self._files, self._root = found
        self._is_local = isinstance(self._files, fs.LocalFileSystem)

    def change_of(self, month: str) -> int | None:
        """Return the number of the change up to which a month is copied, or None.

        Raises:
            HistoryUnavailableError: the file can't be read.
        """
        with self._opened("jobs", month) as file:
            metadata = file.schema_arrow.metadata if file is not None else None
        return int(metadata[_CHANGE]) if metadata and _CHANGE in metadata else None

    def read(self, table: str, month: str, db: sqlite3.Connection) -> None:
        """Insert the rows of a file, if there is one.

        Raises:
            HistoryUnavailableError: the file can't be read, or has columns that this version doesn't know.
        """
        with self._opened(table, month) as file:
            if file is None:
                return
            names = file.schema_arrow.names
            if unknown := set(names) - {name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")}:
                raise HistoryUnavailableError(
                    f"{self._path(table, month)} has the columns {', '.join(sorted(unknown))} of a newer iris_ray;"
                    " upgrade the Controller, or choose another place for the copy"
                )
            put = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)})"
            for batch in file.iter_batches(_AT_ONCE):
                db.executemany(put, zip(*(column.to_pylist() for column in batch.columns), strict=True))

    def write(self, table: str, month: str, db: sqlite3.Connection, change: int) -> str:
        """Write one month of a table, whole or not at all. Return the name of its file."""
        import pyarrow
        from pyarrow import parquet

        columns = db.execute(f"PRAGMA table_info({table})")
        fields = [(column, getattr(pyarrow, _KINDS[kind])()) for _, column, kind, *_ in columns]
        schema = pyarrow.schema(fields, {_CHANGE: str(change)})
        path = self._path(table, month)
        self._files.create_dir(f"{self._root}/{table}", recursive=True)
        part = f"{path}.part" if self._is_local else path  # an object in a bucket appears when it is whole
        rows = db.execute(f"SELECT * FROM {table}")
        with self._files.open_output_stream(part) as stream, parquet.ParquetWriter(stream, schema) as writer:
            for some in iter(partial(rows.fetchmany, _AT_ONCE), []):
                both = zip(zip(*some, strict=True), schema, strict=True)
                arrays = [pyarrow.array(values, field.type) for values, field in both]
                writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
        if self._is_local:
            self._files.move(part, path)
        return f"{table}/{month}.parquet"

    def _path(self, table: str, month: str) -> str:
        return f"{self._root}/{table}/{month}.parquet"

    @contextmanager
    def _opened(self, table: str, month: str) -> Iterator[Any]:
        """Open the file of a month to be read, or yield None if there is none.

        Raises:
            HistoryUnavailableError: the block could not read the file.
        """
        from pyarrow import ArrowException, fs, parquet

        path = self._path(table, month)
        if self._files.get_file_info(path).type == fs.FileType.NotFound:
            yield None
            return
        try:
            with self._files.open_input_file(path) as stream:
                yield parquet.ParquetFile(stream)
        except (ArrowException, OSError, ValueError, sqlite3.IntegrityError) as error:
            raise HistoryUnavailableError(
                f"{path} can't be read ({type(error).__name__}: {error}), so its month is not copied. If the file is"
                " damaged, move it away: the next copy writes what the history still has of that month"
            ) from error


def main(words: Sequence[str]) -> int:
    path, target, *_ = words
    signal.alarm(MOST_S)
    try:
        copy_to_parquet(Path(path), target)
    except ImportError:
        print("pyarrow is not installed for the Controller on the head: pip install pyarrow")
    except (HistoryUnavailableError, OSError, ValueError, sqlite3.Error) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
