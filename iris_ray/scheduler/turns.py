"""Turns: what a plan has no time for is done by the next ones, however many jobs come first for which it is in vain."""

from collections.abc import Collection, Hashable


class Turns:
    """Kinds of jobs for which plans have looked for something in vain.

    A plan that has no time for all kinds passes over them, until one has had time for all others.
    """

    def __init__(self) -> None:
        self._had: set[Hashable] = set()

    def had(self, kind: Hashable) -> bool:
        """Return whether a kind has had its turn, and others wait for theirs."""
        return kind in self._had

    def end_plan(self, in_vain: Collection[Hashable], had_time: bool) -> None:
        """Note for which kinds a plan has looked in vain, and whether it had time for all kinds that were due."""
        if had_time:
            self._had.clear()
        else:
            self._had.update(in_vain)
