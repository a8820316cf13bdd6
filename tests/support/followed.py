"""What a dashboard knows of a cluster, asked for step by step."""

import itertools
from collections.abc import Callable
from typing import Any

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.dashboard.cluster_view import ClusterView
from iris_ray.dashboard.rows import Diff
from tests.support.waiting import wait_until

Tables = dict[str, dict[str, Any]]


class Followed:
    """A view, and the copy of it that a page makes of the diffs that it gets.

    Attributes:
        copy: the page's tables.
    """

    def __init__(self) -> None:
        self.controller = ControllerConnection()
        self.copy: Tables = {}
        seconds = itertools.count(1)
        self._view = ClusterView(lambda: float(next(seconds)))
        self._position = Position()

    def follow(self) -> Changes:
        """Ask until there is nothing more; return the last answer."""
        changes = self.controller.ask(ControllerInterface.changes, self._position)
        if changes.begin_anew:
            self._view.begin(
                self.controller.ask_all(ControllerInterface.list_jobs),
                self.controller.ask_all(ControllerInterface.list_workers),
            )
        else:
            self._view.apply(changes)
        self._position = changes.position
        self._copy(self._view.take_changes({}))
        return self.follow() if changes.more or changes.begin_anew else changes

    def until(self, holds: Callable[[Tables], object]) -> Tables:
        """Follow until the page's tables are as expected; return them."""

        def done() -> bool:
            self.follow()
            return bool(holds(self.copy))

        wait_until(done)
        return self.copy

    def events(self) -> list[str]:
        """Return what has happened, each with what it is about."""
        rows = sorted(self.copy.get("events", {}).values(), key=lambda row: row["number"])
        return [f"{row['job'] or row['slice']}: {row['text']}" for row in rows]

    def _copy(self, diff: Diff) -> None:
        for name, rows in diff.put.items():
            self.copy.setdefault(name, {}).update(rows)
        for name, keys in diff.drop.items():
            for key in keys:
                del self.copy[name][key]
