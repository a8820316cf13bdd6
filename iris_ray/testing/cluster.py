"""A Ray cluster on one machine whose nodes pose as TPU hosts."""

import atexit
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

import ray

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import OneOf, Whole, is_int, require
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.testing.console import ConsoleOutput, interrupt_held_back
from iris_ray.testing.faults import NoticeChannel, Preemption, announce_to_ray
from iris_ray.testing.head_machine import HeadMachine
from iris_ray.testing.host_starter import EndWatch, HostStarter, log_tail, loopback_addresses
from iris_ray.testing.metadata_server import HostMetadata, MetadataServers
from iris_ray.testing.network import Direction, Network
from iris_ray.testing.ray_node.head import resources_of_head
from iris_ray.testing.tpu_host import RunningHost, checked_seconds
from iris_ray.testing.workspace import Workspace

if TYPE_CHECKING:
    from iris_ray.testing.kubernetes import NodePool
    from iris_ray.testing.kubernetes_cluster import KubernetesCluster


@dataclass(frozen=True, slots=True)
class Ground:
    """The basis of a cluster before it has a head. It ends with the cluster.

    Attributes:
        head_address: IP address of the head.
        addresses: IP addresses for hosts.
    """

    workspace: Workspace
    metadata: MetadataServers
    end_watch: EndWatch
    network: Network | None
    head_address: str
    addresses: Iterator[str]


@dataclass(frozen=True, slots=True)
class _Parts:
    ground: Ground
    head: HeadMachine
    starter: HostStarter


class SimulatedCluster:
    """Real Ray nodes on this machine that pose as the hosts of TPU slices.

    Each simulated host is a raylet of its own, with the environment, node labels, resources, IP address and directories
    of a TPU VM, but without chips; it ends with its raylet (see `kill_raylet`). The driver is on a head without TPU.
    Everything ends with the ``with`` block, also by an exception or Ctrl-C in it, and when the driver process is
    killed. A process can have one such cluster at a time. Needs Linux and Ray 2.60.

    Args:
        slices: How many slices of each TPU type to start with, e.g. ``{"v4-32": 2}``. None starts the head only.
        connect: Whether to connect this process to the cluster as a driver (``ray.init``). Pass False to do so
            yourself with options of your own: ``ray.init(cluster.address, runtime_env=...)``.
        cpus_per_host: Logical CPUs of each host and of the head, as Ray counts them.
        dashboard: Whether the head has Ray's dashboard, which ``ray job submit`` and the state API need. It takes
            some seconds more to start.
        persistent: Whether the cluster's state outlives its GCS (in RocksDB), so that the GCS can be killed and
            restarted: nodes, actors, placement groups and the key-value store.
        quiet: Whether to print nothing, except when a host ends by itself. Otherwise each step is printed to stderr; a
            terminal shows the start in one live line.
        networks: Whether every host is in a network namespace of its own, so that `cut_off` and `slow_down` work. That
            needs root, iproute2 and nsenter.

    Raises:
        InvalidRequestError: An argument makes no sense. Or, on start: Ray is initialised in this process already, there
            is another simulated cluster in it, this is not Linux, or this process may not make networks.
        RuntimeError: (On start.) A node ended or did not join; the message has the end of its log.

    Example:
        >>> with SimulatedCluster({"v4-32": 2}) as cluster:
        ...     run = run_on_pod_ray.remote(train, "v4-32")
        ...     cluster.kill_host("v4-32-0", 2)
        ...     results = ray.get(run)
    """

    _active: ClassVar["SimulatedCluster | None"] = None
    _active_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        slices: Mapping[str, int] | None = None,
        *,
        connect: bool = True,
        cpus_per_host: int = 4,
        dashboard: bool = False,
        persistent: bool = False,
        quiet: bool = False,
        networks: bool = False,
    ) -> None:
        if not isinstance(slices, Mapping | None):
            raise InvalidRequestError(
                f'slices maps TPU types to the number of their slices, as in {{"v4-32": 2}}; it can\'t be {slices!r}.'
            )
        self._initial = [(get_tpu_config(name), number) for name, number in (slices or {}).items()]
        for config, number in self._initial:
            require(f"The number of {config.name} slices", number, Whole())
        require("cpus_per_host", cpus_per_host, Whole(1))
        self._cpus = cpus_per_host
        self._connect, self._dashboard, self._persistent, self._networks = connect, dashboard, persistent, networks
        self._console = ConsoleOutput(quiet)
        self._lock = threading.RLock()
        self._slices: dict[str, list[RunningHost]] = {}
        self._preemptions: list[Preemption] = []
        self._open = ExitStack()
        self._workspace: Workspace | None = None
        self._parts: _Parts | None = None
        self._owner = 0

    @staticmethod
    def from_raycluster(
        raycluster: str | Path | Mapping[str, Any],
        *,
        connect: bool = True,
        dashboard: bool = False,
        quiet: bool = False,
        networks: bool = False,
        idle_timeout_s: float | None = None,
        pools: "Sequence[NodePool] | None" = None,
        feature_gates: Collection[str] = (),
    ) -> "KubernetesCluster":
        """Return an emulated GKE that runs a RayCluster, and that Ray's own autoscaler drives.

        Args:
            raycluster: The path of its YAML file, or what such a file holds.
            connect, dashboard, quiet, networks: As for `SimulatedCluster`.
            idle_timeout_s: How long a slice is idle before it goes, in whole seconds; None: as the file says.
            pools: The node pools; None: node auto-provisioning makes one for each slice.
            feature_gates: KubeRay's alpha features that are switched on.

        Raises:
            InvalidClusterFileError: It can't be read, or is not a RayCluster that KubeRay accepts; then the message
                names the line of the file.

        Example:
            >>> with SimulatedCluster.from_raycluster("examples/clusters/gke.yaml") as cluster:
            ...     run_on_pod(train, "v6e-16", num_slices=2)
        """
        from iris_ray.testing.kubernetes_cluster import KubernetesCluster  # it stands on this class

        basic = {"connect": connect, "dashboard": dashboard, "quiet": quiet, "networks": networks}
        return KubernetesCluster(raycluster, idle_timeout_s, pools, feature_gates, **basic)

    # -- its life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def start(self) -> Self:
        """Start everything and wait until all hosts have joined. Only needed without ``with``."""
        if not sys.platform.startswith("linux"):
            raise InvalidRequestError(f"A simulated cluster needs Linux; this is {sys.platform}.")
        with SimulatedCluster._active_lock:
            if SimulatedCluster._active is not None:
                raise InvalidRequestError(
                    "This process has a simulated cluster already: shut that down first, or call its add_slice()."
                )
            if ray.is_initialized():
                raise InvalidRequestError(
                    "Ray is already initialised in this process: call ray.shutdown() first, then start the cluster."
                )
            SimulatedCluster._active = self
        self._owner = os.getpid()
        atexit.register(self.shutdown)
        try:
            with self._console.starting():
                self._start()
        except BaseException:  # Ctrl-C included
            self.shutdown()
            raise
        return self

    def shutdown(self) -> None:
        """Disconnect the driver, end all processes, remove the cluster's directory. Harmless when repeated."""
        if self._owner != os.getpid():  # never started, or inherited by a forked child, whose cluster it is not
            return
        with self._lock:
            self._owner = 0
            try:
                for preemption in self._preemptions:
                    preemption.cancel()
                if self._parts is not None:
                    self._disconnect(self._parts.head)
            finally:
                self._parts = None
                self._slices.clear()
                try:
                    self._open.close()
                finally:
                    atexit.unregister(self.shutdown)
                    SimulatedCluster._active = None
        self._console.say("gone")

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host:port`` for ``ray.init(address)``, also in other processes on this machine."""
        return self._running().head.ray.gcs_address

    @property
    def dashboard_url(self) -> str | None:
        """URL of Ray's dashboard, as ``ray job submit --address`` takes it; None without a dashboard."""
        url = self._running().head.ray.dashboard_url
        return None if url is None else f"http://{url}"

    @property
    def slice_names(self) -> list[str]:
        """Names of the slices that have at least one host left, also a frozen one; oldest first."""
        with self._lock:
            slices = {name: hosts for name, hosts in self._slices.items() if hosts[0].host.chips}
            return [name for name, hosts in slices.items() if any(h.machine.running for h in hosts)]

    def worker_ids(self, slice_name: str) -> list[int]:
        """Return the worker ids of the remaining hosts of a slice, including frozen ones; ascending."""
        return [h.host.worker_id for h in self._slice(slice_name) if h.machine.running]

    def node_id(self, slice_name: str, worker_id: int) -> str:
        """Return the hex id of a host's Ray node, as in ``ray.nodes()``. Works for hosts that are gone as well."""
        return self._host(slice_name, worker_id).host.node_id

    def host_dir(self, slice_name: str, worker_id: int) -> Path:
        """Return a host's private directory, called ``IRIS_RAY_HOST_DIR`` in its environment.

        It holds ``dev`` (an empty file ``accelN`` for each chip), ``lock``, ``logs`` and ``tmp`` (its TMPDIR). It is
        the default working directory of processes on the host, and lasts until ``shutdown``.
        """
        return self._host(slice_name, worker_id).host.directory

    def host_pids(self, slice_name: str, worker_id: int, command: str = "") -> list[int]:
        """Return the pids of all processes that run on a host now, the raylet's first; none once it is gone.

        Args:
            slice_name: The host's slice.
            worker_id: Its number within the slice.
            command: Only those whose command line holds this text, such as ``"ray::SliceActor"``.
        """
        return self._host(slice_name, worker_id).machine.pids(command)

    def metadata(self, slice_name: str, worker_id: int) -> HostMetadata:
        """Return a host's metadata server, as every TPU VM has one: read its address, or make it misbehave."""
        return self._host(slice_name, worker_id).metadata

    # -- what can happen -------------------------------------------------------------------------------------------

    def add_slice(self, tpu_type: str, *, under: Sequence[str] = ()) -> str:
        """Start one more slice and wait until it has joined.

        Args:
            tpu_type: Its type.
            under: A command that runs the raylets of its hosts, such as
                ``["unshare", "--fork", "--kill-child", "--pid", "--mount-proc"]`` for containers of their own.

        Returns:
            Its name.
        """
        return self._add_slices([get_tpu_config(tpu_type)], under)[0]

    def add_hosts(self, count: int, *, gpus: int = 0, labels: Mapping[str, str] | None = None) -> list[str]:
        """Start more hosts without TPU and wait until they have joined.

        Args:
            count: The number of hosts.
            gpus: The number of GPUs that each host pretends to have.
            labels: Labels of their Ray nodes, such as ``{"rack": "a"}``.

        Returns:
            Their names. Each counts as a slice of one host: ``kill_host("host-0", 0)``.
        """
        require("count", count, Whole(1))
        require("gpus", gpus, Whole())
        hosts = self._running().starter.start_plain_hosts(count, gpus, labels or {})
        self._keep([[host] for host in hosts])
        return [host.host.name for host in hosts]

    def kill_host(self, slice_name: str, worker_id: int) -> None:
        """Take a host away without notice: SIGKILL to everything on it. Return when it is gone.

        Ray notices 0.6 s later. Nothing happens if the host is gone already.
        """
        victim = self._host(slice_name, worker_id)
        if victim.machine.running:
            self._console.say(f"killing host {victim.host.name}")
            victim.machine.kill()

    def kill_raylet(self, slice_name: str, worker_id: int) -> None:
        """Send SIGKILL to a host's raylet alone. Its other processes end by themselves, or 30 s later with the host."""
        victim = self._host_that_may_end(slice_name, worker_id)
        self._console.say(f"killing the raylet of host {victim.host.name}")
        victim.machine.kill_command()

    def preempt_slice(
        self, slice_name: str, notice_s: float | None = None, *, heard_by: NoticeChannel = "both"
    ) -> Preemption:
        """Take a slice away.

        Args:
            slice_name: The slice.
            notice_s: None or 0 kills all its hosts before this returns. Otherwise the preemption is announced now, and
                the hosts are killed this many seconds later, in the background.
            heard_by: Where it is announced. ``"ray"``: Ray drains the nodes, with a deadline; it ends a drained node
                before the deadline as soon as nothing runs on it. ``"metadata"``: the hosts' metadata servers announce
                it. They name no deadline; listeners assume the 30 s of a spot VM.

        Returns:
            The preemption, to ``wait()`` for. ``shutdown()`` does not wait for it.
        """
        notice = 0.0 if notice_s is None else checked_seconds("notice_s", notice_s)
        require("heard_by", heard_by, OneOf(get_args(NoticeChannel)))
        victims = [h for h in self._slice(slice_name) if h.machine.running]

        def kill() -> None:
            self._console.say(f"killing slice {slice_name}")
            for victim in victims:
                victim.machine.begin_kill()
            for victim in victims:
                victim.machine.kill()

        preemption = Preemption(slice_name, notice, kill)
        self._preemptions.append(preemption)
        preemption.start()
        if notice:
            self._console.say(f"preempting slice {slice_name} with {notice:g} s notice")
            for victim in victims if heard_by != "ray" else ():
                victim.metadata.preempt()
            if heard_by != "metadata":
                for victim in victims:
                    self._running().ground.end_watch.expect(victim)
                for name in announce_to_ray(self._running().head.ray, preemption, victims):
                    self._console.say(f"host {name} did not take the notice")
        return preemption

    def announce_maintenance(self, slice_name: str, worker_id: int, starts_in_s: float) -> None:
        """Have a host's metadata server announce maintenance. Nothing is killed."""
        host, seconds = self._host(slice_name, worker_id), checked_seconds("starts_in_s", starts_in_s)
        self._console.say(f"announcing maintenance of host {host.host.name} in {seconds:g} s")
        host.metadata.announce_maintenance(seconds)

    def call_off_maintenance(self, slice_name: str, worker_id: int) -> None:
        """Have a host's metadata server say that no maintenance is planned."""
        host = self._host(slice_name, worker_id)
        self._console.say(f"calling maintenance of host {host.host.name} off")
        host.metadata.call_off_maintenance()

    def freeze_host(self, slice_name: str, worker_id: int) -> None:
        """Stop all processes of a host (SIGSTOP), as if its kernel hung. Ray marks it dead some 13 s later."""
        victim = self._host_that_may_end(slice_name, worker_id)
        self._console.say(f"freezing host {victim.host.name}")
        victim.machine.freeze()

    def thaw_host(self, slice_name: str, worker_id: int) -> None:
        """Let a frozen host continue. If Ray has marked it dead meanwhile, its raylet ends, and the host with it."""
        victim = self._host(slice_name, worker_id)
        self._console.say(f"thawing host {victim.host.name}")
        victim.machine.thaw()

    def cut_off(
        self,
        slice_name: str,
        worker_id: int,
        *,
        from_head: bool = True,
        from_hosts: bool = True,
        direction: Direction = "both",
    ) -> None:
        """Lose the packets of a host silently, until `reconnect`. Needs ``networks=True``.

        Args:
            slice_name, worker_id: The host.
            from_head: Whether it is cut off from the head, where drivers, metadata servers and the Controller are.
            from_hosts: Whether it is cut off from all other hosts that the cluster has now.
            direction: Which packets are lost: those to the host (``"in"``), from the host (``"out"``), or ``"both"``.
        """
        require("direction", direction, OneOf(get_args(Direction)))
        network, host = self._network(), self._host_that_may_end(slice_name, worker_id)
        others = [network.head] if from_head else []
        if from_hosts:
            with self._lock:
                others += [other.host.address for hosts in self._slices.values() for other in hosts]
        network.lose(host.host.address, others, direction)

    def reconnect(self, slice_name: str, worker_id: int) -> None:
        """Stop losing packets of a host. If Ray has marked it dead meanwhile, it ends by itself."""
        self._network().find(self._host(slice_name, worker_id).host.address)

    def slow_down(self, slice_name: str, worker_id: int, bits_per_s: int | None) -> None:
        """Limit the bits that a host sends in a second; None: no limit. Needs ``networks=True``."""
        if bits_per_s is not None:
            require("bits_per_s", bits_per_s, Whole(1))
        self._network().slow_down(self._host(slice_name, worker_id).host.address, bits_per_s)

    def kill_gcs(self) -> None:
        """Send SIGKILL to Ray's GCS; return when it is gone. Other processes continue, but learn nothing new.

        Only in a ``persistent`` cluster. Ray's processes wait a minute for the next GCS, then they end.
        """
        self._running().head.kill_gcs()

    def restart_gcs(self) -> None:
        """Start the GCS again, after killing it if it runs; return when it answers.

        Only in a ``persistent`` cluster.
        """
        self._running().head.restart_gcs()

    def restart_head(self) -> None:
        """Take the head's machine away, and start it again at its address; return when it has joined.

        This kills everything on it: Ray's GCS and raylet, the Controller, the pools of detached jobs. Only in a
        ``persistent`` cluster, and not in a driver process, which would end with the raylet: use ``connect=False``.
        """
        self._running().head.require_persistence()
        self._require_no_driver_here()
        self._running().head.restart()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._console.step("starting the head node")
        ground = self._prepare()
        head = HeadMachine(
            ground.workspace,
            address=ground.head_address,
            resources=resources_of_head(ground.head_address, self._cpus),
            dashboard=self._dashboard,
            storage=ground.workspace.root / "gcs" if self._persistent else None,
            console=self._console,
        )
        self._has_head(ground, head, self._starter_of(ground, head))
        self._add_slices([config for config, number in self._initial for _ in range(number)])
        self._console.say(f"ready at {self.address}")

    def _prepare(self) -> Ground:
        metadata = MetadataServers()
        self._open.callback(metadata.close)
        self._workspace = workspace = Workspace()
        self._open.callback(workspace.close)
        end_watch = EndWatch(lambda ended: log_tail(workspace, ended.host))
        self._open.callback(end_watch.close)
        network = Network(workspace.root / "networks") if self._networks else None
        addresses = loopback_addresses() if network is None else network.addresses()
        head_address = next(addresses) if network is None else network.head
        return Ground(workspace, metadata, end_watch, network, head_address, addresses)

    def _starter_of(self, ground: Ground, head: HeadMachine) -> HostStarter:
        return HostStarter(
            head.ray, ground.workspace, ground.metadata, ground.addresses, ground.network, self._cpus, self._console
        )

    def _has_head(self, ground: Ground, head: HeadMachine, starter: HostStarter) -> None:
        """Connect the driver to the head, before any host joins, lest it be attached to one."""
        self._parts = _Parts(ground, head, starter)
        if self._connect:
            self._console.step("connecting the driver")
            with interrupt_held_back():
                ray.init(self.address, logging_level="WARNING")

    def _add_slices(self, configs: Sequence[TPUConfig], under: Sequence[str] = ()) -> list[str]:
        slices = self._running().starter.start_slices(configs, under)
        self._keep(slices)
        return [hosts[0].host.slice_name for hosts in slices]

    def _keep(self, slices: Sequence[list[RunningHost]]) -> None:
        parts = self._running()
        with self._lock:
            for hosts in slices:
                self._slices[hosts[0].host.slice_name] = hosts
                for host in hosts:
                    parts.ground.end_watch.add(host)

    def _disconnect(self, head: HeadMachine) -> None:
        """Disconnect the driver, before the head ends: a driver that loses its GCS aborts."""
        if self._is_driver_here(head):
            if head.lacks_gcs:
                head.restart_gcs()  # a driver can't leave without one
            ray.shutdown()

    def _require_no_driver_here(self) -> None:
        if self._is_driver_here(self._running().head):
            raise InvalidRequestError(
                "This process is a driver on the head and would end with it: start the cluster with connect=False, and"
                " drivers as processes of their own."
            )

    def _is_driver_here(self, head: HeadMachine) -> bool:
        return ray.is_initialized() and bool(ray.get_runtime_context().gcs_address == head.ray.gcs_address)

    @classmethod
    def _after_fork(cls) -> None:
        if cls._active is not None and cls._active._workspace is not None:
            cls._active._workspace.leave_to_parent()
        cls._active = None

    def _running(self) -> _Parts:
        if self._parts is None:
            raise InvalidRequestError("The simulated cluster is not running: use it in a with statement.")
        return self._parts

    def _network(self) -> Network:
        network = self._running().ground.network
        if network is None:
            raise InvalidRequestError("The hosts have no networks: start the cluster with networks=True.")
        return network

    def _slice(self, name: str) -> list[RunningHost]:
        self._running()
        with self._lock:
            if name not in self._slices:
                known = ", ".join(self._slices) or "none"
                raise InvalidRequestError(f"No slice is called {name!r}; there are: {known}.")
            return self._slices[name]

    def _host(self, slice_name: str, worker_id: int) -> RunningHost:
        hosts = {host.host.worker_id: host for host in self._slice(slice_name)}
        if not is_int(worker_id) or worker_id not in hosts:
            ids = ", ".join(map(str, hosts))
            raise InvalidRequestError(f"Slice {slice_name} has no worker {worker_id!r}; its worker ids are: {ids}.")
        return hosts[worker_id]

    def _host_that_may_end(self, slice_name: str, worker_id: int) -> RunningHost:
        """Return a host whose raylet may end by itself from now on, because Ray marks it dead."""
        host = self._host(slice_name, worker_id)
        self._running().ground.end_watch.expect(host)
        return host


os.register_at_fork(after_in_child=SimulatedCluster._after_fork)
