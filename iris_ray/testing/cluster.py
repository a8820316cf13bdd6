"""A Ray cluster on one machine whose nodes pose as TPU hosts."""

import atexit
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import ray

from iris_ray.errors import InvalidRequestError
from iris_ray.testing.machine import Machine, script_command
from iris_ray.testing.preemption import Preemption
from iris_ray.testing.ray_node import HostSpec, RayHead, new_node_id, ray_settings
from iris_ray.testing.tpu_host import RunningHost, TPUHost, machine_environment
from iris_ray.topology import TPUConfig, get_tpu_config

_JOIN_TIMEOUT_S = 120.0
_LOOK_S = 0.05
_LOG_TAIL_LINES = 20


class SimulatedCluster:
    """Real Ray nodes on this machine that pose as the hosts of TPU slices.

    Each simulated host is a raylet of its own, with the environment, node labels, resources and directories of a TPU
    VM, but without chips. The driver is connected to a head node that has no TPU. Everything ends with the ``with``
    block, an exception or Ctrl-C in it, and also when the driver is killed. One cluster a process at a time.

    Args:
        slices: how many slices of each TPU type to start with, e.g. ``{"v4-32": 2}``. None may be there.
        connect: whether to connect this process to the cluster as a driver. Otherwise use ``address``.
        cpus_per_host: logical CPUs of each host and of the head, as Ray counts them.
        dashboard: whether the head has Ray's dashboard, which ``ray job submit`` and the state API need. Several
            seconds slower to start.
        quiet: whether to say nothing about what is going on (it goes to stderr).

    Raises:
        InvalidRequestError: an argument makes no sense, Ray is already initialised in this process, or the process
            has a simulated cluster already.
        RuntimeError: (on start) Ray's processes ended or did not join; the message has the end of their log.

    Example:
        >>> with SimulatedCluster({"v4-32": 2}) as cluster:
        ...     run_on_pod(train, "v4-32")
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
        quiet: bool = False,
    ) -> None:
        self._initial = _checked_slices(slices)
        self._cpus = _checked_count("cpus_per_host", cpus_per_host, least=1)
        self._connect, self._dashboard, self._quiet = connect, dashboard, quiet
        self._lock = threading.RLock()
        self._slices: dict[str, list[RunningHost]] = {}
        self._next_index: dict[str, count[int]] = {}
        self._preemptions: list[Preemption] = []
        self._head: RayHead | None = None
        self._head_machines: list[Machine] = []
        self._janitor: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._root = Path()
        self._addresses = _loopback_addresses()
        self._head_address = next(self._addresses)
        self._began = time.monotonic()
        self._owner = 0

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def start(self) -> Self:
        """Starts everything and waits until all hosts have joined. For use without ``with``."""
        if not sys.platform.startswith("linux"):
            raise InvalidRequestError(f"a simulated cluster needs Linux, this is {sys.platform}.")
        if ray.is_initialized():
            raise InvalidRequestError(
                "Ray is already initialised in this process: call ray.shutdown() first, then start the cluster."
            )
        with SimulatedCluster._active_lock:
            if SimulatedCluster._active is not None:
                raise InvalidRequestError(
                    "this process has a simulated cluster already: shut it down first, or call add_slice() on it."
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
        """Ends all processes of the cluster and removes its directory. Harmless when repeated."""
        if self._owner != os.getpid():  # never started, or inherited by a forked child, whose cluster it is not
            return
        with self._lock:
            self._owner = 0
            try:
                for preemption in self._preemptions:
                    preemption.cancel()
                if self._head is not None and ray.is_initialized():
                    # First: a driver that loses its GCS aborts.
                    ray.shutdown()
            finally:
                self._end_everything()
                atexit.unregister(self.shutdown)
                SimulatedCluster._active = None
        self._say("gone")

    # ------------------------------------------------------------------ what there is

    @property
    def address(self) -> str:
        """``host:port`` for ``ray.init(address)`` in another process."""
        return self._running_head().gcs_address

    @property
    def dashboard_url(self) -> str | None:
        """``http://host:port`` of Ray's dashboard, the address for ``ray job submit``; None without a dashboard."""
        url = self._running_head().dashboard_url
        return None if url is None else f"http://{url}"

    @property
    def slice_names(self) -> list[str]:
        """Names of the slices that have at least one host left, frozen ones included, oldest first."""
        with self._lock:
            return [name for name, hosts in self._slices.items() if any(h.machine.running for h in hosts)]

    def worker_ids(self, slice_name: str) -> list[int]:
        """Worker ids of the hosts of a slice that are left, frozen ones included, ascending."""
        with self._lock:
            return [h.host.worker_id for h in self._slice(slice_name) if h.machine.running]

    def node_id(self, slice_name: str, worker_id: int) -> str:
        """Hex id of a host's Ray node, as in ``ray.nodes()``. Also of hosts that are gone."""
        return self._host(slice_name, worker_id).host.node_id

    def host_dir(self, slice_name: str, worker_id: int) -> Path:
        """A host's private directory, ``IRIS_RAY_HOST_DIR`` there: ``dev``, ``lock``, ``logs``, ``tmp``."""
        return self._host(slice_name, worker_id).host.directory

    def host_pids(self, slice_name: str, worker_id: int) -> list[int]:
        """Pids of all processes that live on a host now, the raylet first; none once it is gone."""
        return self._host(slice_name, worker_id).machine.pids()

    # ------------------------------------------------------------------ what can happen

    def add_slice(self, tpu_type: str) -> str:
        """Starts one more slice and waits until it has joined. Returns its name."""
        config = get_tpu_config(tpu_type)
        with self._lock:
            return self._add_slices([config])[0]

    def kill_host(self, slice_name: str, worker_id: int) -> None:
        """Takes a host away without notice: SIGKILL for everything on it; returns when it is gone.

        Ray notices 1.5 s later. No effect on a host that is gone already.
        """
        victim = self._host(slice_name, worker_id)
        if victim.machine.running:
            self._say(f"killing host {victim.host.name}")
            victim.machine.kill()

    def preempt_slice(self, slice_name: str, notice_s: float | None = None) -> Preemption:
        """Takes a slice away.

        Args:
            slice_name: which.
            notice_s: None or 0 kills all its hosts at once. Otherwise Ray learns now that its nodes are going to be
                preempted (a drain with a deadline), and they are killed this many seconds later, in the background.

        Returns:
            The preemption; ``wait()`` until the hosts are gone. ``shutdown()`` does not wait for it.
        """
        notice = _checked_notice(notice_s)
        with self._lock:
            victims = [h for h in self._slice(slice_name) if h.machine.running]
            head = self._running_head()
        if notice:
            self._say(f"preempting slice {slice_name}: notice of {notice:g} s")
            deadline = time.time() + notice
            for victim in victims:
                head.announce_preemption(victim.host.node_id, f"{slice_name} is preempted", deadline)
        preemption = Preemption(slice_name, notice, lambda: self._kill_all(slice_name, victims))
        with self._lock:
            self._preemptions.append(preemption)
        preemption.start()
        return preemption

    def freeze_host(self, slice_name: str, worker_id: int) -> None:
        """Stops all processes of a host (SIGSTOP), as if its kernel hung. Ray gives it up 4 s later."""
        victim = self._host(slice_name, worker_id)
        self._say(f"freezing host {victim.host.name}")
        victim.machine.freeze()

    def thaw_host(self, slice_name: str, worker_id: int) -> None:
        """Lets a frozen host go on. If Ray has given it up meanwhile, its raylet ends when it hears of that."""
        victim = self._host(slice_name, worker_id)
        self._say(f"thawing host {victim.host.name}")
        victim.machine.thaw()

    # ------------------------------------------------------------------ inside

    def _start(self) -> None:
        self._say("starting the head node")
        self._root = _make_root()
        (self._root / "s").mkdir()
        self._start_janitor()
        head_environment = {**ray_settings(), **machine_environment()}

        def launch(kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            machine = self._launch(f"head-{kind}", command, head_environment, self._root)
            self._head_machines.append(machine)
            return machine.process

        self._head = RayHead(
            self._root, address=self._head_address, cpus=self._cpus, dashboard=self._dashboard, launch=launch
        )
        if self._connect:
            # Before any TPU host joins, lest the driver be attached to one.
            self._say("connecting the driver")
            ray.init(self.address, log_to_driver=True, logging_level="WARNING")
        configs = [config for config, number in self._initial for _ in range(number)]
        if configs:
            self._add_slices(configs)
        self._say(f"ready at {self.address}")

    def _start_janitor(self) -> None:
        reading, self._lifeline = os.pipe()
        try:
            self._janitor = subprocess.Popen(
                [*script_command("janitor.py"), str(self._root)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def _launch(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> Machine:
        log = self._root / f"{name}.log"
        return Machine(command, env=env, cwd=cwd, log=log, lifeline=self._lifeline)

    def _add_slices(self, configs: Sequence[TPUConfig]) -> list[str]:
        """Starts the hosts of all slices side by side, and waits for all."""
        names = [self._new_name(config) for config in configs]
        hosts_total = sum(config.vm_count for config in configs)
        self._say(f"starting {hosts_total} TPU hosts: {', '.join(names)}")
        started: list[RunningHost] = []
        for name, config in zip(names, configs, strict=True):
            self._slices[name] = hosts = self._start_slice(name, config)
            started += hosts
        self._wait_until_joined(started)
        return names

    def _new_name(self, config: TPUConfig) -> str:
        index = next(self._next_index.setdefault(config.name, count()))
        return f"{config.name}-{index}"

    def _start_slice(self, name: str, config: TPUConfig) -> list[RunningHost]:
        head = self._running_head()
        hosts = [
            TPUHost(
                slice_name=name,
                worker_id=worker_id,
                config=config,
                node_id=new_node_id(),
                address=next(self._addresses),
                directory=self._root / f"{name}-w{worker_id}",
            )
            for worker_id in range(config.vm_count)
        ]
        addresses = [host.address for host in hosts]
        running: list[RunningHost] = []
        for host in hosts:
            host.make_directory()

            def launch(
                _kind: str, command: Sequence[str], host: TPUHost = host
            ) -> subprocess.Popen[bytes]:
                environment = {**ray_settings(), **host.environment(addresses)}
                machine = self._launch(host.name, command, environment, host.directory)
                running.append(RunningHost(host, machine))
                return machine.process

            spec = HostSpec(
                node_id=host.node_id,
                cpus=self._cpus,
                resources=host.resources(),
                labels=host.labels(),
                directory=host.directory,
                socket_prefix=f"{self._root}/s/{host.name}-",
                address=host.address,
            )
            head.start_host(spec, launch)
        return running

    def _wait_until_joined(self, hosts: Sequence[RunningHost]) -> None:
        head = self._running_head()
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        missing = {h.host.node_id: h for h in hosts}
        while missing:
            before = len(missing)
            for node_id in head.living_nodes() & missing.keys():
                del missing[node_id]
            if len(missing) < before:
                self._say(f"{len(hosts) - len(missing)} of {len(hosts)} hosts have joined")
            for late in missing.values():
                if not late.machine.running:
                    raise RuntimeError(f"host {late.host.name} ended while it started{self._tail(late.host)}")
            if missing and time.monotonic() > deadline:
                names = ", ".join(h.host.name for h in missing.values())
                raise RuntimeError(f"these hosts did not join the cluster within {_JOIN_TIMEOUT_S:g} s: {names}")
            if missing:
                time.sleep(_LOOK_S)

    def _tail(self, host: TPUHost) -> str:
        """The end of what a host's raylet said before it ended, as the rest of a message."""
        logs = [self._root / f"{host.name}.log", *sorted((host.directory / "logs").glob("raylet.*"))]
        lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
        return ":\n  " + "\n  ".join(lines[-_LOG_TAIL_LINES:]) if lines else ""

    def _kill_all(self, slice_name: str, victims: Sequence[RunningHost]) -> None:
        self._say(f"killing slice {slice_name}")
        for victim in victims:
            victim.machine.begin_kill()
        for victim in victims:
            victim.machine.kill()

    def _end_everything(self) -> None:
        hosts = [h.machine for hosts in self._slices.values() for h in hosts]
        # All at once, so that they end side by side and a second Ctrl-C from here on changes nothing.
        for machine in (*hosts, *self._head_machines):
            machine.begin_kill()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for machine in (*hosts, *self._head_machines):
            machine.kill()
        if self._janitor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._janitor.wait(10)  # it goes on by itself if that is not enough
        self._head, self._head_machines, self._slices = None, [], {}

    @classmethod
    def _after_fork(cls) -> None:
        """A forked child of the driver has no part in the cluster, and must not keep its directory from being removed."""
        if cls._active is not None:
            os.close(cls._active._lifeline)
            cls._active = None

    def _running_head(self) -> RayHead:
        if self._head is None:
            raise InvalidRequestError("the simulated cluster is not running: use it in a with statement.")
        return self._head

    def _slice(self, name: str) -> list[RunningHost]:
        self._running_head()
        with self._lock:
            if name not in self._slices:
                known = ", ".join(self._slices) or "none"
                raise InvalidRequestError(f"no slice is called {name!r}; there are: {known}.")
            return self._slices[name]

    def _host(self, slice_name: str, worker_id: int) -> RunningHost:
        hosts = self._slice(slice_name)
        if isinstance(worker_id, bool) or not isinstance(worker_id, int) or not 0 <= worker_id < len(hosts):
            raise InvalidRequestError(
                f"slice {slice_name} has no worker {worker_id!r}; its worker ids are 0 to {len(hosts) - 1}."
            )
        return hosts[worker_id]

    def _say(self, text: str) -> None:
        if not self._quiet:
            elapsed = time.monotonic() - self._began
            print(f"[simulated cluster {elapsed:6.1f} s] {text}", file=sys.stderr, flush=True)


os.register_at_fork(after_in_child=SimulatedCluster._after_fork)


def _checked_slices(slices: Mapping[str, int] | None) -> list[tuple[TPUConfig, int]]:
    if slices is None:
        return []
    if not isinstance(slices, Mapping):
        raise InvalidRequestError(
            f'slices is a mapping of TPU types to counts, such as {{"v4-32": 2}}, not {slices!r}.'
        )
    return [
        (get_tpu_config(name), _checked_count(f"the number of {name} slices", number, least=0))
        for name, number in slices.items()
    ]


def _checked_count(what: str, number: object, *, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidRequestError(f"{what} is an int from {least} up, not {number!r}.")
    return number


def _checked_notice(notice_s: float | None) -> float:
    if notice_s is None:
        return 0.0
    if isinstance(notice_s, bool) or not isinstance(notice_s, int | float) or not 0 <= notice_s < float("inf"):
        raise InvalidRequestError(f"notice_s is a number of seconds from 0 up, or None, not {notice_s!r}.")
    return float(notice_s)


def _loopback_addresses() -> Iterator[str]:
    """Addresses of this machine that are most likely nobody else's: Linux answers to all of 127.0.0.0/8.

    Every host has its own, so that an address tells hosts apart and two of them can listen on one port. The machine's
    real address could change under the cluster, and Ray does not let drivers connect to 127.0.0.1.
    """
    first = int(IPv4Address("127.0.0.1")) + (random.randrange(1, 2**16) << 8)
    return (str(IPv4Address(first + number)) for number in count())


def _make_root() -> Path:
    """A new directory whose name is short enough for the Unix sockets in it."""
    return Path(tempfile.mkdtemp(prefix=f"iris-{os.getpid()}-", dir="/tmp"))
