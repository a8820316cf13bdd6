"""Reads tables of TOML value by value. What makes no sense is refused, with its place and what would do."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from iris_ray.errors import InvalidSimulationError
from iris_ray.model.checks import is_amount, is_int, is_number, nearest

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


class Section:
    """One table of a description.

    Args:
        table: its values.
        place: what to call it in messages, such as ``[[slices]] number 1``; empty for the whole description.
        known: all names that it may have.
    """

    def __init__(self, table: object, place: str, known: tuple[str, ...]) -> None:
        self._place = place
        if not isinstance(table, Mapping):
            raise InvalidSimulationError(f"{place} is {table!r}; write a table, with name = value on each line")
        self._table: Mapping[str, Any] = table
        for name in table:
            if name not in known:
                near = nearest(str(name), known, most=1)
                hint = f"did you mean {near[0]}?" if near else f"it may have {', '.join(known)}"
                raise InvalidSimulationError(f"{self.at(name)}: there is no such name here; {hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def at(self, name: str) -> str:
        """Return the place of a value, for messages."""
        return f"{self._place}: {name}" if self._place else name

    def refuse(self, name: str, expected: str) -> InvalidSimulationError:
        """Return the error for a value that makes no sense."""
        value = self._table.get(name)
        if value is None:
            return InvalidSimulationError(f"{self.at(name)} is missing; give {expected}")
        return InvalidSimulationError(f"{self.at(name)} is {value!r}; give {expected}")

    def number(self, name: str, default: float | None = None, least: float = 0.0, unit: float = 1.0) -> float:
        """Return a number.

        Args:
            name: of the value.
            default: if there is no such value; None: it has to be there.
            least: what it must not be below.
            unit: what to multiply it with. The default is not multiplied.
        """
        if name not in self._table and default is not None:
            return default
        value = self._table.get(name)
        if not is_number(value) or not least <= value <= sys.float_info.max / unit:
            raise self.refuse(name, f"a number of {least:g} or more")
        return float(value) * unit

    def positive(self, name: str, default: float | None = None, unit: float = 1.0) -> float:
        """Return a number above 0; as for `number`."""
        value = self.number(name, default, unit=unit)
        if value <= 0:
            raise self.refuse(name, "a number above 0")
        return value

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an int; as for `number`."""
        if name not in self._table and default is not None:
            return default
        value = self._table.get(name)
        if not is_int(value, least):
            raise self.refuse(name, f"a whole number of {least} or more")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a str that is not empty."""
        value = self._table.get(name, default)
        if not isinstance(value, str) or not value:
            raise self.refuse(name, "a text in quotes")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a bool."""
        value = self._table.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of some texts."""
        value = self._table.get(name, default)
        if value not in choices:
            raise self.refuse(name, f"one of {', '.join(choices)}")
        return str(value)

    def weighted(self, name: str, default: Any, read: Callable[[Any], Any], expected: str) -> tuple[Any, ...]:
        """Return items with their weights, from a list of items, a table of weights by item, or one item.

        Args:
            name: of the value.
            default: the item if there is no such value.
            read: makes an item of what is written; raises ValueError.
            expected: what to give, for messages.
        """
        value = self._table.get(name, default)
        pairs = value.items() if isinstance(value, Mapping) else [(item, 1) for item in _listed(value)]
        try:
            found = tuple((read(item), float(weight)) for item, weight in pairs if is_amount(weight))
        except (TypeError, ValueError):
            raise self.refuse(name, expected) from None
        if len(found) < len(list(pairs)) or not 0 < sum(weight for _, weight in found) < math.inf:
            raise self.refuse(name, expected)
        return found

    def tables(self, name: str, known: tuple[str, ...]) -> list["Section"]:
        """Return the tables of an array, such as all ``[[slices]]``."""
        value = self._table.get(name, [])
        if not isinstance(value, list):
            raise self.refuse(name, f"tables that begin with [[{name}]]")
        return [Section(table, f"[[{name}]] number {number}", known) for number, table in enumerate(value, 1)]

    def table(self, name: str, known: tuple[str, ...]) -> "Section":
        """Return a table in this table; an empty one if there is none."""
        return Section(self._table.get(name, {}), self.at(name), known)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
