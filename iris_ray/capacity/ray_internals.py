"""Uses of private Ray APIs that concern Ray's autoscaler, checked on Ray 2.60.0: when Ray changes, look here."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray.experimental import internal_kv

from iris_ray.actors.calls.ray_internals import STORE_TIMEOUT_S


def runs_autoscaler(environ: Mapping[str, str]) -> bool:
    """Return whether an autoscaler serves this cluster. Call this on the head: it looks through its processes.

    Every head has a monitor process, but only an autoscaler has a configuration. KubeRay runs the autoscaler in a
    container beside the head's, and starts the head without a monitor.

    Args:
        environ: the head's environment.
    """
    if "--no-monitor" in environ.get("KUBERAY_GEN_RAY_START_CMD", ""):
        return True
    ours = f"--gcs-address={ray.get_runtime_context().gcs_address}"
    commands = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return any(
        ours in command and any(part.startswith("--autoscaling-config=") for part in command) for command in commands
    )


def has_autoscaler_v2() -> bool:
    """Return whether this cluster's autoscaler is version 2, which respects label selectors. This blocks."""
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return bool(is_autoscaler_v2(fetch_from_server=True, gcs_client=internal_kv.global_gcs_client))


def counts_hosts() -> bool:
    """Return whether Ray's autoscaler on KubeRay launches hosts, and rounds them down to whole slices.

    That of Ray 2.49 makes a slice for each host that it launches.
    """
    from ray.autoscaler._private.kuberay import node_provider

    return hasattr(node_provider, "_worker_group_num_of_hosts")


def autoscaler_launches() -> tuple[str, ...]:
    """Return what version 2 of the autoscaler says about nodes that it launches, in words. This blocks.

    It names node types as the cluster's configuration does. Of version 1 nothing is known.
    """
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=int(STORE_TIMEOUT_S))
    launching = Counter[str]()
    for launch in status.pending_launches:
        launching[launch.ray_node_type_name] += launch.count
    launching.update(node.ray_node_type_name for node in status.pending_nodes)
    failed = {launch.ray_node_type_name: launch for launch in sorted(status.failed_launches, key=_failed_at)}
    return (
        *(f"it is launching {count} of {name}" for name, count in sorted(launching.items())),
        *(f"its last launch of {name} failed: {launch.details}" for name, launch in sorted(failed.items())),
    )


def _failed_at(launch: Any) -> int:
    return launch.failed_ts_s or 0
