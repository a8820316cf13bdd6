"""What has changed, and in which order, for readers that look now and then."""

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class ChangeLog(Generic[T]):
    """The latest changes, the oldest first. A reader keeps the version up to which it has read."""

    def __init__(self) -> None:
        self._changed: list[T] = []
        self._forgotten = 0  # how many older changes were dropped

    @property
    def version(self) -> int:
        """How many changes there have been."""
        return self._forgotten + len(self._changed)

    def note(self, what: T, most: int) -> None:
        """Note a change. If there are more than so many, the older half is dropped."""
        self._changed.append(what)
        if len(self._changed) > most:
            old = len(self._changed) // 2
            self._forgotten += old
            del self._changed[:old]

    def since(self, version: int) -> Sequence[T] | None:
        """Return what has changed since a version, oldest change first; None if it is too long ago."""
        return None if version < self._forgotten else self._changed[version - self._forgotten :]
