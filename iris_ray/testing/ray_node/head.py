"""The head node of a simulated cluster, which starts the raylets of the other hosts."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.resource_isolation_config import ResourceIsolationConfig
from ray._private.utils import write_ray_address
from ray.core.generated import autoscaler_pb2
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from iris_ray.testing.ray_node.launching import (
    GCS,
    RAYLET,
    Launch,
    flag,
    launched_by,
    replace_flag,
    without_agents,
)

_DRAIN_TIMEOUT_S = 3.0
OBJECT_STORE_BYTES = 256 * 2**20  # of each node; memory is only taken as objects fill it
_SHARED_MEMORY = Path("/dev/shm")

Resources: TypeAlias = ResourceAndLabelSpec
"""The resources and labels of a node."""


@dataclass(frozen=True)
class HostSpec:
    """One simulated host, as its raylet describes it.

    Attributes:
        node_id: hex id.
        resources: its resources, ``TPU`` among them, and its labels.
        directory: the host's private directory.
        socket_prefix: the beginning of the paths of its Unix sockets; short, as the kernel allows 107 bytes.
    """

    node_id: str
    resources: Resources
    directory: Path
    socket_prefix: str
    address: str


class _HeadNode(Node):  # type: ignore[misc]
    """The head: a GCS, a raylet without TPU and a log monitor; with a dashboard also an API server."""

    def __init__(self, params: RayParams, resources: Resources) -> None:
        self._resources = resources
        super().__init__(params, head=True, shutdown_at_exit=False, spawn_reaper=False)

    def get_resource_and_label_spec(self) -> Resources:
        return self._resources

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        # Ray would start one even without a dashboard, for usage statistics, and wait 2 s for it.
        if include_dashboard:
            super().start_api_server(include_dashboard=True, raise_on_failure=raise_on_failure)

    def start_ray_processes(self) -> None:
        # Each of Ray's processes makes this a link to libtpu's logs, unless it is a directory. Ray's log monitor would
        # show all that this machine's programs have ever left there in the driver's terminal.
        libtpus = Path(self.get_logs_dir_path(), "tpu_logs")
        libtpus.unlink(missing_ok=True)
        libtpus.mkdir(exist_ok=True)
        super().start_ray_processes()
        # Node looks for itself in the GCS next; if it looks too early, it looks again only after a second.
        (raylet,) = self.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
        while self._node_id not in _living_nodes(self):
            if raylet.process.poll() is not None:
                raise RuntimeError("the raylet of the head ended.")
            time.sleep(0.01)


class RayHead:
    """The running head node, and access to the cluster's state.

    Args:
        root: the cluster's directory; Ray's session directory goes there.
        address: IP address of the head.
        resources: resources and labels of the head.
        dashboard: whether to start Ray's dashboard, which ``ray job submit`` and the state API need.
        launch: runs each of the head's processes.
    """

    def __init__(self, root: Path, *, address: str, resources: Resources, dashboard: bool, launch: Launch) -> None:
        ensure_token_if_auth_enabled(create_token_if_missing=True)
        params = RayParams(
            node_ip_address=address,
            temp_dir=str(root),
            raylet_socket_name=f"{root}/s/head-raylet",
            plasma_store_socket_name=f"{root}/s/head-store",
            include_dashboard=dashboard,
            dashboard_port=None,  # the first free one from 8265
            dashboard_agent_listen_port=0,
            no_monitor=True,  # no autoscaler
            min_worker_port=0,
            max_worker_port=0,
            resource_isolation_config=ResourceIsolationConfig(),
        )

        self._gcs_command: Sequence[str] = ()
        self._raylet_command: Sequence[str] = ()
        self._has_agents, self._address = dashboard, address

        def launch_on_head(kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            if kind == GCS:
                self._gcs_command = command
            if kind == RAYLET:
                self._raylet_command = command
                command = self._with_or_without_agents(command)
            return launch(kind, command)

        with launched_by(launch_on_head):
            self._node = _HeadNode(params, resources)
        write_ray_address(self.gcs_address, str(root))  # else jobs of Ray's job API join any cluster of this machine

    @property
    def gcs_address(self) -> str:
        """``host:port`` to connect a driver to."""
        return str(self._node.gcs_address)

    @property
    def node_id(self) -> str:
        """Hex id of the head node."""
        return str(self._node.node_id)

    @property
    def dashboard_url(self) -> str | None:
        """``host:port`` of the dashboard, None without one."""
        url: str | None = self._node.webui_url
        return url

    @property
    def gcs_command(self) -> list[str]:
        """The command line of a GCS that replaces this one at its port, which all others know."""
        port = self.gcs_address.rpartition(":")[2]
        return [replace_flag(argument, {"gcs_server_port": port}) for argument in self._gcs_command]

    def begin_anew(self) -> Sequence[str]:
        """Make the head another node at the same address. Return the command line of its raylet."""
        before, self._node._node_id = self.node_id, new_node_id()
        self._gcs_command = [argument.replace(before, self.node_id) for argument in self._gcs_command]
        self._raylet_command = [argument.replace(before, self.node_id) for argument in self._raylet_command]
        return self._with_or_without_agents(self._raylet_command)

    def _with_or_without_agents(self, raylet_command: Sequence[str]) -> Sequence[str]:
        if self._has_agents:
            return raylet_command
        return without_agents(raylet_command, Path(flag(raylet_command, "session_dir")), self._address)

    def start_host(self, spec: HostSpec, launch: Launch) -> None:
        """Start the raylet of a host, and return before it has joined."""
        node = self._node
        runtime_env_dir = spec.directory / "runtime_resources"
        runtime_env_dir.mkdir()
        session_dir = Path(node.get_session_dir_path())
        # Not in the cluster's log directory: its log monitor would print each raylet's stack trace in the terminal.
        logs = spec.directory / "logs"

        def launch_raylet(kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            return launch(kind, without_agents(command, session_dir, spec.address))

        with launched_by(launch_raylet):
            services.start_raylet(
                redis_address=node.redis_address,
                gcs_address=node.gcs_address,
                node_id=spec.node_id,
                node_ip_address=spec.address,
                node_manager_port=0,
                raylet_name=f"{spec.socket_prefix}r",
                plasma_store_name=f"{spec.socket_prefix}s",
                cluster_id=node.cluster_id.hex(),
                worker_path=node._ray_params.worker_path,
                setup_worker_path=node._ray_params.setup_worker_path,
                temp_dir=node.get_temp_dir_path(),
                session_dir=str(session_dir),
                resource_dir=str(runtime_env_dir),
                log_dir=node.get_logs_dir_path(),  # one for all nodes: the head's log monitor reads it
                resource_and_label_spec=spec.resources,
                plasma_directory=plasma_directory(spec.directory),
                fallback_directory=str(spec.directory),
                object_store_memory=OBJECT_STORE_BYTES,
                session_name=node.session_name,
                is_head_node=False,
                resource_isolation_config=ResourceIsolationConfig(),
                metrics_agent_port=0,
                metrics_export_port=0,
                dashboard_agent_listen_port=0,
                runtime_env_agent_port=0,
                raylet_stdout_filepath=str(logs / "raylet.out"),
                raylet_stderr_filepath=str(logs / "raylet.err"),
                runtime_env_agent_stdout_filepath=str(logs / "runtime_env_agent.out"),
                runtime_env_agent_stderr_filepath=str(logs / "runtime_env_agent.err"),
                runtime_env_agent_log_filepath=str(logs / "runtime_env_agent.log"),
                max_bytes=node.max_bytes,
                backup_count=node.backup_count,
                fate_share=False,
                webui=node.webui_url,
            )

    def living_nodes(self) -> set[str]:
        """Return the hex ids of the nodes that are alive for the GCS."""
        return _living_nodes(self._node)

    def announce_preemption(self, node_id: str, message: str, deadline: float) -> bool:
        """Mark a node as draining because it is about to be preempted.

        Args:
            node_id: hex id.
            message: the reason, for people.
            deadline: when the node ends, as Unix time in seconds.

        Returns:
            Whether the node's raylet has accepted it; a frozen raylet does not answer.
        """
        try:
            accepted, _ = self._node.get_gcs_client().drain_node(
                node_id,
                autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
                message,
                int(deadline * 1000),
                timeout=_DRAIN_TIMEOUT_S,
            )
        except ray.exceptions.RpcError:
            return False
        return bool(accepted)


def _living_nodes(node: Node) -> set[str]:
    nodes = node.get_gcs_client().get_all_node_info(timeout=10)
    return {id.hex() for id, info in nodes.items() if info.state == GcsNodeInfo.GcsNodeState.ALIVE}


class ResolvedSpec(ResourceAndLabelSpec):  # type: ignore[misc]
    """Resources that are final: Ray's own detection would ask this machine, and Google's metadata server.

    Args:
        address: IP address of the node.
        cpus: logical CPUs.
        gpus: GPUs that it pretends to have.
        resources: custom resources, ``TPU`` among them.
        labels: of the node.
    """

    def __init__(self, address: str, cpus: int, gpus: int, resources: Mapping[str, float], labels: Mapping[str, str]):
        own = {f"node:{address}": 1.0, **resources}
        super().__init__(cpus, gpus, psutil.virtual_memory().total // 2, OBJECT_STORE_BYTES, own, dict(labels))

    def resolved(self) -> bool:
        return True


def resources_of_head(address: str, cpus: int) -> Resources:
    """Return the resources of a head that has nothing but CPUs."""
    return ResolvedSpec(address, cpus, 0, {"node:__internal_head__": 1.0}, {})


def new_node_id() -> str:
    """Return a hex node id that no other node has."""
    return str(ray.NodeID.from_random().hex())


def plasma_directory(fallback: Path) -> str:
    """Return where to map an object store's memory: shared memory, or ``fallback`` if that is too small, as in many
    containers."""
    if _SHARED_MEMORY.is_dir() and psutil.disk_usage(str(_SHARED_MEMORY)).free >= OBJECT_STORE_BYTES:
        return str(_SHARED_MEMORY)
    return str(fallback)
