"""Calls of the history."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from iris_ray.actors.protocol.services import calls_of

Value = str | int | float | None
"""A value of a column. Bytes, which no table has, become hexadecimal text."""

MOST_ROWS_EVER = 100_000
"""No answer has more rows."""


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The answer to a statement.

    Attributes:
        columns: their names.
        rows: the values, in the order of the columns.
        cut: whether there are more rows than were asked for, or than fit into an answer.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    cut: bool = False

    def as_dicts(self) -> list[dict[str, Value]]:
        """Return each row as a dictionary."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@calls_of("history")
class HistoryCalls(Protocol):
    """Calls of people."""

    async def ask_history(self, sql: str, parameters: Mapping[str, Value], most_rows: int, user: str) -> HistoryRows:
        """Return the rows of a statement that reads the history; see docs/history.md for its tables.

        Args:
            sql: one statement; ``:name`` stands for a parameter.
            parameters: their values by name.
            most_rows: no more rows are returned.
            user: who asks. Users take turns.

        Raises:
            InvalidQueryError: the statement writes, makes no sense, or takes too long.
            HistoryUnavailableError: the cluster keeps no history, or it can't be read.
        """
