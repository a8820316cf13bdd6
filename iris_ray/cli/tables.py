"""Tables for people and JSON for machines."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import click

from iris_ray.model.constraints import AttributeValue, Constraint
from iris_ray.scheduler.pending_reason import PendingReason

_GAP = "  "
_LEAST_WIDTH = 20


def one_line(text: object) -> str:
    """Text of whatever origin, fit for a cell and a terminal: no line ends, no control characters."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in str(text)).split())


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Aligned columns; the last one is cut if a line would be longer than ``width``."""
    cells = [list(headers), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for *others, last in cells:
        start = "".join(cell.ljust(size) + _GAP for cell, size in zip(others, widths, strict=False))
        lines.append((start + cut(last, width and max(width - len(start), _LEAST_WIDTH))).rstrip())
    return "\n".join(lines)


def cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else text[: width - 1] + "…"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], none: str) -> None:
    """To stdout, as wide as the terminal, or uncut if it is none; ``none`` is said (to stderr) if there are no rows."""
    if not rows:
        click.echo(none, err=True)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    click.echo(format_table(headers, rows, width))


def print_facts(facts: Mapping[str, object]) -> None:
    """A line for each fact that there is, values aligned."""
    there = {name: one_line(value) for name, value in facts.items() if value not in (None, "")}
    width = max(map(len, there)) + 1
    for name, value in there.items():
        click.echo(f"{name + ':':{width}} {value}")


def duration(seconds: float) -> str:
    """How long, in two units at most: ``7s``, ``5m12s``, ``3h04m``, ``2d05h``."""
    whole = max(0, int(seconds))
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain(value: Any) -> Any:
    """Our data as what JSON has: enums by name, constraints as people write them."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Constraint):
        return str(value)
    if isinstance(value, AttributeValue):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        found = {f.name: plain(getattr(value, f.name)) for f in fields(value) if not f.name.startswith("_")}
        return {"sentence": str(value), **found} if isinstance(value, PendingReason) else found
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def print_json(value: Any) -> None:
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))
