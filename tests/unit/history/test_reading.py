"""Statements on the history only read, and end in time."""

import math
import shutil
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from iris_ray.errors import HistoryUnavailableError, InvalidQueryError, IrisError
from iris_ray.history import reading
from iris_ray.history.reading import read_history
from iris_ray.history.rows import EventRow
from tests.support.histories import NOON, History


@pytest.fixture
def filled(history: History) -> History:
    history.file.write([EventRow(NOON + n, "host lost", f"a/{n}", None, "gone") for n in range(5)])
    return history


@pytest.mark.parametrize(
    ("sql", "doing"),
    [
        ("INSERT INTO events VALUES (1, '', '', '', '')", "insert into events"),
        ("UPDATE events SET what = ''", "update events"),
        ("DELETE FROM events", "delete from events"),
        ("DROP TABLE events", "delete from sqlite_master"),
        ("CREATE TABLE more (a)", "insert into sqlite_master"),
        ("CREATE TEMP TABLE more (a)", "insert into sqlite_temp_master"),
        ("ATTACH '/etc/passwd' AS other", "attach /etc/passwd"),
        ("PRAGMA writable_schema = 1", "use the pragma writable_schema"),
        ("VACUUM INTO '/tmp/copy-of-the-history'", "attach"),
        ("BEGIN IMMEDIATE", "change BEGIN"),
        ("WITH a AS (SELECT 1) DELETE FROM events", "delete from events"),
    ],
)
def test_statement_that_writes_is_refused(filled: History, sql: str, doing: str) -> None:
    before = filled.file.path.read_bytes()
    with pytest.raises(InvalidQueryError, match=f"only read here, and this statement would {doing}"):
        filled.ask(sql)
    assert filled.file.path.read_bytes() == before
    assert not Path("/tmp/copy-of-the-history").exists()


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT whom FROM events", "no such column"),
        ("SELECT * FROM visits", "The tables are jobs, attempts"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("", "returns no rows"),
        ("SELECT load_extension('x.so')", "not authorized|no such function"),
        ("SELECT length(zeroblob(100000000))", "too big"),
        ("SELECT :who", "binding"),
        ("SELECT '\udcff'", "surrogates"),
        ("SELECT fts3_tokenizer('simple')", "not authorized to use function: fts3_tokenizer|no such function"),
        ("SELECT Sqlite_Source_Id()", "not authorized to use function: Sqlite_Source_Id"),
        (f"SELECT '{'x' * (1 << 20)}'", "take more than 1 MB"),
    ],
)
def test_statement_that_makes_no_sense_is_explained(filled: History, sql: str, why: str) -> None:
    with pytest.raises(InvalidQueryError, match=why):
        filled.ask(sql)


def test_change_that_was_broken_off_is_said(filled: History, tmp_path: Path) -> None:
    path = tmp_path / "copy.sqlite"
    with closing(sqlite3.connect(filled.file.path)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.execute("UPDATE events SET what = hex(zeroblob(20000))")
        for name in ("", "-journal"):
            shutil.copy(f"{filled.file.path}{name}", f"{path}{name}")
    with pytest.raises(HistoryUnavailableError, match="can't be read now"):
        read_history(path, "SELECT count(*) FROM events")


LONG = "x AS MATERIALIZED (SELECT hex(zeroblob(65000)) AS x)"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.mark.parametrize(
    "sql",
    [
        f"{ENDLESS} SELECT count(*) FROM n",
        f"WITH {LONG} SELECT {' + '.join(['instr(x, substr(x, 1, 64999) || 1)'] * 400)} FROM x",
        f"WITH {LONG} SELECT x LIKE '%' || substr(x, 1, 49990) || '1' FROM x",
        "SELECT printf('%.*c', 2000000000, 'x')",
    ],
    ids=["steps", "searches", "pattern", "printf"],
)
def test_statement_is_ended_in_time_whatever_it_does(filled: History, sql: str) -> None:
    """SQLite looks at the time between its steps only, and a step may be a search of seconds."""
    began = time.monotonic()
    with pytest.raises(InvalidQueryError, match=r"took longer than 0\.5 s and was ended|too big"):
        read_history(filled.file.path, sql, within_s=0.5)
    assert time.monotonic() - began < 5.0


def nested(depth: int) -> str:
    """Expressions of a table that name the one before twice: SQLite prepares 2**depth selects before its first step."""
    tables = (f"c{n} AS (SELECT p.x FROM c{n - 1} p, c{n - 1} q)" for n in range(1, depth + 1))
    return f"WITH c0 AS (SELECT 1 AS x), {', '.join(tables)} SELECT * FROM c{depth} LIMIT 1"


@pytest.mark.parametrize(
    "sql",
    [
        nested(16),
        "WITH RECURSIVE n(x) AS (SELECT randomblob(9999) UNION ALL SELECT randomblob(9999) FROM n) SELECT * FROM n"
        " ORDER BY x",
        f"{ENDLESS} SELECT group_concat(hex(zeroblob(60000)) || i) OVER (ORDER BY i) FROM n",
    ],
    ids=["prepares", "sorts", "keeps"],
)
def test_memory_of_a_statement_is_bounded(filled: History, sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MEMORY_BYTES", 8 << 20)
    with pytest.raises(InvalidQueryError, match=r"MB of memory and was ended|too big"):
        filled.ask(sql)
    assert filled.ask("SELECT count(*) FROM events").rows == ((5,),)


def test_statement_whose_process_can_not_begin_is_said(filled: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HistoryUnavailableError, match="ended with code 1"):
        filled.ask("SELECT 1")


@pytest.mark.parametrize("value", [2**70, "\udcff", [1]])
def test_parameter_that_sqlite_can_not_take_is_explained(filled: History, value: Any) -> None:
    with pytest.raises(InvalidQueryError, match="the statement can't be run"):
        read_history(filled.file.path, "SELECT :x", {"x": value})


def test_answer_is_cut_by_rows_and_by_bytes(filled: History, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = read_history(filled.file.path, "SELECT subject FROM events ORDER BY at", most_rows=5)
    assert (all_of_them.rows[4], all_of_them.cut) == (("a/4",), False)
    assert all_of_them.as_dicts()[0] == {"subject": "a/0"}
    assert read_history(filled.file.path, "SELECT * FROM events", most_rows=4).cut
    monkeypatch.setattr(reading, "MOST_BYTES", 1000)
    few = read_history(filled.file.path, "SELECT hex(zeroblob(200)) FROM events")
    assert (len(few.rows), few.cut) == (2, True)
    numbers = read_history(filled.file.path, "SELECT at, at, NULL, 1 FROM events")
    assert (len(numbers.rows), numbers.cut) == (5, False)
    monkeypatch.setattr(reading, "MOST_BYTES", 4 * 4 * 16)
    assert len(read_history(filled.file.path, "SELECT at, at, NULL, 1 FROM events").rows) == 4, "numbers count"


def test_parameters_are_values_and_bytes_are_text(filled: History) -> None:
    assert filled.rows("SELECT subject FROM events WHERE at = :at", at=NOON + 3) == [("a/3",)]
    assert filled.rows("SELECT x'00ff', 'ü\n', 9e999, NULL, 1 << 62") == [("00ff", "ü\n", math.inf, None, 1 << 62)]


@pytest.mark.parametrize(("made", "why"), [(False, "there is no history at"), (True, "not a readable history")])
def test_missing_or_foreign_file_is_unavailable(tmp_path: Path, made: bool, why: str) -> None:
    path = tmp_path / "history.sqlite"
    if made:
        path.write_bytes(b"something else" * 500)
    with pytest.raises(HistoryUnavailableError, match=why) as refused:
        read_history(path, "SELECT 1 FROM jobs")
    assert isinstance(refused.value, IrisError)
    with pytest.raises(HistoryUnavailableError, match="there can be no history at"):
        read_history(tmp_path / ("long" * 100), "SELECT 1 FROM jobs")
