"""The process of one statement on a history: it opens the file for reading, runs the statement and prints the rows.

A program of its own, ``python -I -S statement.py``, which imports the standard library only; `reading.py` starts it. No
limit of SQLite's holds while it prepares a statement, or within a function. So the kernel bounds this process's memory
and its time on a CPU, and the parent kills it at the limit.

It reads a question from stdin and prints lines of JSON: the names of the columns, each row, and an object, how it
ended.
"""

import json
import math
import resource
import sqlite3
import sys
from contextlib import suppress

MOST_BYTES_OF_A_VALUE = 128 << 10
NUMBER_BYTES = 16
"""The share of each value in the size of an answer, besides its text."""
_READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
_VERBS = {
    sqlite3.SQLITE_INSERT: "insert into",
    sqlite3.SQLITE_UPDATE: "update",
    sqlite3.SQLITE_DELETE: "delete from",
    sqlite3.SQLITE_ATTACH: "attach",
    sqlite3.SQLITE_PRAGMA: "use the pragma",
}
_FUNCTIONS = """
    abs char coalesce concat concat_ws format glob hex if ifnull iif instr length like likelihood likely lower ltrim max
    min nullif octet_length printf quote random randomblob replace round rtrim sign substr substring trim typeof unhex
    unicode unlikely upper zeroblob
    avg count group_concat median percentile percentile_cont percentile_disc string_agg sum total
    cume_dist dense_rank first_value lag last_value lead nth_value ntile percent_rank rank row_number
    current_date current_time current_timestamp date datetime julianday strftime time timediff unixepoch
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power
    radians sin sinh sqrt tan tanh trunc
    -> ->> json json_array json_array_length json_error_position json_extract json_group_array json_group_object
    json_insert json_object json_patch json_pretty json_quote json_remove json_replace json_set json_type json_valid
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""The functions of SQLite that a statement may call: others tell addresses, load libraries or depend on the build."""


class Refused(Exception):
    """The statement would change something, or returns no rows.

    Attributes:
        fact: the verb and its object, such as "update jobs"; None if it returns no rows.
    """

    def __init__(self, fact: str | None) -> None:
        self.fact = fact


def limit(memory_bytes: int, seconds: float) -> None:
    """Bound this process's memory and CPU time, and let it write no file. It goes first where memory is short."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    cpu_s = math.ceil(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for none in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(none, (0, 0))


def run(uri: str, sql: str, parameters: dict[str, object], most_rows: int, most_bytes: int, within_s: float) -> bool:
    """Print the columns and the rows of a statement. Return whether there are more rows.

    Raises:
        Refused: the statement would change something, or returns no rows.
        sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError: SQLite refuses it.
        MemoryError: it needs too much memory.
    """
    would = []

    def may(action: int, first: str | None, second: str | None, *_: object) -> int:
        if action in _READS or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS):
            return sqlite3.SQLITE_OK
        if action != sqlite3.SQLITE_FUNCTION:  # SQLite names a function itself
            would.append(" ".join(filter(None, (_VERBS.get(action, "change"), first))))
        return sqlite3.SQLITE_DENY

    db = sqlite3.connect(uri, uri=True, timeout=within_s / 2, isolation_level=None)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES_OF_A_VALUE)
    db.execute("PRAGMA temp_store = MEMORY")  # sorting and keeping rows counts as memory
    db.set_authorizer(may)
    try:
        cursor = db.execute(sql, parameters)
    except sqlite3.Error:
        if would:
            raise Refused(would[-1]) from None
        raise
    if cursor.description is None:
        raise Refused(None)
    show([column for column, *_ in cursor.description])
    left = most_bytes
    for number, row in enumerate(cursor):
        values = [value.hex() if isinstance(value, bytes) else value for value in row]
        left -= sum(NUMBER_BYTES + (len(value) if isinstance(value, str) else 0) for value in values)
        if number >= most_rows or left < 0:
            return True
        show(values)
    return False


def show(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")


def main() -> None:
    asked = json.load(sys.stdin)
    limit(asked.pop("memory_bytes"), asked["within_s"])
    try:
        end: dict[str, object] = {"cut": run(**asked)}
    except Refused as refused:
        end = {"would": refused.fact}
    except MemoryError:
        end = {"memory": True}
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError) as error:
        end = {"code": getattr(error, "sqlite_errorcode", 0) & 0xFF, "why": str(error)}
    show(end)


if __name__ == "__main__":
    main()
