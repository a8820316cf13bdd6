"""What the interface of an actor says about a call beside its types: a deadline, and how a long list is given."""

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Asked = Callable[P, Coroutine[Any, Any, T]]

DEADLINE, PAGES = "deadline_s", "pages_by"
"""The attributes of a method that hold the marks."""


def within(deadline_s: float | None) -> Callable[[Asked[P, T]], Asked[P, T]]:
    """Mark a method whose answer needs work: it may take so many seconds; None: any time.

    Unmarked methods have `ANSWER_TIMEOUT_S`. A caller can give a deadline of its own.
    """

    def mark(method: Asked[P, T]) -> Asked[P, T]:
        setattr(method, DEADLINE, deadline_s)
        return method

    return mark


def in_pages(by: str) -> Callable[[Asked[P, list[T]]], Asked[P, list[T]]]:
    """Mark a method that gives `PAGE` items of a list in one answer.

    The last parameter of the method, ``after``, says where a page begins: behind the item whose attribute ``by`` has
    that value.
    """

    def mark(method: Asked[P, list[T]]) -> Asked[P, list[T]]:
        setattr(method, PAGES, by)
        return method

    return mark
