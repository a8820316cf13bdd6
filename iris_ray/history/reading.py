"""Statements that only read the history: it is opened read-only, and rows, bytes, time and disk are limited."""

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from iris_ray.errors import HistoryUnavailableError, InvalidQueryError
from iris_ray.history.calls import MOST_ROWS_EVER, HistoryRows, Value

MOST_ROWS = 1000
"""The default limit for rows."""
MOST_BYTES = 16 << 20
"""The limit for the text of an answer."""
MOST_BYTES_OF_A_VALUE = 128 << 10
"""SQLite can't be interrupted within a function: to search a text of this length takes 0.4 s, and minutes in 16 MB."""
MOST_SECONDS = 10.0
MOST_TEMPORARY_BYTES = 256 << 20
"""The limit for temporary files of a statement on the head's disk, in which SQLite sorts rows."""
LOOK_S = 0.1
"""Seconds between two looks at the temporary files."""
BUSY_S = 10.0
_STEPS = 20_000
"""The time is looked at after so many steps of SQLite's machine, about every millisecond."""

_PASSES = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY,
})  # fmt: skip
"""SQLITE_READONLY: a writer has died in the middle of a change, which only another writer may roll back."""
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_VERBS = {
    sqlite3.SQLITE_INSERT: "insert into",
    sqlite3.SQLITE_UPDATE: "update",
    sqlite3.SQLITE_DELETE: "delete from",
    sqlite3.SQLITE_ATTACH: "attach",
    sqlite3.SQLITE_PRAGMA: "use the pragma",
}
_ENDLESS = ("printf", "format")
"""Functions that can't be interrupted, and that a single call may keep busy for a minute."""
TABLES = "jobs, attempts, time, losses, curves, events, fleet_samples, user_samples"


def read_history(
    path: Path,
    sql: str,
    parameters: Mapping[str, Value] | None = None,
    most_rows: int = MOST_ROWS,
    within_s: float = MOST_SECONDS,
) -> HistoryRows:
    """Return the rows of a statement. This blocks.

    Args:
        path: of the file.
        sql: one statement; ``:name`` stands for a parameter.
        parameters: their values by name.
        most_rows: no more rows are returned.
        within_s: the statement is ended after so many seconds.

    Raises:
        InvalidQueryError: the statement writes, makes no sense, or takes too long.
        HistoryUnavailableError: there is no history yet, or it can't be read.
    """
    if not path.is_file():
        raise HistoryUnavailableError(f"there is no history at {path} yet: no job has had hosts, or it was moved away")
    denied: list[str] = []
    watch = _Watch(within_s)

    def may(action: int, first: str | None, second: str | None, *_: Any) -> int:
        if action == sqlite3.SQLITE_FUNCTION and second in _ENDLESS:
            return sqlite3.SQLITE_DENY  # SQLite names it
        if action in _READS:
            return sqlite3.SQLITE_OK
        denied.append(" ".join(filter(None, (_VERBS.get(action, "change"), first))))
        return sqlite3.SQLITE_DENY

    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
        ) as db:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES_OF_A_VALUE)
            db.set_authorizer(may)
            db.set_progress_handler(watch.is_over, _STEPS)
            cursor = db.execute(sql, parameters or {})
            if cursor.description is None:
                raise InvalidQueryError(f"{sql.strip()!r} returns no rows; give a SELECT over {TABLES}")
            columns = tuple(column[0] for column in cursor.description)
            return HistoryRows(columns, *_fetched(cursor, min(most_rows, MOST_ROWS_EVER)))
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError) as error:
        raise _explained(error, denied, path, watch.why) from None


class _Watch:
    """Ends a statement that takes too long, or too much of the disk.

    Attributes:
        why: it was ended, in words.
    """

    def __init__(self, within_s: float) -> None:
        began = time.monotonic()
        self._deadline, self._look_at = began + within_s, began + LOOK_S
        self.why = f"took longer than {within_s:g} s"

    def is_over(self) -> bool:
        now = time.monotonic()
        if now < self._look_at:
            return now > self._deadline
        self._look_at = now + LOOK_S
        if _temporary_bytes() > MOST_TEMPORARY_BYTES:
            self.why = f"sorts or keeps more than {MOST_TEMPORARY_BYTES >> 20} MB at a time"
            return True
        return now > self._deadline


def _temporary_bytes() -> int:
    """Return the size of SQLite's temporary files in this process, which have no names any more."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        try:
            if "/etilqs_" in os.readlink(path):
                total += os.stat(path).st_size
        except OSError:  # it has just been closed
            continue
    return total


def _fetched(cursor: sqlite3.Cursor, most_rows: int) -> tuple[tuple[tuple[Value, ...], ...], bool]:
    """Return rows, and whether there are more."""
    rows: list[tuple[Value, ...]] = []
    left = MOST_BYTES
    for row in cursor:
        values = tuple(value.hex() if isinstance(value, bytes) else value for value in row)
        left -= sum(len(value) for value in values if isinstance(value, str))
        if len(rows) >= most_rows or left < 0:
            return tuple(rows), True
        rows.append(values)
    return tuple(rows), False


def _explained(error: Exception, denied: Sequence[str], path: Path, why_ended: str) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if denied:
        return InvalidQueryError(
            f"the history is only read here, and this statement would {denied[-1]}; nothing was done. Give a SELECT"
        )
    if code == sqlite3.SQLITE_INTERRUPT:
        return InvalidQueryError(f"the statement {why_ended} and was ended; narrow it, for example by ended_at")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return HistoryUnavailableError(f"{path} is no readable history ({error}); give the path of a history.sqlite")
    if code in _PASSES:
        return HistoryUnavailableError(f"{path} can't be read now ({error}); try again")
    return InvalidQueryError(f"the statement can't be run: {error}. The tables are {TABLES}: see docs/history.md")
