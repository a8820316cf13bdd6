"""What work outside iris_ray uses of the hosts: CPUs, memory and other resources. Chips are `node_table`'s."""

from collections.abc import Mapping
from typing import Any

from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import TPU, Resources, Worker, rounded
from iris_ray.state import ControllerState

READINGS = 6
"""So many readings of Ray's tables decide."""


class UseElsewhere:
    """Works out what is used of each host, but not by iris_ray.

    Ray's tables and the state are never of the same moment: a reservation is there some time after the gang has been
    assigned, and gone some time after its end. So hosts on which a gang is just starting or ending are not judged, and
    of the others the least of `READINGS` readings counts. Of a host that is seen for the first time the first one
    counts until the next. Work that comes and goes within seconds counts as little as it may.

    Args:
        state: read only; it knows what iris_ray itself holds.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._readings: dict[str, tuple[int, Resources | None]] = {}  # node id → how many, and the least of them

    def is_judged(self, node_id: str) -> bool:
        """Return whether no further readings of a host are needed as long as they are the same."""
        return node_id not in self._readings

    def of(self, node: Mapping[str, Any], table: NodeTable, is_held: bool) -> dict[str, float]:
        """Take a reading. Return what counts from now on.

        Args:
            node: an entry of ``ray.nodes()``.
            table: the reading that it comes from.
            is_held: whether a pool holds the host's slice. While that is warm, the state does not know with how much.
        """
        node_id = node["NodeID"]
        worker, unclaimed = self._state.workers.get(node_id), table.available.get(node_id)
        known = dict(worker.elsewhere) if worker is not None else {}
        if unclaimed is None or (is_held and worker is not None and worker.chips_idle):
            self.forget(node_id)
            return known
        if worker is None:
            first = _used(node["Resources"], unclaimed, {})
            if first:
                self._readings[node_id] = READINGS - 1, first
            return first
        if self._is_changing(worker):
            self._readings[node_id] = 0, None
            return known
        return self._counted(node_id, known, _used(node["Resources"], unclaimed, worker.held))

    def forget(self, node_id: str) -> None:
        """Forget a host."""
        self._readings.pop(node_id, None)

    def _counted(self, node_id: str, known: dict[str, float], now: dict[str, float]) -> dict[str, float]:
        count, least = self._readings.get(node_id, (0, None))
        least = now if least is None else {r: min(n, now[r]) for r, n in least.items() if r in now}
        if count + 1 < READINGS and (now != known or least != known):
            self._readings[node_id] = count + 1, least
            return known
        self.forget(node_id)
        if least != now:
            self._readings[node_id] = 1, now
        return dict(least)

    def _is_changing(self, worker: Worker) -> bool:
        """Return whether a gang on a host is just starting or ending."""
        jobs = self._state.jobs
        gangs = (jobs[attempt.job_id].gangs[attempt.gang] for _, attempt in worker.occupants)
        return bool(worker.ending) or any(gang.tasks[0].state is TaskState.ASSIGNED for gang in gangs)


def _used(resources: Resources, unclaimed: Resources, ours: Resources) -> dict[str, float]:
    """Return what is claimed of a host and not ours. Ray leaves a resource out of which nothing is left."""
    amounts = {
        name: rounded(has - unclaimed.get(name, 0.0) - ours.get(name, 0.0))
        for name, has in resources.items()
        if name not in (TPU, "object_store_memory") and not name.startswith("node:")
    }
    return {name: amount for name, amount in amounts.items() if amount > 0}
