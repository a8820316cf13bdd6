"""The file of notifications: those that wait, and who was told what. It blocks, and knows no Ray.

The file only makes notifications outlive the Controller. If it can't be written, they are sent all the same.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from iris_ray.notify.core import MOST_AGE_S, News

logger = logging.getLogger(__name__)

NAME: Final = "notifications.sqlite"
KEPT_S: Final = 30 * 24 * 3600.0
MOST_ROWS: Final = 100_000
BUSY_S: Final = 5.0
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS notifications (
    id TEXT PRIMARY KEY, changed_at REAL NOT NULL, job_id TEXT NOT NULL, outcome TEXT NOT NULL,
    tries INTEGER NOT NULL, error TEXT NOT NULL, news TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_job ON notifications (job_id);
CREATE INDEX IF NOT EXISTS by_time ON notifications (changed_at);
CREATE INDEX IF NOT EXISTS by_outcome ON notifications (outcome);
"""
_OF_JOBS: Final = "job_id IN (SELECT value FROM json_each(?))"


class Outcome(StrEnum):
    """What has become of a notification.

    WAITS: it is still to be sent. SENT: the receiver has taken it. GIVEN_UP: it will not be sent. MERGED: a later one
    of the same job and event stands for it. DROPPED: too many waited.
    """

    WAITS = "waits"
    SENT = "sent"
    GIVEN_UP = "given up"
    MERGED = "merged"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Entry:
    """A notification and what has become of it.

    Attributes:
        news: the notification.
        outcome: what has become of it.
        changed_at: since when; seconds since the epoch.
        tries: how often it was tried to send it.
        error: why the last try failed; without secrets.
    """

    news: News
    outcome: Outcome
    changed_at: float
    tries: int = 0
    error: str = ""


class Outbox:
    """The file in a directory. It is opened for each use, so it may be moved away at any time.

    Args:
        directory: the directory, which exists.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries. A later entry of a notification replaces the earlier one.

        Raises:
            OSError, sqlite3.Error: they can't be written.
        """
        rows = [
            (e.news.id, e.changed_at, e.news.job_id, e.outcome.value, e.tries, e.error, json.dumps(e.news.as_dict()))
            for e in entries
        ]
        with closing(self._open()) as file, file:
            file.executemany("INSERT OR REPLACE INTO notifications VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def tidy(self, now: float, jobs: Collection[str] = ()) -> None:
        """Delete old rows, but none that waits, as the clock may have been set.

        Args:
            now: seconds since the epoch.
            jobs: jobs of which rows are kept, however old.
        """
        with closing(self._open()) as file, file:
            file.execute(
                f"DELETE FROM notifications WHERE changed_at < ? AND outcome <> 'waits' AND NOT {_OF_JOBS}",
                (now - KEPT_S, json.dumps(list(jobs))),
            )
            file.execute(
                "DELETE FROM notifications WHERE id IN (SELECT id FROM notifications WHERE outcome <> 'waits'"
                " ORDER BY changed_at DESC LIMIT -1 OFFSET ?)",
                (MOST_ROWS,),
            )

    def known(self, jobs: Collection[str] = ()) -> list[Entry]:
        """Return all that may be asked for again: entries that wait, those of the last `MOST_AGE_S`, and those of jobs.

        A file that is damaged is set aside, and nothing is known.

        Raises:
            OSError, sqlite3.Error: it can't be read now.
        """
        try:
            since = time.time() - MOST_AGE_S
            condition = f"outcome = 'waits' OR changed_at > ? OR {_OF_JOBS}"
            return self._select(condition, (since, json.dumps(list(jobs))), 2 * MOST_ROWS)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _CORRUPT:
                raise
            logger.error("%s is damaged, and set aside; some notifications may be sent twice", self.path)
            self.path.rename(self.path.with_suffix(f".damaged-{int(time.time())}"))
            return []

    def listed(self, job_id: str | None, most: int) -> list[Entry]:
        """Return the latest entries, the latest first.

        Args:
            job_id: only of this job; None: of all.
            most: the limit.

        Raises:
            OSError, sqlite3.Error: it can't be read now.
        """
        if job_id is None:
            return self._select("TRUE", (), most)
        return self._select("job_id = ?", (job_id,), most)

    def _select(self, condition: str, values: Iterable[object], most: int) -> list[Entry]:
        if not self.path.exists():
            return []
        with closing(self._open()) as file:
            rows = file.execute(
                f"SELECT news, outcome, changed_at, tries, error FROM notifications WHERE {condition}"
                " ORDER BY changed_at DESC LIMIT ?",
                (*values, most),
            ).fetchall()
        found = []
        for news, outcome, changed_at, tries, error in rows:
            try:
                found.append(Entry(News.of_dict(json.loads(news)), Outcome(outcome), changed_at, tries, error))
            except (ValueError, TypeError, KeyError, AttributeError):  # of another version
                logger.warning("a notification in %s can't be read, and is left out", self.path)
        return found

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(self.path, timeout=BUSY_S)
        try:
            file.executescript(_SCHEMA)
            self.path.chmod(0o600)
        except BaseException:
            file.close()
            raise
        return file
