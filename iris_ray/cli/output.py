"""``--json`` and ``-q``: what commands print for programs.

Each command names the type of what its ``--json`` prints. docs/json-output.md is made from these types
(``python -m tools.json_page``), and the tests hold every JSON output against its type.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import click

from iris_ray.cli.address import Command
from iris_ray.cli.printing import print_json, print_table

T = TypeVar("T")


class JsonOption(click.Option):
    """``--json`` of a command.

    Args:
        shape: the type of what it prints, as `as_json` converts it; or a function that returns the type, if its module
            imports Ray.
    """

    def __init__(self, *args: Any, shape: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shape = shape

    @property
    def shape(self) -> Any:
        return self._shape() if isinstance(self._shape, FunctionType) else self._shape


def json_option(shape: Any) -> Callable[[Command], Command]:
    """Return a decorator that gives a command ``--json``, as its argument ``as_json``; see `JsonOption`."""
    return click.option(
        "--json", "as_json", is_flag=True, cls=JsonOption, shape=shape, help="Print JSON: docs/json-output.md."
    )


@dataclass(frozen=True, slots=True)
class ListForm:
    """The form in which a command prints a list: as a table, as JSON, or its ids alone.

    Attributes:
        as_json: with ``--json``.
        only_ids: with ``-q``.
    """

    as_json: bool = False
    only_ids: bool = False

    @property
    def is_table(self) -> bool:
        return not (self.as_json or self.only_ids)

    def show(
        self,
        found: Sequence[T],
        id_of: Callable[[T], str],
        headers: Sequence[str],
        row: Callable[[T], Sequence[object]],
        none: str,
    ) -> None:
        """Print a list.

        Args:
            found: the items, as JSON shows them.
            id_of: returns the id of an item, as other commands take it.
            headers: of the table.
            row: returns the cells of an item.
            none: what a person is told if there are no items.
        """
        if self.as_json:
            print_json(found)
        elif self.only_ids:
            print_ids(map(id_of, found))
        else:
            print_table(headers, list(map(row, found)), none)


def print_ids(ids: Iterable[str]) -> None:
    """Print each id once, one on a line."""
    for one in dict.fromkeys(ids):
        click.echo(one)


def list_options(shape: Any, ids: str = "ids") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command ``--json`` and ``-q``, as its argument ``form``, a `ListForm`.

    Args:
        shape: see `JsonOption`.
        ids: what ``-q`` prints, for its help.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def with_form(*args: Any, as_json: bool, only_ids: bool, **given: Any) -> Any:
            if as_json and only_ids:
                raise click.UsageError("give --json or --quiet, not both.")
            return command(*args, form=ListForm(as_json, only_ids), **given)

        with_form.__dict__.update(command.__dict__)
        with_form.__name__, with_form.__doc__ = command.__name__, command.__doc__
        with_form.__module__ = command.__module__
        quiet = click.option("--quiet", "-q", "only_ids", is_flag=True, help=f"Print {ids} only, one per line.")
        return json_option(shape)(quiet(with_form))

    return decorate
