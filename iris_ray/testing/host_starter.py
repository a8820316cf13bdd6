"""Starts the hosts of a simulated cluster, and reports those that end unasked."""

import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address
from itertools import count

from iris_ray.model.topology import TPUConfig
from iris_ray.settings import TEST_METADATA_HOST
from iris_ray.testing.console import ConsoleOutput
from iris_ray.testing.head_machine import JOIN_TIMEOUT_S, LOOK_S
from iris_ray.testing.machine import Machine
from iris_ray.testing.metadata_server import MetadataServers
from iris_ray.testing.network import Network
from iris_ray.testing.ray_node.detection import detected
from iris_ray.testing.ray_node.head import HostSpec, RayHead, ResolvedSpec, new_node_id
from iris_ray.testing.ray_node.launching import ray_settings
from iris_ray.testing.tpu_host import Host, RunningHost, tpu_host
from iris_ray.testing.workspace import Workspace


class HostStarter:
    """Plans new hosts, starts them, and waits until they have joined.

    Args:
        workspace: where the hosts run.
        metadata: serves the hosts' metadata.
        addresses: IP addresses for new hosts.
        network: the hosts' network; None: they are all on this machine's loopback interface.
        cpus: logical CPUs of each host, as Ray counts them.
        console: told of every step.
    """

    def __init__(
        self,
        head: RayHead,
        workspace: Workspace,
        metadata: MetadataServers,
        addresses: Iterator[str],
        network: Network | None,
        cpus: int,
        console: ConsoleOutput,
    ) -> None:
        self._head = head
        self._workspace = workspace
        self._metadata = metadata
        self._addresses = addresses
        self._network = network
        self._cpus = cpus
        self._console = console
        self._next_index: defaultdict[str, Iterator[int]] = defaultdict(count)
        self._planning = threading.Lock()

    def start_slices(self, configs: Sequence[TPUConfig], under: Sequence[str] = ()) -> list[list[RunningHost]]:
        """Start the hosts of all slices side by side, and wait until all have joined.

        ``under`` is a command that runs the hosts' raylets.

        Returns:
            The hosts of each slice, by worker id.

        Raises:
            RuntimeError: a host ended or did not join; the message has the end of its log. All hosts are killed.
        """
        if not configs:
            return []
        with self._planning:
            slices = [self._plan_slice(config) for config in configs]
        names = ", ".join(hosts[0].slice_name for hosts in slices)
        self._console.step(f"starting {sum(map(len, slices))} TPU hosts: {names}")
        return self._start(slices, under)

    def start_plain_hosts(self, count: int, gpus: int, labels: Mapping[str, str]) -> list[RunningHost]:
        """Start hosts without TPU side by side, and wait until all have joined. Raises like `start_slices`."""
        with self._planning:
            hosts = [[self._plan_plain_host(gpus, labels)] for _ in range(count)]
        self._console.step(f"starting {count} hosts: {', '.join(host.name for (host,) in hosts)}")
        return [running for (running,) in self._start(hosts)]

    def _start(self, slices: Sequence[Sequence[Host]], under: Sequence[str] = ()) -> list[list[RunningHost]]:
        running: list[RunningHost] = []
        try:
            running.extend(self.launch(host, under) for hosts in slices for host in hosts)
            self._wait_until_joined(running)
        except BaseException:
            for started in running:
                started.machine.begin_kill()
            raise
        by_host = {started.host: started for started in running}
        return [[by_host[host] for host in hosts] for hosts in slices]

    def _plan_slice(self, config: TPUConfig) -> list[Host]:
        name, root = f"{config.name}-{next(self._next_index[config.name])}", self._workspace.root
        addresses = [next(self._addresses) for _ in range(config.vm_count)]
        return [
            tpu_host(name, number, config, new_node_id(), addresses, root / f"{name}-w{number}")
            for number in range(config.vm_count)
        ]

    def _plan_plain_host(self, gpus: int, labels: Mapping[str, str]) -> Host:
        name, address = f"host-{next(self._next_index['host'])}", next(self._addresses)
        return Host(name, name, 0, new_node_id(), address, self._workspace.root / name, gpus=gpus, labels=dict(labels))

    def launch(self, host: Host, under: Sequence[str] = ()) -> RunningHost:
        """Start one host, and return before it has joined. ``under`` is as for `start_slices`."""
        machines: list[Machine] = []
        at = host.address if self._network is None else self._network.head
        metadata = self._metadata.serve(at, host.metadata)
        environment = {**ray_settings(), **host.environment(), TEST_METADATA_HOST: metadata.address}
        prefix = [] if self._network is None else self._network.prefix(host.address)

        def launch(_kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            machine = self._workspace.launch(
                host.name, [*under, *command], env=environment, cwd=host.directory, prefix=prefix
            )
            machines.append(machine)
            return machine.process

        host.make_directory()
        if host.ray_start_params is None:
            resources = ResolvedSpec(host.address, self._cpus, host.gpus, host.resources, host.labels)
        else:
            resources = detected(environment, host.ray_start_params, host.address, is_head=False)
        spec = HostSpec(
            node_id=host.node_id,
            resources=resources,
            directory=host.directory,
            socket_prefix=f"{self._workspace.root}/s/{host.name}-",
            address=host.address,
        )
        self._head.start_host(spec, launch)
        return RunningHost(host, machines[0], metadata)

    def _wait_until_joined(self, running: Sequence[RunningHost]) -> None:
        missing = {started.host.node_id: started for started in running}
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while missing:
            joined = self._head.living_nodes() & missing.keys()
            for node_id in joined:
                del missing[node_id]
            if joined:
                self._console.step(f"{len(running) - len(missing)} of {len(running)} hosts have joined")
                continue
            for started in missing.values():
                if not started.machine.running:
                    name, tail = started.host.name, log_tail(self._workspace, started.host)
                    raise RuntimeError(f"Host {name} ended while it started.{tail}")
            if time.monotonic() > deadline:
                names = ", ".join(started.host.name for started in missing.values())
                raise RuntimeError(f"After {JOIN_TIMEOUT_S:g} s these hosts have not joined the cluster: {names}.")
            time.sleep(LOOK_S)


def log_tail(workspace: Workspace, host: Host) -> str:
    """Return the last lines of a host's raylet and supervisor, as the end of a message."""
    return workspace.tail(*host.directory.glob("logs/raylet.*"), workspace.root / f"{host.name}.log")


def loopback_addresses() -> Iterator[str]:
    """Yield loopback addresses that most likely no other program uses: Linux answers to all of 127.0.0.0/8.

    Each node has an address of its own, so that addresses tell hosts apart and two hosts can listen on the same port.
    The machine's real address may change while the cluster lives, and Ray does not let drivers connect to 127.0.0.1.
    """
    first = int(IPv4Address("127.0.0.1")) + (random.randrange(1, 2**16) << 8)
    return (str(IPv4Address(first + number)) for number in count())


_LOOK_S = 0.5


class EndWatch:
    """Watches hosts in the background, and prints the end of a raylet's log if the raylet ended by itself.

    Such an end is a fault of this machine, not of the simulation. It prints in a quiet cluster, too: otherwise the end
    would look like a loss that a test asked for. ``tail`` returns the last lines of a host's logs.
    """

    def __init__(self, tail: Callable[[RunningHost], str]) -> None:
        self._tail = tail
        self._lock = threading.Lock()
        self._hosts: list[RunningHost] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="end-watch", daemon=True)
        self._thread.start()

    def add(self, host: RunningHost) -> None:
        """Watch one more host."""
        with self._lock:
            self._hosts.append(host)

    def expect(self, host: RunningHost) -> None:
        """Stop watching a host that may end by itself: it was drained, or is frozen for longer than Ray waits."""
        with self._lock:
            self._hosts = [other for other in self._hosts if other is not host]

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            with self._lock:
                ended = [host for host in self._hosts if not host.machine.running]
                self._hosts = [host for host in self._hosts if host not in ended]
            for host in ended:
                if not host.machine.killed:
                    print(
                        f"simulated host {host.host.name} ended by itself; its log ends with:{self._tail(host)}",
                        file=sys.stderr,
                        flush=True,
                    )
