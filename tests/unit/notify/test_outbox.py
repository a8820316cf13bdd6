"""The file of notifications, also when it is damaged, of a later version, or on a full disk."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from iris_ray.notify.outbox import MOST_ROWS, Entry, Outbox, Outcome
from tests.unit.notify.test_messages import some_news


def test_entries_are_replaced_and_listed(tmp_path: Path) -> None:
    box, now = Outbox(tmp_path), time.time()
    assert (box.known(), box.listed(None, 10), box.path.exists()) == ([], [], False)
    news = [some_news("a", lines=3, team="x"), some_news("b")]
    box.write([Entry(one, Outcome.WAITS, now - 5) for one in news])
    box.write([Entry(news[0], Outcome.SENT, now, 2, "HTTP 503")])
    assert box.known() == [Entry(news[0], Outcome.SENT, now, 2, "HTTP 503"), Entry(news[1], Outcome.WAITS, now - 5)]
    assert [entry.news.job_id for entry in box.listed("b", 10)] == ["b"]
    assert len(box.listed(None, 1)) == 1
    assert box.path.stat().st_mode & 0o077 == 0


def test_old_rows_go_and_waiting_ones_are_known_however_old(tmp_path: Path) -> None:
    box, now = Outbox(tmp_path), time.time()
    day = 86_400.0
    outcomes = [
        ("new", Outcome.SENT, 0),
        ("old", Outcome.SENT, 2),
        ("waits", Outcome.WAITS, 2),
        ("gone", Outcome.SENT, 31),
    ]
    box.write([Entry(some_news(name), outcome, now - days * day) for name, outcome, days in outcomes])
    assert [entry.news.job_id for entry in box.known()] == ["new", "waits"]
    box.tidy(now)
    assert {entry.news.job_id for entry in box.listed(None, 10)} == {"new", "old", "waits"}


def test_rows_of_living_jobs_and_waiting_ones_are_kept_however_old(tmp_path: Path) -> None:
    """A clock that is set by a month makes all rows old."""
    box, now = Outbox(tmp_path), time.time()
    box.write([Entry(some_news("lives"), Outcome.SENT, now), Entry(some_news("over"), Outcome.SENT, now)])
    box.write([Entry(some_news("waits"), Outcome.WAITS, now)])
    box.tidy(now + 40 * 86_400, ["lives", "other"])
    assert {entry.news.job_id for entry in box.listed(None, 10)} == {"lives", "waits"}
    box.write([Entry(some_news("lives"), Outcome.SENT, now - 40 * 86_400)])
    assert [entry.news.job_id for entry in box.known()] == ["waits"]
    assert {entry.news.job_id for entry in box.known(["lives"])} == {"lives", "waits"}


def test_number_of_rows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.notify.outbox.MOST_ROWS", 10)
    assert MOST_ROWS > 10
    box, now = Outbox(tmp_path), time.time()
    box.write([Entry(some_news(f"job-{n}"), Outcome.SENT, now + n) for n in range(30)])
    box.tidy(now)
    assert [entry.news.job_id for entry in box.listed(None, 100)] == [f"job-{n}" for n in range(29, 19, -1)]


def test_damaged_file_is_set_aside(tmp_path: Path) -> None:
    box = Outbox(tmp_path)
    box.path.write_bytes(b"no database" * 1000)
    assert box.known() == []
    box.write([Entry(some_news(), Outcome.SENT, time.time())])
    assert len(box.known()) == 1
    assert len(list(tmp_path.glob("*damaged*"))) == 1


def test_row_of_another_version_is_left_out(tmp_path: Path) -> None:
    box, now = Outbox(tmp_path), time.time()
    box.write([Entry(some_news(), Outcome.SENT, now)])
    later = json.dumps(some_news("b").as_dict() | {"color": "red"})
    with sqlite3.connect(box.path) as file:
        rows = [("x", now, "j", "sent", 1, "", '{"what": "sung"}'), ("y", now, "j", "lost", 1, "", later),
                ("z", now, "j", "sent", 1, "", later), ("w", now, "j", "sent", 1, "", "[")]  # fmt: skip
        file.executemany("INSERT INTO notifications VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    file.close()
    assert {entry.news.job_id for entry in box.known()} == {"train-1", "b"}


def test_file_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    box = Outbox(tmp_path / "none")
    with pytest.raises((OSError, sqlite3.Error)):
        box.write([Entry(some_news(), Outcome.SENT, 0.0)])
