"""What Ray detects by itself on a node, asked on another machine: Ray's own code, with the environment of that node."""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

from ray._private import resource_and_label_spec
from ray._private.accelerators import tpu
from ray._private.label_utils import parse_node_labels_string
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray.autoscaler._private.kuberay.utils import tpu_node_selectors_to_type

from iris_ray.testing.ray_node.head import OBJECT_STORE_BYTES, Resources

_lock = threading.Lock()


def detected(environment: Mapping[str, str], options: Mapping[str, str], address: str, *, is_head: bool) -> Resources:
    """Return the resources and labels that ``ray start`` would give a node.

    Args:
        environment: of the node's processes.
        options: of ``ray start``, without dashes.
        address: IP address of the node.
        is_head: whether it is the head.
    """
    spec = ResourceAndLabelSpec(
        num_cpus=int(options["num-cpus"]) if "num-cpus" in options else None,
        num_gpus=int(options.get("num-gpus", 0)),  # those of this machine are not the node's
        memory=int(options["memory"]) if "memory" in options else None,
        object_store_memory=OBJECT_STORE_BYTES,
        resources=json.loads(options.get("resources", "{}")),
        labels=parse_node_labels_string(options.get("labels", "")),
    )
    with _in_environment(environment):
        spec.resolve(is_head=is_head, node_ip_address=address)
    return spec


def device_plugin_variables(node_selector: Mapping[str, str]) -> dict[str, str]:
    """Return what GKE's TPU device plugin tells a container of the slice that its node belongs to.

    Args:
        node_selector: the pod's, with the accelerator and the topology.
    """
    topology = node_selector.get("cloud.google.com/gke-tpu-topology", "")
    tpu_type = tpu_node_selectors_to_type(topology, node_selector.get("cloud.google.com/gke-tpu-accelerator", ""))
    if tpu_type is None:
        return {}
    return {"TPU_ACCELERATOR_TYPE": tpu_type, "TPU_TOPOLOGY": topology, "TPU_SKIP_MDS_QUERY": "true"}


@contextmanager
def _in_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Have the two modules of Ray that detect resources see another environment, and no metadata server of Google's.

    This process's own environment stays as it is: other threads read it, and start processes with it.
    """
    theirs = SimpleNamespace(**{**vars(os), "environ": dict(environment), "getenv": dict(environment).get})
    with _lock:
        ask_google = tpu._get_tpu_metadata
        tpu.os = resource_and_label_spec.os = theirs
        tpu._get_tpu_metadata = lambda key: None
        try:
            yield
        finally:
            tpu.os = resource_and_label_spec.os = os
            tpu._get_tpu_metadata = ask_google
