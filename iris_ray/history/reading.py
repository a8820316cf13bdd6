"""Statements that only read the history. Each runs in a process of its own, which is killed at its limits.

The process, `statement.py`, is a new interpreter and not a fork, so it shares nothing with this one.
"""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from iris_ray.errors import HistoryUnavailableError, InvalidQueryError
from iris_ray.history import statement
from iris_ray.history.calls import MOST_ROWS_EVER, HistoryRows, Value

MOST_ROWS = 1000
"""The default limit for rows."""
MOST_BYTES = 16 << 20
"""The limit for an answer: the characters of its texts, and `statement.NUMBER_BYTES` for each value."""
MOST_QUESTION_BYTES = 1 << 20
"""The limit for a statement with its parameters."""
MOST_SECONDS = 10.0
MEMORY_BYTES = 256 << 20
"""The limit for the memory of a statement, in which it also sorts and keeps rows."""
INTERPRETER_BYTES = 64 << 20
"""The memory that its process takes besides."""

_PASSES = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY,
})  # fmt: skip
"""SQLITE_READONLY: a writer has died in the middle of a change, which only another writer may roll back."""
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
        within_s: the seconds after which its process is killed.

    Raises:
        InvalidQueryError: the statement writes, makes no sense, or takes too much time or memory.
        HistoryUnavailableError: there is no history yet, or it can't be read.
    """
    try:
        is_there = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise HistoryUnavailableError(f"there can be no history at {path}: {error.strerror}") from None
    if not is_there:
        raise HistoryUnavailableError(f"there is no history at {path} yet: no job has had hosts, or it was moved away")
    asked = {
        "uri": f"file:{quote(str(path))}?mode=ro", "sql": sql, "parameters": dict(parameters or {}),
        "most_rows": min(most_rows, MOST_ROWS_EVER), "most_bytes": MOST_BYTES,
        "memory_bytes": MEMORY_BYTES + INTERPRETER_BYTES, "within_s": within_s,
    }  # fmt: skip
    question = json.dumps(asked).encode()
    if len(question) > MOST_QUESTION_BYTES:
        raise InvalidQueryError(f"the statement and its parameters take more than {MOST_QUESTION_BYTES >> 20} MB")
    began = time.monotonic()
    lines, status = _answer(question, within_s)
    end = lines.pop() if lines and isinstance(lines[-1], dict) else {}
    if "cut" in end:
        columns, *rows = map(tuple, lines)
        return HistoryRows(columns, tuple(rows), bool(end["cut"]))
    if end or status > 0:
        raise _explained(end, status, path, sql)
    is_late = time.monotonic() - began >= within_s
    raise _too_much(f"took longer than {within_s:g} s" if is_late else _MEMORY)


def _answer(question: bytes, within_s: float) -> tuple[list[Any], int]:
    """Return the lines that a process prints for a question, and its exit status: negative if it was killed."""
    command = [sys.executable, "-I", "-S", statement.__file__]
    pipe, environ = subprocess.PIPE, os.environ | {"LC_ALL": "C"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(within_s, process.kill)
        killer.start()
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(question)
            return [json.loads(line) for line in process.stdout if line.endswith(b"\n")], process.wait()
        finally:
            killer.cancel()
            process.kill()


_MEMORY = f"needs more than {MEMORY_BYTES >> 20} MB of memory"


def _too_much(did: str) -> InvalidQueryError:
    return InvalidQueryError(f"the statement {did} and was ended; narrow it, for example by ended_at")


def _explained(end: Mapping[str, Any], status: int, path: Path, sql: str) -> Exception:
    """Return the error for a statement without an answer, by the end that its process told."""
    code, why = end.get("code"), end.get("why")
    if would := end.get("would"):
        return InvalidQueryError(
            f"the history is only read here, and this statement would {would}; nothing was done. Give a SELECT"
        )
    if "would" in end:
        return InvalidQueryError(f"{sql.strip()!r} returns no rows; give a SELECT over {TABLES}")
    if "memory" in end:
        return _too_much(_MEMORY)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return HistoryUnavailableError(f"{path} is not a readable history ({why}); give the path of a history.sqlite")
    if code in _PASSES:
        return HistoryUnavailableError(f"{path} can't be read now ({why}); try again")
    if code is None:
        return HistoryUnavailableError(f"{path} can't be read now: the process for it ended with code {status}")
    return InvalidQueryError(f"the statement can't be run: {why}. The tables are {TABLES}: see docs/history.md")
