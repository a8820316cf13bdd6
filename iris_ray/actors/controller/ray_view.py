"""The hosts of a cluster as a Controller would see them, for people who look while none runs."""

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_diff import NodeDiff
from iris_ray.actors.controller.node_table import NodeTable
from iris_ray.actors.controller.status_views import unusable_status, worker_status
from iris_ray.actors.wire.status import WorkerStatus
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_safely
from iris_ray.state.instructions import Instructions


def workers_by_ray(table: NodeTable) -> list[WorkerStatus]:
    """Return all live hosts that Ray knows, by slice and number; those that no job would get with the reason."""
    state, clock = ControllerState(), Clock()
    nodes = NodeDiff(state, clock)
    apply_safely(state, nodes.events_of(table), Instructions())
    found = [worker_status(worker, state, clock.now()) for worker in state.workers.values()]
    found += [unusable_status(host) for host in nodes.unusable.values() if host.node_id not in state.workers]
    return sorted(found, key=lambda worker: worker.place)
