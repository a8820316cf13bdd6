"""Sees which other Ray work waits for chips, so that a pool yields the slices that it only keeps warm."""

from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.placement_group import placement_group_table

from iris_ray.actors.calls.names import NAMESPACE
from iris_ray.model.workers import TPU


class OthersWaiting:
    """Placement groups of others, such as Ray Train's, that wait for chips.

    Ray Train reserves a slice by its head, which no job of ours claims, and then waits for the chips of that slice. Its
    workers have 60 s to start (``DEFAULT_WORKER_GROUP_START_TIMEOUT_S``, Ray 2.60), which ``keep_warm`` may exceed.
    Each group is yielded to once: one that can't be placed for another reason must not end every later warm time.
    """

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._yielded: set[str] = set()

    def look(self) -> float | None:
        """Return how many chips a host needs to be of use to a group that has waited since the last look, at least.

        None if there is none. This blocks for a few milliseconds.
        """
        chips = dict(_waiting_for_chips(placement_group_table().items()))
        new = (chips.keys() & self._waiting) - self._yielded
        self._waiting = set(chips)
        self._yielded = (self._yielded & chips.keys()) | new
        return min((chips[group] for group in new), default=None)


def _waiting_for_chips(groups: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterable[tuple[str, float]]:
    """Yield the id and the chips of the largest bundle of each waiting group of others."""
    for group_id, group in groups:
        chips = max((bundle.get(TPU, 0.0) for bundle in group["bundles"].values()), default=0.0)
        if chips > 0 and group["state"] == "PENDING" and not group["name"].startswith(NAMESPACE):
            yield group_id, chips
