"""What commands print: tables, words, JSON, findings."""

import io
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import click

from iris_ray.actors.protocol.overview import as_json
from iris_ray.terminal import guarded, printable
from iris_ray.terminal import one_line as one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from iris_ray.actors.protocol.status import JobStatus


# -- words -------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return a duration in two units at most: ``7s``, ``5m12s``, ``3h04m``, ``2d05h``."""
    whole = max(0, int(seconds))
    for unit, size, smaller, smaller_size in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // smaller_size:02d}{smaller}"
    return f"{whole}s"


def counted(number: int, noun: str) -> str:
    """Return ``1 host`` or ``2 hosts``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def state_in_words(job: "JobStatus") -> str:
    return "starting" if job.starting else job.state.value


# -- text of strangers -------------------------------------------------------------------------------------------------
# What tasks, jobs and other users have written. On a terminal, `iris_ray.terminal` lets none of it act.


def print_output(data: bytes | str, err: bool = False) -> None:
    """Print lines of strangers, unchanged; on a terminal, colours stay and control characters are escaped."""
    stream = guarded(sys.stderr if err else sys.stdout)
    data = data.encode(errors="surrogateescape") if isinstance(data, str) else data
    if stream.isatty():
        data = b"\n".join(printable(line.rstrip(b"\r")).encode() for line in data.split(b"\n"))
    stream.buffer.write(data)
    stream.buffer.flush()


# -- tables ------------------------------------------------------------------------------------------------------------
# Tables for people, laid out by rich. They hold no colour, and no line break inside a word, so ids stay whole.
#
# Rich is imported when a table is printed: the import takes time, and ``--help`` and shell completion print no table.

_UNLIMITED = 1_000_000
_LEAST_WIDTH = 20
"""The least width of the last column, which holds sentences."""
_INDENT = 2


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], none: str) -> None:
    """Print a table to stdout, as wide as the terminal; to a pipe or file, one line for each row.

    Args:
        headers: of the columns. The last column holds sentences.
        rows: cells of any type; the items of a tuple are separated by commas.
        none: goes to stderr if there are no rows.
    """
    if rows:
        click.echo(format_table(headers, rows, terminal_width()))
    else:
        click.echo(one_line(none), err=True)


def print_facts(facts: Mapping[str, object]) -> None:
    """Print a line for each fact that is neither None nor empty, with aligned values."""
    rows = [(f"{name}:", one_line(value)) for name, value in facts.items() if value not in (None, "")]
    click.echo(_grid(rows, (), 1, terminal_width()))


def print_labelled(label: str, colour: str | None, text: str) -> None:
    """Print a line that begins with a label, which is coloured on a terminal unless NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    with console.capture() as captured:
        console.print(Text.assemble((label, colour or ""), text), soft_wrap=True, highlight=False)
    click.echo(captured.get(), nl=False)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> str:
    """Return a table with aligned columns.

    Args:
        headers: of the columns. The last column holds sentences.
        rows: cells of any type; the items of a tuple are separated by commas.
        width: characters for a line; None for as many as the longest row needs. In a narrow width cells wrap, and if
            that is not enough, the last cell of each row goes onto lines of its own.
    """
    cells = [[_cell(cell, ", " if width else ",") for cell in row] for row in rows]
    table = _grid(cells, headers, 2, width)
    if width is None or _widest(table.splitlines()) <= width:
        return table
    return _stacked([list(headers), *cells], width)


def _cell(value: object, separator: str) -> str:
    return separator.join(map(one_line, value)) if isinstance(value, tuple) else one_line(value)


def _grid(rows: Sequence[Sequence[str]], headers: Sequence[str], gap: int, width: int | None) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=bool(headers))
    for number, column in enumerate(zip(*([headers] if headers else []), *rows, strict=True)):
        least = _longest_word(column)
        if number == len(rows[0]) - 1:
            least = max(least, min(_LEAST_WIDTH, _widest(column)))
        table.add_column(Text(headers[number] if headers else ""), min_width=least, no_wrap=width is None)
    for row in rows:
        table.add_row(*map(Text, row))
    return _rendered(table, width or _UNLIMITED)


def _stacked(rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table with the last cell of each row on lines of its own, indented."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(*(row[:-1] for row in rows), strict=True))
    sizes = [_widest(column) for column in columns]
    if sum(sizes) + 2 * len(sizes) > width:
        sizes = [_longest_word(column) for column in columns]
    parts: list[RenderableType] = []
    for *others, last in rows:
        line = Table.grid(padding=(0, 2, 0, 0))
        for size in sizes:
            line.add_column(width=size)
        line.add_row(*map(Text, others))
        parts.append(line)
        if last:
            parts.append(Padding(Text(last), (0, max(0, sum(sizes) + 2 * len(sizes) - width), 0, _INDENT)))
    return _rendered(Group(*parts), max(width, sum(sizes) + 2 * len(sizes)))


def _rendered(renderable: "RenderableType", width: int) -> str:
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _longest_word(column: Iterable[str]) -> int:
    return _widest(word for text in column for word in text.split())


def _widest(texts: Iterable[str]) -> int:
    """Return how many cells of a terminal the widest text takes."""
    from rich.cells import cell_len

    return max(map(cell_len, texts), default=0)


def terminal_width() -> int | None:
    """Return the width of the terminal in characters; None if stdout is not one."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


# -- json output -------------------------------------------------------------------------------------------------------


def print_json(value: Any, on_a_line: bool = False) -> None:
    """Print a value as JSON. What is not printable in its texts, such as U+009B, becomes an escape of JSON's.

    Args:
        value: our data, see `as_json`.
        on_a_line: whether it takes one line, as one of many.
    """
    lines = json.dumps(as_json(value), indent=None if on_a_line else 2, ensure_ascii=False).split("\n")
    click.echo("\n".join(line if line.isprintable() else "".join(map(_in_json, line)) for line in lines))


def _in_json(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


# -- findings ----------------------------------------------------------------------------------------------------------
# Of ``iris-ray doctor`` and ``iris-ray cluster selftest``.


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        level: how bad it is.
        check: what was checked.
        found: what was found.
        advice: what to do about it, or None.
    """

    level: Level
    check: str
    found: str
    advice: str | None = None


_COLOURS = {Level.OK: "green", Level.INFO: None, Level.WARNING: "yellow", Level.ERROR: "red"}


def print_finding(finding: Finding) -> None:
    """Print a finding as a line, and its advice below."""
    print_labelled(f"{finding.level.value:7}", _COLOURS[finding.level], f"  {finding.check}: {one_line(finding.found)}")
    if finding.advice:
        click.echo(f"{'':7}  → {one_line(finding.advice)}")
