"""Tables of rows of JSON, and what has changed in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""Values of JSON by name."""


@dataclass(slots=True)
class Diff:
    """What has changed in tables.

    Attributes:
        put: table → key → the new row.
        drop: table → keys of rows that are gone.
    """

    put: dict[str, dict[str, Row]] = field(default_factory=dict)
    drop: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.put and not self.drop


class Table:
    """Rows by key. It knows which have changed since `take_changes` was last called."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self._changed: dict[str, None] = {}

    def put(self, key: str, row: Row) -> Row | None:
        """Add or replace a row. Return the row before; None if there was none."""
        before = self.rows.get(key)
        if before != row:
            self.rows[key] = row
            self._changed[key] = None
        return before

    def drop(self, key: str) -> Row | None:
        """Remove a row and return it, if it is there."""
        row = self.rows.pop(key, None)
        if row is not None:
            self._changed[key] = None
        return row

    def replace(self, rows: Mapping[str, Row]) -> None:
        """Have these rows and no others."""
        for key in self.rows.keys() - rows.keys():
            self.drop(key)
        for key, row in rows.items():
            self.put(key, row)

    def take_changes(self, name: str, diff: Diff) -> None:
        """Add to a diff, under a name, what has changed since the last call."""
        put = {key: self.rows[key] for key in self._changed if key in self.rows}
        drop = [key for key in self._changed if key not in self.rows]
        if put:
            diff.put[name] = put
        if drop:
            diff.drop[name] = drop
        self._changed.clear()
