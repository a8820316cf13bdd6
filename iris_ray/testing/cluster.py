"""A Ray cluster on one machine whose nodes pose as TPU hosts."""

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv4Address
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self, get_args

import ray

from iris_ray.errors import InvalidRequestError
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.testing.end_watch import EndWatch
from iris_ray.testing.machine import Machine
from iris_ray.testing.metadata_server import HostMetadata, MetadataServers
from iris_ray.testing.preemption import Preemption
from iris_ray.testing.ray_node import GCS, RAYLET, HostSpec, RayHead, gcs_storage, new_node_id, ray_settings
from iris_ray.testing.tpu_host import METADATA_VARIABLE, RunningHost, TPUHost, machine_environment
from iris_ray.testing.workspace import Workspace

_JOIN_TIMEOUT_S = 120.0
_LOOK_S = 0.02

NoticeChannel = Literal["both", "ray", "metadata"]
"""Where a preemption is announced: as a drain of Ray's nodes, by the hosts' metadata servers, or both."""


class SimulatedCluster:
    """Real Ray nodes on this machine that pose as the hosts of TPU slices.

    Each simulated host is a raylet of its own, with the environment, node labels, resources, IP address and directories
    of a TPU VM, but without chips; it ends when its raylet does. The driver is attached to a head node that has no TPU.
    Everything ends with the ``with`` block, also by an exception or Ctrl-C in it, and when the driver process is
    killed. There can be one such cluster in a process at a time. Linux only.

    Args:
        slices: How many slices of each TPU type to start with, e.g. ``{"v4-32": 2}``. None at all will do.
        connect: Whether to connect this process to the cluster as a driver (``ray.init``). Pass False to do so
            yourself with options of your own: ``ray.init(cluster.address, runtime_env=...)``.
        cpus_per_host: Logical CPUs of each host and of the head, as Ray counts them.
        dashboard: Whether the head has Ray's dashboard, which ``ray job submit`` and the state API need. It takes
            some seconds more to start.
        persistent: Whether what the cluster knows outlives its GCS (in RocksDB), so that that can be killed and
            restarted: nodes, actors, placement groups and the key-value store.
        quiet: Whether to keep silent about what is going on. Otherwise a line a step goes to stderr.

    Raises:
        InvalidRequestError: An argument makes no sense. Or, on start: Ray is initialised in this process already, there
            is another simulated cluster in it, or this is not Linux.
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
    ) -> None:
        self._initial = _checked_slices(slices)
        self._cpus = _checked_count("cpus_per_host", cpus_per_host, least=1)
        self._connect, self._dashboard, self._quiet = connect, dashboard, quiet
        self._persistent = persistent
        self._on_head: dict[str, tuple[Machine, Sequence[str]]] = {}  # what runs there, and its command line, by kind
        self._lock = threading.RLock()
        self._slices: dict[str, list[RunningHost]] = {}
        self._next_index: dict[str, Iterator[int]] = {}
        self._addresses = _loopback_addresses()
        self._preemptions: list[Preemption] = []
        self._workspace: Workspace | None = None
        self._metadata: MetadataServers | None = None
        self._end_watch: EndWatch | None = None
        self._head: RayHead | None = None
        self._owner = 0
        self._began = time.monotonic()

    # ------------------------------------------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def start(self) -> Self:
        """Starts everything and waits until all hosts have joined. Only needed without ``with``."""
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
        self._began = time.monotonic()
        atexit.register(self.shutdown)
        try:
            self._start()
        except BaseException:  # Ctrl-C included
            self.shutdown()
            raise
        return self

    def shutdown(self) -> None:
        """Disconnects the driver, ends all processes, removes the cluster's directory. Harmless when repeated."""
        if self._owner != os.getpid():  # never started, or inherited by a forked child, whose cluster it is not
            return
        with self._lock:
            self._owner = 0
            try:
                for preemption in self._preemptions:
                    preemption.cancel()
                if self._is_driver_here():
                    if self._persistent and GCS in self._on_head and not self._on_head[GCS][0].running:
                        self.restart_gcs()  # a driver can't leave without
                    ray.shutdown()  # first: a driver that loses its GCS aborts
            finally:
                if self._end_watch is not None:
                    self._end_watch.close()
                self._head = None
                self._slices.clear()
                if self._workspace is not None:
                    self._workspace.close()
                if self._metadata is not None:
                    self._metadata.close()
                atexit.unregister(self.shutdown)
                SimulatedCluster._active = None
        self._say("gone")

    # ---------------------------------------------------------------------------------------------- what there is

    @property
    def address(self) -> str:
        """``host:port`` for ``ray.init(address)``, also in other processes on this machine."""
        return self._running_head().gcs_address

    @property
    def dashboard_url(self) -> str | None:
        """URL of Ray's dashboard, as ``ray job submit --address`` takes it; None without a dashboard."""
        url = self._running_head().dashboard_url
        return None if url is None else f"http://{url}"

    @property
    def slice_names(self) -> list[str]:
        """Names of the slices that have at least one host left, frozen ones included; oldest first."""
        with self._lock:
            return [name for name, hosts in self._slices.items() if any(h.machine.running for h in hosts)]

    def worker_ids(self, slice_name: str) -> list[int]:
        """Worker ids of the hosts that a slice has left, frozen ones included; ascending."""
        return [h.host.worker_id for h in self._slice(slice_name) if h.machine.running]

    def node_id(self, slice_name: str, worker_id: int) -> str:
        """Hex id of a host's Ray node, as in ``ray.nodes()``. Of hosts that are gone as well."""
        return self._host(slice_name, worker_id).host.node_id

    def host_dir(self, slice_name: str, worker_id: int) -> Path:
        """A host's private directory, called ``IRIS_RAY_HOST_DIR`` in its environment.

        It holds ``dev`` (an empty file ``accelN`` for each chip), ``lock``, ``logs`` and ``tmp`` (its TMPDIR), is the
        working directory of what runs on the host without one of its own, and lasts until ``shutdown``.
        """
        return self._host(slice_name, worker_id).host.directory

    def host_pids(self, slice_name: str, worker_id: int) -> list[int]:
        """Pids of all processes that live on a host now, the raylet's first; none once it is gone."""
        return self._host(slice_name, worker_id).machine.pids()

    def metadata(self, slice_name: str, worker_id: int) -> HostMetadata:
        """A host's metadata server, as there is one on every TPU VM: to read its address, and to make it misbehave."""
        return self._host(slice_name, worker_id).metadata

    # --------------------------------------------------------------------------------------------- what can happen

    def add_slice(self, tpu_type: str) -> str:
        """Starts one more slice and waits until it has joined. Returns its name."""
        return self._add_slices([get_tpu_config(tpu_type)])[0]

    def kill_host(self, slice_name: str, worker_id: int) -> None:
        """Takes a host away without notice: SIGKILL to everything on it. Returns when it is gone.

        Ray notices 1.5 s later. Nothing happens if the host is gone already.
        """
        victim = self._host(slice_name, worker_id)
        if victim.machine.running:
            self._say(f"killing host {victim.host.name}")
            victim.machine.kill()

    def preempt_slice(
        self, slice_name: str, notice_s: float | None = None, *, heard_by: NoticeChannel = "both"
    ) -> Preemption:
        """Takes a slice away.

        Args:
            slice_name: Which one.
            notice_s: None or 0 kills all its hosts at once, before this returns. Otherwise the preemption is announced
                now, and they are killed this many seconds later, in the background.
            heard_by: Who announces it. ``"ray"``: Ray is told that their nodes are going to be preempted (a drain
                with a deadline); it ends a drained node earlier than that if, or as soon as, nothing runs on it.
                ``"metadata"``: the metadata servers of the hosts say so, which name no deadline; those who listen
                reckon with the 30 s of a spot VM.

        Returns:
            The preemption, to ``wait()`` for. ``shutdown()`` does not wait for it.
        """
        notice = _checked_notice(notice_s)
        if heard_by not in get_args(NoticeChannel):
            raise InvalidRequestError(f"heard_by is one of {get_args(NoticeChannel)}, not {heard_by!r}.")
        victims = [h for h in self._slice(slice_name) if h.machine.running]
        preemption = Preemption(slice_name, notice, partial(self._kill_together, slice_name, victims))
        with self._lock:
            self._preemptions.append(preemption)
        if notice:
            self._say(f"preempting slice {slice_name} with {notice:g} s notice")
        preemption.start()
        if notice and heard_by != "ray":
            for victim in victims:
                victim.metadata.preempt()
        if notice and heard_by != "metadata":
            self._announce(slice_name, victims, time.time() + notice)
        return preemption

    def announce_maintenance(self, slice_name: str, worker_id: int, starts_in_s: float) -> None:
        """Has a host's metadata server announce maintenance, in so many seconds. That is all: nothing is killed."""
        host = self._host(slice_name, worker_id)
        starts_in = _checked_seconds("starts_in_s", starts_in_s)
        self._say(f"announcing maintenance of host {host.host.name} in {starts_in:g} s")
        host.metadata.announce_maintenance(starts_in)

    def call_off_maintenance(self, slice_name: str, worker_id: int) -> None:
        """Has a host's metadata server say that no maintenance is planned (any more)."""
        host = self._host(slice_name, worker_id)
        self._say(f"calling maintenance of host {host.host.name} off")
        host.metadata.call_off_maintenance()

    def freeze_host(self, slice_name: str, worker_id: int) -> None:
        """Stops all processes of a host (SIGSTOP), as if its kernel hung. Ray gives it up some 15 s later."""
        victim = self._host(slice_name, worker_id)
        self._running_end_watch().expect(victim)
        self._say(f"freezing host {victim.host.name}")
        victim.machine.freeze()

    def thaw_host(self, slice_name: str, worker_id: int) -> None:
        """Lets a frozen host go on. If Ray has given it up meanwhile, its raylet ends, and the host with it."""
        victim = self._host(slice_name, worker_id)
        self._say(f"thawing host {victim.host.name}")
        victim.machine.thaw()

    def kill_gcs(self) -> None:
        """SIGKILL to Ray's GCS; returns when it is gone. What runs goes on, but nobody learns anything new.

        Only in a ``persistent`` cluster. Ray's processes wait for the next one for a minute, then they end.
        """
        self._require_persistence()
        self._say("killing the GCS")
        self._on_head[GCS][0].kill()

    def restart_gcs(self) -> None:
        """Starts the GCS again, after killing it if it runs; returns when it answers."""
        self.kill_gcs()
        head, workspace = self._running_head(), self._running_workspace()
        self._say("starting the GCS again")
        self._launch_on_head(workspace, GCS, head.gcs_command)
        head.living_nodes()

    def restart_head(self) -> None:
        """Takes the head's machine away, and starts it again at the same address; returns when it has joined.

        Everything on it is killed: Ray's GCS and raylet, the Controller, what keeps detached jobs. Only in a
        ``persistent`` cluster of which this process is no driver, as it would end with the raylet: ``connect=False``.
        """
        self._require_persistence()
        if self._is_driver_here():
            raise InvalidRequestError(
                "This process is a driver on the head and would end with it: start the cluster with connect=False, and"
                " drivers as processes of their own."
            )
        self._say("killing the head")
        for machine, _ in self._on_head.values():
            machine.kill()
        head, workspace = self._running_head(), self._running_workspace()
        self._say("starting the head again")
        others = {kind: command for kind, (_, command) in self._on_head.items() if kind not in (GCS, RAYLET)}
        raylet_command = head.begin_anew()
        self._launch_on_head(workspace, GCS, head.gcs_command)
        head.living_nodes()
        for socket in (workspace.root / "s").glob("head-*"):
            socket.unlink()
        self._launch_on_head(workspace, RAYLET, raylet_command)
        for kind, command in others.items():
            self._launch_on_head(workspace, kind, command)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while head.node_id not in head.living_nodes():
            if time.monotonic() > deadline or not self._on_head[RAYLET][0].running:
                logs = [*workspace.root.glob("session_2*/logs/raylet.*"), workspace.root / f"head-{RAYLET}.log"]
                raise RuntimeError(f"The head did not come back.{workspace.tail(*logs)}")
            time.sleep(_LOOK_S)

    # ------------------------------------------------------------------------------------------------------ inside

    def _start(self) -> None:
        self._say("starting the head node")
        self._workspace = workspace = Workspace()
        self._metadata = MetadataServers()
        self._end_watch = EndWatch(lambda ended: self._tail(ended.host))
        (workspace.root / "s").mkdir()

        def launch(kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            return self._launch_on_head(workspace, kind, command).process

        try:
            self._head = RayHead(
                workspace.root,
                address=next(self._addresses),
                cpus=self._cpus,
                dashboard=self._dashboard,
                launch=launch,
            )
        except Exception as error:
            logs = [*workspace.root.glob("head-*.log"), *workspace.root.glob("session_2*/logs/*.err")]
            raise RuntimeError(f"The head node did not start: {error}{workspace.tail(*logs)}") from error
        if self._connect:
            self._say("connecting the driver")  # before any TPU host joins, lest it be attached to one
            with _interrupt_held_back():
                ray.init(self.address, logging_level="WARNING")
        self._add_slices([config for config, number in self._initial for _ in range(number)])
        self._say(f"ready at {self.address}")

    def _launch_on_head(self, workspace: Workspace, kind: str, command: Sequence[str]) -> Machine:
        environment = {**ray_settings(), **machine_environment()}
        if kind == GCS and self._persistent:
            environment |= gcs_storage(workspace.root / "gcs")
        machine = workspace.launch(f"head-{kind}", command, env=environment, cwd=Path.cwd())
        self._on_head[kind] = machine, command
        return machine

    def _require_persistence(self) -> None:
        self._running_head()
        if not self._persistent:
            raise InvalidRequestError("This cluster does not outlive its GCS: start it with persistent=True.")

    def _add_slices(self, configs: Sequence[TPUConfig]) -> list[str]:
        """Starts the hosts of all slices side by side, and waits until all have joined."""
        if not configs:
            return []
        with self._lock:
            slices = [self._plan_slice(config) for config in configs]
        self._say(f"starting {sum(map(len, slices))} TPU hosts: {', '.join(hosts[0].slice_name for hosts in slices)}")
        machines: dict[TPUHost, Machine] = {}
        metadata: dict[TPUHost, HostMetadata] = {}
        try:
            for hosts in slices:
                addresses = [host.address for host in hosts]
                for host in hosts:
                    metadata[host] = self._running_metadata().serve(host.address, host.metadata(addresses))
                    self._start_host(host, addresses, metadata[host], machines)
            self._wait_until_joined(machines)
        except BaseException:
            for machine in machines.values():
                machine.begin_kill()
            raise
        with self._lock:
            for hosts in slices:
                running = [RunningHost(host, machines[host], metadata[host]) for host in hosts]
                self._slices[hosts[0].slice_name] = running
                for one in running:
                    self._running_end_watch().add(one)
        return [hosts[0].slice_name for hosts in slices]

    def _plan_slice(self, config: TPUConfig) -> list[TPUHost]:
        """The hosts of a new slice, with a name that this cluster never used before."""
        name = f"{config.name}-{next(self._next_index.setdefault(config.name, count()))}"
        return [
            TPUHost(
                slice_name=name,
                worker_id=worker_id,
                config=config,
                node_id=new_node_id(),
                address=next(self._addresses),
                directory=self._running_workspace().root / f"{name}-w{worker_id}",
            )
            for worker_id in range(config.vm_count)
        ]

    def _start_host(
        self, host: TPUHost, addresses: Sequence[str], metadata: HostMetadata, machines: dict[TPUHost, Machine]
    ) -> None:
        workspace = self._running_workspace()
        environment = {**ray_settings(), **host.environment(addresses), METADATA_VARIABLE: metadata.address}

        def launch(_kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            machines[host] = workspace.launch(host.name, command, env=environment, cwd=host.directory)
            return machines[host].process

        host.make_directory()
        spec = HostSpec(
            node_id=host.node_id,
            cpus=self._cpus,
            resources=host.resources(),
            labels=host.labels(),
            directory=host.directory,
            socket_prefix=f"{workspace.root}/s/{host.name}-",
            address=host.address,
        )
        self._running_head().start_host(spec, launch)

    def _wait_until_joined(self, machines: Mapping[TPUHost, Machine]) -> None:
        missing = {host.node_id: host for host in machines}
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while missing:
            joined = self._running_head().living_nodes() & missing.keys()
            for node_id in joined:
                del missing[node_id]
            if joined:
                self._say(f"{len(machines) - len(missing)} of {len(machines)} hosts have joined")
                continue
            for host in missing.values():
                if not machines[host].running:
                    raise RuntimeError(f"Host {host.name} ended while it started.{self._tail(host)}")
            if time.monotonic() > deadline:
                names = ", ".join(host.name for host in missing.values())
                raise RuntimeError(f"After {_JOIN_TIMEOUT_S:g} s these hosts have not joined the cluster: {names}.")
            time.sleep(_LOOK_S)

    def _tail(self, host: TPUHost) -> str:
        """What a host's raylet, and its keeper, had to say at the end."""
        logs = [*host.directory.glob("logs/raylet.*"), self._running_workspace().root / f"{host.name}.log"]
        return self._running_workspace().tail(*logs)

    def _announce(self, slice_name: str, victims: Sequence[RunningHost], deadline: float) -> None:
        """Tells Ray of a preemption, all hosts at once, because a frozen one takes its time not to answer."""
        head = self._running_head()
        for victim in victims:
            self._running_end_watch().expect(victim)

        def announce(victim: RunningHost) -> None:
            if not head.announce_preemption(victim.host.node_id, f"{slice_name} is being preempted", deadline):
                self._say(f"host {victim.host.name} did not take the notice")

        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(announce, victims))

    def _kill_together(self, slice_name: str, victims: Sequence[RunningHost]) -> None:
        self._say(f"killing slice {slice_name}")
        for victim in victims:
            victim.machine.begin_kill()
        for victim in victims:
            victim.machine.kill()

    def _is_driver_here(self) -> bool:
        """Whether this process is connected to this cluster now, by us or by the user."""
        if self._head is None or not ray.is_initialized():
            return False
        return bool(ray.get_runtime_context().gcs_address == self._head.gcs_address)

    @classmethod
    def _after_fork(cls) -> None:
        """A forked child of the driver has no part in the cluster."""
        if cls._active is not None and cls._active._workspace is not None:
            cls._active._workspace.leave_to_parent()
        cls._active = None

    def _running_head(self) -> RayHead:
        if self._head is None:
            raise InvalidRequestError("The simulated cluster is not running: use it in a with statement.")
        return self._head

    def _running_workspace(self) -> Workspace:
        self._running_head()
        assert self._workspace is not None  # it comes before the head
        return self._workspace

    def _running_metadata(self) -> MetadataServers:
        self._running_head()
        assert self._metadata is not None  # it comes before the head
        return self._metadata

    def _running_end_watch(self) -> EndWatch:
        self._running_head()
        assert self._end_watch is not None  # it comes before the head
        return self._end_watch

    def _slice(self, name: str) -> list[RunningHost]:
        self._running_head()
        with self._lock:
            if name not in self._slices:
                known = ", ".join(self._slices) or "none"
                raise InvalidRequestError(f"No slice is called {name!r}; there are: {known}.")
            return self._slices[name]

    def _host(self, slice_name: str, worker_id: int) -> RunningHost:
        hosts = self._slice(slice_name)
        if isinstance(worker_id, bool) or not isinstance(worker_id, int) or not 0 <= worker_id < len(hosts):
            ids = ", ".join(str(h.host.worker_id) for h in hosts)
            raise InvalidRequestError(f"Slice {slice_name} has no worker {worker_id!r}; its worker ids are: {ids}.")
        return hosts[worker_id]

    def _say(self, text: str) -> None:
        if not self._quiet:
            elapsed = time.monotonic() - self._began
            print(f"[simulated cluster {elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


os.register_at_fork(after_in_child=SimulatedCluster._after_fork)


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Lets Ctrl-C act only after the block: a driver that is half connected can't even disconnect (Ray 2.60)."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _loopback_addresses() -> Iterator[str]:
    """Addresses of this machine that most likely nobody else uses: Linux answers to all of 127.0.0.0/8.

    Each node has its own, so that addresses tell hosts apart and two hosts can listen on the same port. The machine's
    real address may change while the cluster lives, and Ray does not let drivers connect to 127.0.0.1.
    """
    first = int(IPv4Address("127.0.0.1")) + (random.randrange(1, 2**16) << 8)
    return (str(IPv4Address(first + number)) for number in count())


def _checked_slices(slices: Mapping[str, int] | None) -> list[tuple[TPUConfig, int]]:
    if slices is None:
        return []
    if not isinstance(slices, Mapping):
        raise InvalidRequestError(
            f'slices maps TPU types to the number of their slices, as in {{"v4-32": 2}}; it can\'t be {slices!r}.'
        )
    return [
        (get_tpu_config(name), _checked_count(f"The number of {name} slices", number, least=0))
        for name, number in slices.items()
    ]


def _checked_count(what: str, number: object, *, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidRequestError(f"{what} must be an int, {least} or more, not {number!r}.")
    return number


def _checked_notice(notice_s: object) -> float:
    return 0.0 if notice_s is None else _checked_seconds("notice_s", notice_s)


def _checked_seconds(what: str, seconds: object) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise InvalidRequestError(f"{what} must be a number of seconds, 0 or more, not {seconds!r}.")
    return float(seconds)
