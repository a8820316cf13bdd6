"""Starts Ray's own processes as ``ray start`` would, minus what a simulated cluster does not need.

The only module of this package that touches Ray's private API; checked on Ray 2.60.0. What it relies on:

- ``ray._private.services`` builds each process's command line and runs it through its module-level function
  ``start_ray_process``, which is replaced while a node is started, so that every process gets a keeper;
- a raylet finds its agents' ports in files of its session directory, named by ``get_port_filename``; it ends when its
  dashboard agent ends, and does not mind one that does nothing;
- the runtime_env agent's script binds the port given to it with ``socket.bind`` (see ``lazy_agent.py``);
- ``Node``, used for the head only, does its work through the methods overridden here.
"""

import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.resource_isolation_config import ResourceIsolationConfig
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    get_port_filename,
)
from ray.core.generated import autoscaler_pb2
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from iris_ray.testing.machine import script_command

Launch = Callable[[str, Sequence[str]], subprocess.Popen[bytes]]
"""Runs a command for a purpose ("raylet", "gcs_server", …) and returns the process to watch."""

GCS = "gcs_server"
"""The purpose for which Ray starts its GCS."""
RAYLET = "raylet"
"""The purpose for which Ray starts a raylet."""

_OBJECT_STORE_BYTES = 256 * 2**20  # of each node; memory is only taken as objects fill it
_DRAIN_TIMEOUT_S = 3.0
_SHARED_MEMORY = Path("/dev/shm")
_NOT_IN_USE = -1  # how Ray's agents themselves report a service that they do not offer

# Settings of Ray's processes that a user's own environment may override.
_RAY_SETTINGS = {
    # A killed host is found in 1.5 s and a frozen one in 15 s, instead of 15 s and a minute. A host whose machine is
    # merely busy must not count as frozen: all of them share one.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    # A raylet that looks for its own object store a moment too early looks again after 20 ms, not after 1 s.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # No worker before somebody needs one: each costs 1.5 s of CPU.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Metrics go to the agent that is not there.
    "RAY_enable_metrics_collection": "0",
    # Every raylet would watch the same machine's memory, and kill workers for what the others use.
    "RAY_memory_monitor_refresh_ms": "0",
}


@dataclass(frozen=True)
class HostSpec:
    """What a raylet on one simulated TPU VM says about itself.

    Attributes:
        node_id: hex id.
        cpus: logical CPUs.
        resources: custom resources, ``TPU`` among them.
        labels: node labels.
        directory: the host's private directory.
        socket_prefix: path that the names of its Unix sockets begin with; short, the kernel allows 107 bytes.
        address: its IP address.
    """

    node_id: str
    cpus: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    directory: Path
    socket_prefix: str
    address: str


class _ResolvedSpec(ResourceAndLabelSpec):  # type: ignore[misc]
    """Resources that are final: Ray's own detection would ask this machine, and Google's metadata server."""

    def __init__(self, cpus: int, object_store: int, resources: dict[str, float], labels: dict[str, str]):
        super().__init__(cpus, 0, psutil.virtual_memory().total // 2, object_store, resources, labels)

    def resolved(self) -> bool:
        return True


@dataclass
class _Launching(threading.local):
    """How the calling thread wants Ray's processes to be run; None outside of a start."""

    launch: Launch | None = field(default=None)


_launching = _Launching()
_patch_lock = threading.Lock()


@contextmanager
def _launched_by(launch: Launch) -> Iterator[None]:
    """Within, the processes that this thread asks Ray to start are run by ``launch``."""

    def start_ray_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if _launching.launch is None:  # somebody else's ray.init() in another thread
            return original(command, process_type, *args, **kwargs)
        other_fields = services.ProcessInfo._fields[1:]  # log files, debuggers: none
        return services.ProcessInfo(_launching.launch(process_type, command), **dict.fromkeys(other_fields))

    with _patch_lock:
        original = services.start_ray_process
        services.start_ray_process = start_ray_process
        _launching.launch = launch
        try:
            yield
        finally:
            _launching.launch = None
            services.start_ray_process = original


class _HeadNode(Node):  # type: ignore[misc]
    """The head: a GCS, a raylet without TPU and a log monitor; an API server only if it is wanted."""

    def __init__(self, params: RayParams, cpus: int) -> None:
        self._cpus = cpus
        super().__init__(params, head=True, shutdown_at_exit=False, spawn_reaper=False)

    def get_resource_and_label_spec(self) -> ResourceAndLabelSpec:
        address = self.node_ip_address
        resources = {f"node:{address}": 1.0, "node:__internal_head__": 1.0}
        return _ResolvedSpec(self._cpus, _OBJECT_STORE_BYTES, resources, {})

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        # Without a dashboard Ray starts one all the same, for usage statistics, and waits 2 s for it.
        if include_dashboard:
            super().start_api_server(include_dashboard=True, raise_on_failure=raise_on_failure)

    def start_ray_processes(self) -> None:
        super().start_ray_processes()
        # Node looks for itself in the GCS next, and if it looks too early, again only after a second.
        (raylet,) = self.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
        while self._node_id not in _living_nodes(self):
            if raylet.process.poll() is not None:
                raise RuntimeError("the raylet of the head ended.")
            time.sleep(0.01)


class RayHead:
    """The running head node, and the way to the cluster's state.

    Args:
        root: the cluster's directory; Ray's session directory goes there.
        address: IP address of the head.
        cpus: logical CPUs of the head.
        dashboard: whether to start Ray's dashboard, which ``ray job submit`` and the state API need.
        launch: runs each of the head's processes.
    """

    def __init__(self, root: Path, *, address: str, cpus: int, dashboard: bool, launch: Launch) -> None:
        ensure_token_if_auth_enabled(create_token_if_missing=True)
        params = RayParams(
            num_cpus=cpus,
            num_gpus=0,
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
                command = self._as_wanted(command)
            return launch(kind, command)

        with _launched_by(launch_on_head):
            self._node = _HeadNode(params, cpus)

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
        """The command line of another GCS in place of this one: it has the same port, where everybody looks for it."""
        port = self.gcs_address.rpartition(":")[2]
        return [_replace(argument, {"gcs_server_port": port}) for argument in self._gcs_command]

    def begin_anew(self) -> Sequence[str]:
        """From now on the head is another node, at the same address; the command line of its raylet."""
        before, self._node._node_id = self.node_id, new_node_id()
        self._gcs_command = [argument.replace(before, self.node_id) for argument in self._gcs_command]
        self._raylet_command = [argument.replace(before, self.node_id) for argument in self._raylet_command]
        return self._as_wanted(self._raylet_command)

    def _as_wanted(self, raylet_command: Sequence[str]) -> Sequence[str]:
        if self._has_agents:
            return raylet_command
        return _without_agents(raylet_command, Path(_flag(raylet_command, "session_dir")), self._address)

    def start_host(self, spec: HostSpec, launch: Launch) -> None:
        """Starts the raylet of a host, and returns before it has joined."""
        node = self._node
        runtime_env_dir = spec.directory / "runtime_resources"
        runtime_env_dir.mkdir()
        resources = {**spec.resources, f"node:{spec.address}": 1.0}
        session_dir = Path(node.get_session_dir_path())
        # Not in the cluster's log directory: its log monitor would print each raylet's stack trace in the terminal.
        logs = spec.directory / "logs"

        def launch_raylet(kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            return launch(kind, _without_agents(command, session_dir, spec.address))

        with _launched_by(launch_raylet):
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
                log_dir=node.get_logs_dir_path(),  # one for all: the head's log monitor reads it
                resource_and_label_spec=_ResolvedSpec(spec.cpus, _OBJECT_STORE_BYTES, resources, dict(spec.labels)),
                plasma_directory=_plasma_directory(spec.directory),
                fallback_directory=str(spec.directory),
                object_store_memory=_OBJECT_STORE_BYTES,
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
        """Hex ids of the nodes that the GCS holds to be alive."""
        return _living_nodes(self._node)

    def announce_preemption(self, node_id: str, message: str, deadline: float) -> bool:
        """Marks a node as draining because it is about to be preempted.

        Args:
            node_id: hex id.
            message: for people who look at the node.
            deadline: Unix time in seconds at which the node is going to be gone.

        Returns:
            Whether the node's raylet has taken note of it; a frozen one does not answer.
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


def _plasma_directory(fallback: Path) -> str:
    """Where an object store's memory is mapped from: shared memory, unless it is too small, as in many containers."""
    if _SHARED_MEMORY.is_dir() and psutil.disk_usage(str(_SHARED_MEMORY)).free >= _OBJECT_STORE_BYTES:
        return str(_SHARED_MEMORY)
    return str(fallback)


def _living_nodes(node: Node) -> set[str]:
    nodes = node.get_gcs_client().get_all_node_info(timeout=10)
    return {id.hex() for id, info in nodes.items() if info.state == GcsNodeInfo.GcsNodeState.ALIVE}


def new_node_id() -> str:
    """A hex node id that no other node has."""
    return str(ray.NodeID.from_random().hex())


def ray_settings() -> dict[str, str]:
    """Environment for all of the cluster's Ray processes; a user's own environment wins over it."""
    return dict(_RAY_SETTINGS)


def gcs_storage(directory: Path) -> dict[str, str]:
    """Environment for a GCS that keeps everything in a directory, so that another one can go on in its place."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)}


def _without_agents(command: Sequence[str], session_dir: Path, address: str) -> list[str]:
    """A raylet's command line with its dashboard agent left out and its runtime_env agent started on demand.

    Side effect: the port files of the dashboard agent, which the raylet reads, are written.
    """
    node_id = _flag(command, "node_id")
    for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
        (session_dir / get_port_filename(node_id, name)).write_text(str(_NOT_IN_USE))
    port_file = session_dir / get_port_filename(node_id, RUNTIME_ENV_AGENT_PORT_NAME)
    agent = shlex.split(_flag(command, "runtime_env_agent_command"))
    script = next(i for i, argument in enumerate(agent) if argument.endswith(".py"))
    lazy = [
        *script_command("lazy_agent.py"),
        "wait",
        address,
        str(port_file),
        *agent[:script],
        "--",
        *agent[script:],
    ]
    replaced = {
        # Through a shell, because the raylet adds arguments of its own.
        "dashboard_agent_command": subprocess.list2cmdline(["/bin/sh", "-c", "exec sleep infinity"]),
        "runtime_env_agent_command": subprocess.list2cmdline(lazy),
        "num_prestart_python_workers": "0",
    }
    return [_replace(argument, replaced) for argument in command]


def _flag(command: Sequence[str], name: str) -> str:
    """The value of ``--name=value`` in a command line."""
    prefix = f"--{name}="
    return next(argument.removeprefix(prefix) for argument in command if argument.startswith(prefix))


def _replace(argument: str, values: Mapping[str, str]) -> str:
    """``--name=value`` with another value if ``values`` has one for it."""
    name, equals, _ = argument.partition("=")
    value = values.get(name.removeprefix("--"))
    return argument if not equals or value is None else f"{name}={value}"
