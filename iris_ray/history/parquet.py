"""Copies a history to Parquet files in a directory or a bucket, for tools that read those; a program of its own.

``python -m iris_ray.history.parquet history.sqlite gs://bucket/history [SINCE]`` writes a file of each table and month:
``jobs/2026-11.parquet``. The month of a job, and of all that belongs to it, is that of its submission, in UTC; of
events and samples it is that in which they were. Only months are written in which something has changed since a time.
"""

import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from iris_ray.errors import HistoryUnavailableError
from iris_ray.history.history_file import APPLICATION_ID, BUSY_S, SCHEMA_VERSION

_OF_JOBS = "attempts", "time", "losses", "curves"
_OF_TIMES = "events", "fleet_samples", "user_samples"
_KINDS = {"INTEGER": "int64", "REAL": "float64", "TEXT": "string"}
_AT_ONCE = 50_000


def copy_to_parquet(path: Path, target: str, since: float | None = None) -> list[str]:
    """Write the months of a history in which something has changed; return the names of the files.

    Args:
        path: of the history.
        target: a directory, or the URL of one in a bucket, such as ``gs://bucket/history``.
        since: seconds since the epoch; None: all months.

    Raises:
        HistoryUnavailableError: there is no history of this version there.
        ImportError: pyarrow is not installed.
        OSError, sqlite3.Error: it can't be read, or written.
    """
    if not path.is_file():
        raise HistoryUnavailableError(f"there is no history at {path}")
    files = _Target(target)
    written = []
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S)) as db:
        found = db.execute("PRAGMA application_id").fetchone()[0], db.execute("PRAGMA user_version").fetchone()[0]
        if found != (APPLICATION_ID, SCHEMA_VERSION):
            raise HistoryUnavailableError(f"{path} is no history of this version of iris_ray")
        db.execute("BEGIN")  # all tables as they are at one moment
        changed = 0.0 if since is None else since
        for month in _months(db, "jobs", "submitted_at", "coalesce(ended_at, seen_at)", changed):
            written.append(files.write("jobs", month, db, "SELECT * FROM jobs", "submitted_at"))
            for table in _OF_JOBS:
                sql = f"SELECT {table}.* FROM {table} JOIN jobs ON jobs.id = {table}.job"
                written.append(files.write(table, month, db, sql, "submitted_at"))
        for table in _OF_TIMES:
            months = _months(db, table, "at", "at", changed)
            written.extend(files.write(table, month, db, f"SELECT * FROM {table}", "at") for month in months)
    return written


def _months(db: sqlite3.Connection, table: str, at: str, changed: str, since: float) -> list[str]:
    month = _month(at)
    rows = db.execute(f"SELECT DISTINCT {month} FROM {table} WHERE {changed} >= ? ORDER BY 1", (since,))
    return [found for (found,) in rows]


def _month(at: str) -> str:
    return f"strftime('%Y-%m', {at}, 'unixepoch')"


class _Target:
    def __init__(self, target: str) -> None:
        from pyarrow import fs

        is_path = target.startswith("/")
        found: tuple[Any, str] = (fs.LocalFileSystem(), target) if is_path else fs.FileSystem.from_uri(target)
        self._files, self._root = found
        self._is_local = isinstance(self._files, fs.LocalFileSystem)

    def write(self, table: str, month: str, db: sqlite3.Connection, sql: str, at: str) -> str:
        """Write one month of a table, whole or not at all. Return the name of its file."""
        import pyarrow
        from pyarrow import parquet

        columns = db.execute(f"PRAGMA table_info({table})")
        schema = pyarrow.schema([(column, getattr(pyarrow, _KINDS[kind])()) for _, column, kind, *_ in columns])
        name = f"{table}/{month}.parquet"
        path = f"{self._root}/{name}"
        self._files.create_dir(f"{self._root}/{table}", recursive=True)
        part = f"{path}.part" if self._is_local else path  # an object in a bucket appears when it is whole
        rows = db.execute(f"{sql} WHERE {_month(at)} = ?", (month,))
        with self._files.open_output_stream(part) as stream, parquet.ParquetWriter(stream, schema) as writer:
            while some := rows.fetchmany(_AT_ONCE):
                writer.write_batch(_batch(some, schema))
        if self._is_local:
            self._files.move(part, path)
        return name


def _batch(rows: Sequence[Sequence[Any]], schema: Any) -> Any:
    import pyarrow

    return pyarrow.record_batch(
        [pyarrow.array(values, field.type) for values, field in zip(zip(*rows, strict=True), schema, strict=True)],
        schema=schema,
    )


def main(words: Sequence[str]) -> int:
    path, target, *since = words
    try:
        copy_to_parquet(Path(path), target, float(since[0]) if since else None)
    except ImportError:
        print("pyarrow is not installed for the Controller on the head: pip install 'iris-ray[parquet]'")
    except (HistoryUnavailableError, OSError, ValueError, sqlite3.Error) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
