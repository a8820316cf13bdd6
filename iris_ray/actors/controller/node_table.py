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
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
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
    """Return what one live node is to the scheduler: a worker, or of no use, and why.

    Args:
        node: an entry of ``ray.nodes()``.
        table: the reading that it comes from.
        ours: how many of its chips are reserved by iris_ray.
    """
    try:
        attributes = attributes_of(node)
    except InvalidRequestError as error:
        return str(error)
    node_id, address, resources = node["NodeID"], node["NodeManagerAddress"], node.get("Resources", {})
    draining, deadline = None, None
    if node_id in table.draining:
        draining = "Ray is draining it"
        deadline = table.draining[node_id] / 1000 or None  # 0: none
    unclaimed = table.available.get(node_id)  # Ray leaves a resource out of which nothing is left
    taken = 0.0 if unclaimed is None else resources.get(TPU, 0.0) - unclaimed.get(TPU, 0.0) - ours
    foreign = None
    if taken > 0:
        foreign = f"{taken:g} chips of host {attributes[TPU_WORKER_ID].value} are in use outside iris_ray"
    return WorkerRegisteredEvent(
        node_id, address, attributes, dict(resources), draining=draining, foreign=foreign, deadline=deadline
    )


def attributes_of(node: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return what constraints of jobs and models see of a live node: its labels, and the place of a TPU host.

    Raises:
        InvalidRequestError: it has chips or labels of a TPU host, and not all that it needs. The message says what.
    """
    labels, chips = node.get("Labels", {}), node.get("Resources", {}).get(TPU, 0.0)
    attributes = operator_attributes(labels)
    if not chips and SLICE_NAME_LABEL not in labels:
        return attributes
    if SLICE_NAME_LABEL not in labels:
        raise InvalidRequestError(f"host {node['NodeManagerAddress']} has TPU chips and no label {SLICE_NAME_LABEL}")
    slice_name = labels[SLICE_NAME_LABEL]
    host = f"host {node['NodeManagerAddress']} of {slice_name}"
    if not chips:
        raise InvalidRequestError(f"{host} has no TPU chips that Ray knows of")
    host_index = labels.get(WORKER_ID_LABEL, "")
    if not host_index.isdecimal():  # nothing is guessed: a host without a number is not host 0
        raise InvalidRequestError(f"{host} has no usable {WORKER_ID_LABEL} ({host_index!r})")
    try:
        config = live_config(labels.get(POD_TYPE_LABEL, ""), chips)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"host {host_index} of {slice_name}: {error}") from error
    return {
        **attributes,
        TPU_NAME: AttributeValue(slice_name),
        TPU_WORKER_ID: AttributeValue(int(host_index)),
        TPU_TOPOLOGY: AttributeValue(config.name),
        TPU_VM_COUNT: AttributeValue(config.vm_count),
    }


@cache
def live_config(pod_type: str, chips: float) -> TPUConfig:
    """Return what a TPU type is like if its hosts have so many chips: the same for thousands of hosts."""
    return get_tpu_config(pod_type).with_live_hosts(chips)


def operator_attributes(labels: Mapping[str, str]) -> dict[str, AttributeValue]:
    """Return a node's labels as attributes: by their own names as strings, the operator's by their short names.

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
    """Return a label's value: the same for thousands of hosts."""
    return AttributeValue(value)


def failure(node: Mapping[str, Any]) -> WorkerFailedEvent:
    """Return the event for a node that Ray declared dead."""
    reason = node.get("DeathReasonMessage") or "Ray declared the node dead"
    return WorkerFailedEvent(node["NodeID"], f"the host died: {str(reason).strip()[:200]}")
