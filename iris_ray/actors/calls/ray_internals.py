"""The kernel's uses of private Ray APIs, checked on Ray 2.49.2, 2.55.1 and 2.60.0: when Ray changes, look here.

Those of Ray's autoscaler are in `iris_ray.capacity.ray_internals`.
"""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray._private import ray_constants, services, utils
from ray._private.auto_init_hook import wrap_auto_init
from ray._private.runtime_env import packaging
from ray._raylet import GcsClient, PlacementGroupID, setproctitle  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.exceptions import RpcError
from ray.experimental import internal_kv
from ray.job_config import JobConfig
from ray.remote_function import RemoteFunction
from ray.util import metrics
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

STORE_TIMEOUT_S = 5.0
RAY_VERSION = tuple(map(int, ray.__version__.split(".")[:2]))
MOST_PACKAGE_BYTES = packaging.GCS_STORAGE_MAX_SIZE
"""Limit for a directory that travels to the cluster."""
STREAM: Mapping[str, Any] = {"num_returns": "streaming", "_generator_backpressure_num_objects": 16}
"""Options of a call that yields pieces: its generator waits while this number of pieces is unread. The call must run in
a thread of its own. In an event loop, one waiting generator would hold up all others."""


def draining_nodes() -> dict[str, int]:
    """Return the deadline of each node that Ray drains, by node id; in ms since the epoch, 0 for no deadline.

    Ray Serve uses the same call.
    """
    return dict(ray._private.state.state.get_draining_nodes())


def announce_end(node_id: str, message: str, deadline: float, gcs_address: str | None = None) -> str | None:
    """Have Ray drain a node that is about to be preempted: Ray accepts no other drain of a busy node. This blocks.

    Args:
        node_id: the node.
        message: why, for people.
        deadline: when the node ends, in Unix time. Ray does not end it.
        gcs_address: the GCS of the node's cluster; None: that of the cluster to which this process is connected.

    Returns:
        None, or why Ray does not drain it.
    """
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    limit = {} if RAY_VERSION < (2, 60) else {"timeout": STORE_TIMEOUT_S}
    try:
        client = internal_kv.global_gcs_client if gcs_address is None else GcsClient(address=gcs_address)
        accepted, refusal = client.drain_node(node_id, reason, message, int(deadline * 1000), **limit)
    except RpcError as error:
        return f"Ray does not answer: {error}"
    return None if accepted else refusal


def on_host(node_id: str, address: str) -> dict[str, Any]:
    """Return Ray's options for an actor or task that runs on this host and takes no CPU.

    It asks for a bit of the node's own resource: without any resource it may be sent to a node that has just died
    (Ray 2.60).
    """
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"num_cpus": 0, "resources": {f"node:{address}": 0.001}, "scheduling_strategy": strategy}


def driver_lives(job_id: str) -> bool:
    """Return whether the driver of a Ray job, by its id, is still connected."""
    jobs = ray._private.state.state.job_table()
    return any(job["JobID"] == job_id and not job["IsDead"] for job in jobs)


def temp_dir() -> str:
    """Return Ray's own directory on this node, which is the same for all of its processes."""
    if RAY_VERSION < (2, 55):
        return str(ray._private.worker._global_node.get_temp_dir_path())
    return str(ray.get_runtime_context().get_temp_dir())


def addresses_found_on_this_machine() -> list[str]:
    """Return the addresses of the clusters among which ``ray.init("auto")`` chooses here.

    Ray looks among the processes, then in the file that its last ``ray start`` on this machine has written.
    """
    running = sorted(services.find_gcs_addresses())
    if len(running) > 1:
        return running
    try:
        found: str | None = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return []
    return [found] if found else []


def may_join_from_here() -> bool:
    """Return False if no driver on this machine can join any cluster, as no Ray node runs here. Ray waits a minute for
    one, and then says "No node info found". Older versions of Ray compare IP addresses instead: True.
    """
    return not hasattr(services, "find_node_ids") or bool(services.find_node_ids())


def address_of_own_cluster() -> str | None:
    """Return the address of the cluster whose raylet has started this process; None if no raylet has.

    Ray's job API names a cluster in ``RAY_ADDRESS``: if several run on the machine, any of them.
    """
    for parent in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            program, *options = parent.cmdline() or [""]
            given = [option.partition("=")[2] for option in options if option.startswith("--gcs-address=")]
            if given and Path(program).name == "raylet":
                return given[0]
    return None


def available_resources_by_node() -> dict[str, dict[str, float]]:
    """Return the unclaimed resources of each node, by node id."""
    return dict(ray._private.state.available_resources_per_node())


def label_output(name: str, stderr: bool = True) -> None:
    """Label this process's output from now on: Ray's driver shows ``(<name> pid=…, ip=…)`` before each line.

    Ray's log monitor takes the name of an actor from such a line. Ray itself writes one at the actor's start.
    """
    for stream in (sys.stdout, sys.stderr) if stderr else (sys.stdout,):
        print(f"{ray_constants.LOG_PREFIX_ACTOR_NAME}{name}", file=stream, flush=True)


def name_process(title: str) -> None:
    """Show a title in place of this process's command, as Ray does for its workers."""
    setproctitle(title)


def walk_package(directory: Path, excludes: list[str], handle: Callable[[Path], None]) -> None:
    """Call a function for each file and directory of a package that Ray would send, given the excluded patterns."""
    quiet = logging.Logger(__name__, logging.CRITICAL)
    if RAY_VERSION < (2, 55):  # excludes nothing by itself
        packaging._dir_travel(directory, [packaging._get_excludes(directory, excludes)], handle, logger=quiet)
        return
    patterns = [*ray_constants.get_runtime_env_default_excludes(), *excludes]
    with_gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    packaging._dir_travel(
        directory,
        [packaging._get_excludes(directory, patterns)],
        handle,
        include_gitignore=with_gitignore,
        logger=quiet,
    )


KEEP_PACKAGE_S = 600
"""The life of a stored package that no Ray job names; seconds."""


def fetch_package(uri: str) -> bytes | None:
    """Return a package that Ray keeps for runtime environments, such as ``gcs://….zip``; None if it is gone."""
    found: bytes | None = internal_kv._internal_kv_get(uri)
    return found


def store_package(uri: str, data: bytes) -> None:
    """Have Ray keep a package under a URI, as if a driver had sent its directory."""
    internal_kv._pin_runtime_env_uri(uri, expiration_s=KEEP_PACKAGE_S)
    if internal_kv._internal_kv_get(uri) is None:
        packaging.upload_package_to_gcs(uri, data)


def delete_packages(beginning: str) -> None:
    """Delete all packages in the GCS whose names begin so."""
    internal_kv._internal_kv_del(f"gcs://{beginning}", del_by_prefix=True)


def send_package(client: "JobSubmissionClient", uri: str, data: bytes) -> None:
    """Have a dashboard store a package under a URI; no Ray job refers to it."""
    answer = client._do_request("PUT", f"/api/packages/{uri.replace('://', '/')}", data=data)
    if answer.status_code != 200:
        client._raise_error(answer)


def take_package(uri: str, gcs_address: str) -> bytes | None:
    """Return a package, and delete it; None if it is gone. This process need not be connected.

    Args:
        uri: of the package.
        gcs_address: of the cluster's GCS.
    """
    client = GcsClient(address=gcs_address)
    found: bytes | None = client.internal_kv_get(uri.encode(), None, timeout=STORE_TIMEOUT_S)
    client.internal_kv_del(uri.encode(), False, None, timeout=STORE_TIMEOUT_S)
    return found or None


def logs_directory() -> Path:
    """Return the directory of Ray's logs on this node, whose files the dashboard shows. This process is connected."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def http_access(client: "JobSubmissionClient") -> dict[str, Any]:
    """Return the arguments of an `aiohttp.ClientSession` whose requests a dashboard takes as those of a client."""
    import aiohttp

    insecure = {"connector": aiohttp.TCPConnector(ssl=False)} if client._verify is False else {}
    return {"headers": dict(client._headers), "cookies": client._cookies, **insecure}


def remote_function_parts(function: RemoteFunction) -> tuple[Any, dict[str, Any]]:
    """Return the plain function behind a Ray remote function, and its options."""
    return function._function, dict(function._default_options)


def is_client_mode() -> bool:
    """Return whether this process is a Ray Client (``ray://``) and not a driver of its own."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


_inherited: list[object] = []
"""The connection of the process that this one was forked from."""


def _note_connection() -> None:
    _inherited[:] = [getattr(ray._private.worker.global_worker, "core_worker", None)]


os.register_at_fork(after_in_child=_note_connection)


def has_inherited_connection() -> bool:
    """Return whether this process only has the connection of the process that it was forked from.

    Then a call of Ray would wait for ever: the threads of the connection are in the other process.
    """
    mine = getattr(ray._private.worker.global_worker, "core_worker", None)
    return mine is not None and mine in _inherited


# -- joining a cluster late --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClusterToJoin:
    """A cluster, for a process that joins it only if it needs Ray.

    Attributes:
        gcs_address: of the cluster's GCS.
        namespace: of the process's own actors.
        node_ip: the IP address of its node; several simulated nodes share a machine.
        runtime_env: Ray's runtime environment of its own tasks and actors.
        module_path: where the tasks and actors of its Ray job look for modules of the driver.
        placement_group: the id of the placement group that has the process's resources.
    """

    gcs_address: str
    namespace: str
    node_ip: str
    runtime_env: Mapping[str, Any] = field(repr=False)
    module_path: tuple[str, ...] = ()
    placement_group: str = ""

    @staticmethod
    def of_this_process() -> "ClusterToJoin":
        """Return the cluster to which this process is connected."""
        context = ray.get_runtime_context()
        environment = dict(context.runtime_env or {})
        path = tuple(ray._private.worker.global_worker.core_worker.get_job_config().py_driver_sys_path)
        return ClusterToJoin(context.gcs_address, context.namespace, ray.util.get_node_ip_address(), environment, path)


_NEEDS_RAY = b"_object_ref_deserializer", b"_actor_handle_deserializer"
_connect = ray.init
_to_join: ClusterToJoin | None = None
_has_joined = False
_joining = threading.RLock()


def join_when_needed(cluster: ClusterToJoin) -> None:
    """Have this process join a cluster as a driver as soon as it uses Ray: a public function that needs a cluster calls
    ``ray.init()``, and so may user code.
    """
    global _to_join
    _to_join = cluster
    ray.init = _join
    for module in (ray.util, services):
        module.get_node_ip_address = lambda address=None: cluster.node_ip
    for module in (ray.util, ray.util.placement_group):
        module.get_current_placement_group = _current_placement_group
    metrics.Metric.__init__ = wrap_auto_init(metrics.Metric.__init__)
    for function in ("nodes", "cluster_resources", "available_resources", "timeline"):  # Ray's own do so for the others
        setattr(ray, function, wrap_auto_init(getattr(ray, function)))


def _current_placement_group() -> PlacementGroup | None:
    if not is_connected() or _to_join is None or not _to_join.placement_group:
        return None
    return placement_group_by_id(_to_join.placement_group)


def is_connected() -> bool:
    """Return whether this process is connected to a cluster. If it is a task's that has not joined its own yet, it does
    so now.
    """
    with _joining:
        if not ray.is_initialized() and _to_join is not None:
            ray.init()
    return ray.is_initialized() and not has_inherited_connection()


def has_joined() -> bool:
    """Return whether this process, a task's, has joined a cluster, or has tried to."""
    return _has_joined


def join_for(pickled: bytes) -> None:
    """Join the cluster if a pickled object has an ObjectRef or the handle of an actor, which unpickles only then."""
    if any(name in pickled for name in _NEEDS_RAY):
        is_connected()


@functools.wraps(ray.init)
def _join(address: str | None = None, **options: Any) -> Any:
    """Stand for ``ray.init`` in a task: join the task's own cluster, unless another one is asked for."""
    global _has_joined
    _has_joined = True
    asked = address or os.environ.get("RAY_ADDRESS") or "auto"
    if _to_join is None or ray.is_initialized() or asked not in ("auto", _to_join.gcs_address):
        return _connect(address, **options)
    options["namespace"] = options.get("namespace") or _to_join.namespace
    options["runtime_env"] = options.get("runtime_env") or dict(_to_join.runtime_env)
    options["job_config"] = options.get("job_config") or JobConfig(_py_driver_sys_path=[*_to_join.module_path])
    set_handler = utils.set_sigterm_handler
    log, level = logging.getLogger("ray._private.worker"), logging.getLogger("ray._private.worker").level
    log.setLevel(logging.WARNING)  # it would say in each task that it connects
    utils.set_sigterm_handler = lambda handler: None  # Ray's own would end the process at once
    try:
        return _connect(_to_join.gcs_address, _node_ip_address=_to_join.node_ip, **options)
    finally:
        log.setLevel(level)
        utils.set_sigterm_handler = set_handler


def has_setup_hook() -> bool:
    """Return whether Ray calls a function of the user's at the start of each process of this job."""
    return ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR in os.environ


def placement_group_by_id(hex_id: str) -> PlacementGroup:
    """Return a handle of a placement group that another process made."""
    return PlacementGroup(PlacementGroupID(bytes.fromhex(hex_id)))


def placement_groups_in_use() -> dict[str, str]:
    """Return the name of each placement group that is not removed, by id. This blocks.

    Ray keeps each removed group for ever and sends them all. ``placement_group_table()`` needs four times as long,
    because it makes a dictionary of each.
    """
    groups = map(gcs_pb2.PlacementGroupTableData.FromString, _accessor().get_placement_group_table())
    removed = gcs_pb2.PlacementGroupTableData.REMOVED
    return {group.placement_group_id.hex(): group.name for group in groups if group.state != removed}


def _accessor() -> Any:
    state = ray._private.state.state
    if hasattr(state, "_connect_and_get_accessor"):
        return state._connect_and_get_accessor()
    state._check_connected()  # in Ray 2.49
    return state.global_state_accessor


def waiting_placement_groups() -> dict[str, list[dict[str, float]]]:
    """Return the bundles of the placement groups that wait for nodes, by id, as the GCS tells Ray's autoscaler.

    A group that Ray tries to place at this very moment may be missing. This blocks for as long as the GCS needs to list
    the nodes. ``placement_group_table()`` would also list each group that was ever removed: 0.03 ms of CPU for each.
    """
    reply = autoscaler_pb2.GetClusterResourceStateReply()
    reply.ParseFromString(internal_kv.global_gcs_client.get_cluster_resource_state())
    return {
        gang.details.partition(":")[0]: [dict(one.resources_bundle) for one in gang.requests]
        for gang in reply.cluster_resource_state.pending_gang_resource_requests
    }


class ClusterStore:
    """Ray's key-value store, in the GCS. Values should stay far below 100 KB.

    With ``RAY_gcs_storage=rocksdb`` it survives a restart of the GCS. The coroutines fail if the GCS does not answer
    within `STORE_TIMEOUT_S`. All other methods block until it answers.
    """

    _NAMESPACE = b"iris_ray"

    async def set(self, key: str, value: bytes | None) -> None:
        """Store a value, or delete the key if the value is None."""
        client = internal_kv.global_gcs_client
        if value is None:
            await client.async_internal_kv_del(key.encode(), False, self._NAMESPACE, STORE_TIMEOUT_S)
        else:
            await client.async_internal_kv_put(key.encode(), value, True, self._NAMESPACE, STORE_TIMEOUT_S)

    async def add(self, key: str, value: bytes) -> bool:
        """Store a value unless the key has one; return whether it was stored."""
        client = internal_kv.global_gcs_client
        return bool(await client.async_internal_kv_put(key.encode(), value, False, self._NAMESPACE, STORE_TIMEOUT_S))

    async def fetch(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""
        client = internal_kv.global_gcs_client
        found: bytes | None = await client.async_internal_kv_get(key.encode(), self._NAMESPACE, STORE_TIMEOUT_S)
        return found

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        internal_kv._internal_kv_put(key, value, namespace=self._NAMESPACE)

    def put_new(self, key: str, value: bytes) -> bool:
        """Store a value unless the key has one; return whether it was stored."""
        existed = internal_kv._internal_kv_put(key, value, overwrite=False, namespace=self._NAMESPACE)
        return not existed

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""
        found: bytes | None = internal_kv._internal_kv_get(key, namespace=self._NAMESPACE)
        return found

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        internal_kv._internal_kv_del(key, namespace=self._NAMESPACE)

    def delete_all(self, prefix: str) -> None:
        """Delete every key with this prefix."""
        internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=self._NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        """Return every key with this prefix."""
        return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=self._NAMESPACE)]

    def items(self, prefix: str) -> dict[str, bytes]:
        """Return the keys with this prefix and their values."""
        keys = internal_kv._internal_kv_list(prefix, namespace=self._NAMESPACE)
        found = internal_kv.global_gcs_client.internal_kv_multi_get(keys, self._NAMESPACE)
        return {key.decode(): value for key, value in found.items()}
