"""From Ray's node table to events for the controller's state: which hosts there are, and what became of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import ray

from iris_ray.actors.wire.ray_internals import available_resources_by_node, draining_nodes
from iris_ray.errors import InvalidRequestError
from iris_ray.model.constraints import TAINT_PREFIX, AttributeValue
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.state.events import WorkerFailedEvent, WorkerRegisteredEvent

SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
WORKER_ID_LABEL = "ray.io/tpu-worker-id"
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
OPERATOR_PREFIX = "iris/"
TAINT_LABEL = "taint."
NODE_POLL_S = 0.5
"""How often the table is read."""


@dataclass(frozen=True, slots=True)
class NodeTable:
    """One reading of Ray's tables."""

    nodes: tuple[Mapping[str, Any], ...]
    draining: Mapping[str, int]
    available: Mapping[str, Mapping[str, float]]

    @staticmethod
    def read() -> "NodeTable":
        """Ask Ray for its node table, drains and free resources. Blocks until the GCS has answered."""
        return NodeTable(tuple(ray.nodes()), draining_nodes(), available_resources_by_node())


def registration(node: Mapping[str, Any], table: NodeTable, ours: float) -> WorkerRegisteredEvent | str:
    """What one live node is to the scheduler: a worker, or of no use, and why.

    Args:
        node: an entry of ``ray.nodes()``.
        table: the reading that it comes from.
        ours: how many of its chips are reserved by iris_ray.
    """
    labels, resources = node.get("Labels", {}), node.get("Resources", {})
    chips = resources.get("TPU", 0.0)
    node_id = node["NodeID"]
    draining, deadline = None, None
    if node_id in table.draining:
        draining = "Ray is draining it"
        deadline = table.draining[node_id] / 1000 or None  # 0: none
    if not chips and SLICE_NAME_LABEL not in labels:
        return WorkerRegisteredEvent(
            node_id,
            node["NodeManagerAddress"],
            operator_attributes(labels),
            dict(resources),
            draining,
            deadline=deadline,
        )
    if SLICE_NAME_LABEL not in labels:
        return f"host {node['NodeManagerAddress']} has TPU chips and no label {SLICE_NAME_LABEL}"
    if not chips:
        return f"host {node['NodeManagerAddress']} of {labels[SLICE_NAME_LABEL]} has no TPU chips that Ray knows of"
    slice_name = labels[SLICE_NAME_LABEL]
    host_index = labels.get(WORKER_ID_LABEL, "")
    if not host_index.isdecimal():  # nothing is guessed: a host without a number is not host 0
        return f"host {node['NodeManagerAddress']} of {slice_name} has no usable {WORKER_ID_LABEL} ({host_index!r})"
    try:
        config = live_config(labels.get(POD_TYPE_LABEL, ""), chips)
    except InvalidRequestError as error:
        return f"host {host_index} of {slice_name}: {error}"
    attributes = {
        **operator_attributes(labels),
        TPU_NAME: AttributeValue(slice_name),
        TPU_WORKER_ID: AttributeValue(int(host_index)),
        TPU_TOPOLOGY: AttributeValue(config.name),
        TPU_VM_COUNT: AttributeValue(config.vm_count),
    }
    unclaimed = table.available.get(node_id)  # Ray leaves a resource out of which nothing is left
    taken = 0.0 if unclaimed is None else chips - unclaimed.get("TPU", 0.0) - ours
    return WorkerRegisteredEvent(
        node_id,
        node["NodeManagerAddress"],
        attributes,
        dict(resources),
        draining=draining,
        foreign=f"{taken:g} chips of host {host_index} are in use outside iris_ray" if taken > 0 else None,
        deadline=deadline,
    )


@cache
def live_config(pod_type: str, chips: float) -> TPUConfig:
    """What a TPU type is like if its hosts have so many chips; the same for thousands of hosts, twice a second."""
    return get_tpu_config(pod_type).with_live_hosts(chips)


def operator_attributes(labels: Mapping[str, str]) -> dict[str, AttributeValue]:
    """A node's labels as attributes: under their own names as strings, and those of the operator by their short names.

    An operator sets ``iris/<key>``, which is typed: ``iris/tpu-pool=large-jobs``, ``iris/disk-gb=500``. A label can't
    hold a colon, so ``iris/taint.<name>`` is the taint ``<name>``. No label overrides what iris_ray reports itself.
    """
    attributes = {name: _text(value) for name, value in labels.items()}
    for name, value in labels.items():
        if name.startswith(OPERATOR_PREFIX):
            key = name.removeprefix(OPERATOR_PREFIX)
            if key.startswith(TAINT_LABEL):
                key = TAINT_PREFIX + key.removeprefix(TAINT_LABEL)
            attributes[key] = AttributeValue.parse(value)
    return attributes


@lru_cache(maxsize=100_000)
def _text(value: str) -> AttributeValue:
    """A label's value; the same for thousands of hosts."""
    return AttributeValue(value)


def failure(node: Mapping[str, Any]) -> WorkerFailedEvent:
    """The event for a node that Ray declared dead."""
    reason = node.get("DeathReasonMessage") or "Ray declared the node dead"
    return WorkerFailedEvent(node["NodeID"], f"the host died: {str(reason).strip()[:200]}")
