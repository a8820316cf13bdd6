"""Marks of methods in an actor's interface: a deadline for the answer, and the pages of a long list."""

from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Asked = Callable[P, Coroutine[Any, Any, T]]

DEADLINE, PAGES = "deadline_s", "pages_by"
"""The attributes of a method that hold the marks."""


def within(deadline_s: float | None) -> Callable[[Asked[P, T]], Asked[P, T]]:
    """Mark a method whose answer may take this time in seconds; None: as long as it needs.

    Other methods have `ANSWER_TIMEOUT_S`. A caller can give its own deadline.
    """

    def mark(method: Asked[P, T]) -> Asked[P, T]:
        setattr(method, DEADLINE, deadline_s)
        return method

    return mark


def in_pages(by: str) -> Callable[[Asked[P, list[T]]], Asked[P, list[T]]]:
    """Mark a method that returns at most `PAGE` items of a list in one answer.

    Its last parameter ``after`` is the attribute ``by`` of the item before the page.
    """

    def mark(method: Asked[P, list[T]]) -> Asked[P, list[T]]:
        setattr(method, PAGES, by)
        return method

    return mark
