"""Runs the pods of an emulated Kubernetes as a simulated cluster's head and hosts, as kubelets run containers."""

import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ray.exceptions import RpcError

from iris_ray.settings import TEST_METADATA_HOST
from iris_ray.testing.console import ConsoleOutput
from iris_ray.testing.head_machine import JOIN_TIMEOUT_S, HeadMachine
from iris_ray.testing.host_starter import HostStarter
from iris_ray.testing.kubernetes import Pod, PodState
from iris_ray.testing.machine import Machine
from iris_ray.testing.ray_node.detection import detected, device_plugin_variables
from iris_ray.testing.ray_node.head import new_node_id
from iris_ray.testing.ray_node.launching import ray_settings
from iris_ray.testing.tpu_host import OF_THIS_MACHINE, Host, RunningHost, machine_environment
from iris_ray.testing.workspace import Workspace

AUTOSCALER = "autoscaler"
"""The name of the container in which KubeRay runs Ray's autoscaler."""

_LOOK_S = 0.1
_KILLED = 137
_EXIT_CODE = re.compile(r"ended with exit code (-?\d+)")
_EXPECTED_CODES = (0, 15, -15, 143)
"""Codes with which a raylet ends when it is drained or told to. ``ray start --block`` then goes on, and the pod stays
until KubeRay deletes it; after other codes it ends with 1 (ray/scripts/scripts.py of Ray 2.60)."""


@dataclass(slots=True, eq=False)
class PodMachines:
    """A `PodRunner`. The pod of the head runs all of the head's processes, each other pod one Ray node.

    Args:
        workspace: where their processes run.
        console: told of what they do.
        head_address: IP address of the head's pods; it stays, as the name of their service does.
        addresses: IP addresses for the other pods.
        starter: makes what starts hosts, once there is a head.
        dashboard: whether the head has Ray's dashboard.
        joined: told of every host when its Ray node has joined.
        api_variables: returns the variables by which pods find and trust the API server, as kubelets set them.
        autoscaler_variables: of the autoscaler's container besides KubeRay's.

    Attributes:
        head: the head, once it was started.
        head_ready: set while the head's pod is ready.
    """

    workspace: Workspace
    console: ConsoleOutput
    head_address: str
    addresses: Iterator[str]
    starter: Callable[[HeadMachine], HostStarter]
    dashboard: bool
    joined: Callable[[RunningHost], None]
    api_variables: Callable[[], Mapping[str, str]]
    autoscaler_variables: Mapping[str, str]
    head: HeadMachine | None = None
    head_ready: threading.Event = field(default_factory=threading.Event)
    _starter: HostStarter | None = None
    _runs: "dict[str, _PodRun]" = field(default_factory=dict)
    _living: tuple[float, frozenset[str]] = (0.0, frozenset())
    _looking: threading.Lock = field(default_factory=threading.Lock)

    # -- what the world asks for -----------------------------------------------------------------------------------

    def start(self, pod: Pod) -> None:
        run = _HeadRun(self, pod) if pod.is_head else _HostRun(self, pod, next(self.addresses))
        self._runs[pod.uid] = run
        run.begin()

    def stop(self, pod: Pod, grace_s: float) -> None:
        self._runs[pod.uid].stop(grace_s)

    def kill(self, pod: Pod) -> None:
        self._runs[pod.uid].kill()

    def state(self, pod: Pod) -> PodState:
        return self._runs[pod.uid].state()

    # -- what pods ask for -----------------------------------------------------------------------------------------

    def start_head(self, pod: Pod, variables: Mapping[str, str]) -> HeadMachine:
        """Start the head, or start it again. Raises RuntimeError if it does not come up."""
        if self.head is not None:
            self.head.require_persistence()
            self.head.kill()  # what is left of it
            self.head.start_again(variables)
            return self.head
        self.head = HeadMachine(
            self.workspace,
            address=self.head_address,
            resources=detected(variables, pod.ray_start_params, self.head_address, is_head=True),
            dashboard=self.dashboard,
            storage=self._storage(pod) if variables.get("RAY_gcs_storage") == "rocksdb" else None,
            console=self.console,
            variables=variables,
        )
        self._starter = self.starter(self.head)
        return self.head

    def start_host(self, host: Host) -> RunningHost:
        """Start a host, and return before it has joined."""
        assert self._starter is not None
        return self._starter.launch(host)

    def is_alive(self, node_id: str) -> bool:
        """Return whether a node is alive for the GCS, as of a tenth of a second ago."""
        with self._looking:
            if self.head is None or not self.head.running:
                return False
            seen_at, living = self._living
            if time.monotonic() - seen_at > _LOOK_S:
                try:
                    living = frozenset(self.head.ray.living_nodes())
                except RpcError:  # the GCS is just going
                    living = frozenset()
                self._living = time.monotonic(), living
        return node_id in living

    def _storage(self, pod: Pod) -> Path:
        """Return the directory of the GCS's storage. What is in a volume with a claim outlives the pod."""
        container = pod.ray_container
        path = Path(container.environment["RAY_gcs_storage_path"])
        for mount, claim in container.claims.items():
            if path.is_relative_to(mount):
                return self.workspace.root / "claims" / claim / path.relative_to(mount)
        return self.workspace.root / "volumes" / pod.uid


class _PodRun(ABC):
    """One pod. It starts in a thread of its own, and is stopped in another one."""

    def __init__(self, runner: PodMachines, pod: Pod, address: str, variables: Mapping[str, str]) -> None:
        self._runner, self._pod = runner, pod
        self._address, self._variables = address, variables
        self._lock = threading.RLock()
        self._main: Machine | HeadMachine | None = None
        self._others: dict[str, Machine] = {}
        """The autoscaler, and the preStop hook."""
        self._ready = False
        self._deadline: float | None = None
        """When it is killed, on the monotonic clock; None while nobody stops it."""
        self._ended = False

    def begin(self) -> None:
        threading.Thread(target=self._start, name=f"start {self._pod.name}", daemon=True).start()

    def stop(self, grace_s: float) -> None:
        with self._lock:
            deadline = time.monotonic() + grace_s
            if self._deadline is not None:
                self._deadline = min(self._deadline, deadline)
                return
            self._deadline = deadline
        threading.Thread(target=self._stop, name=f"stop {self._pod.name}", daemon=True).start()

    def kill(self) -> None:
        with self._lock:
            self._ended = True
            for machine in (self._main, *self._others.values()):
                if machine is not None:
                    machine.begin_kill()

    def state(self) -> PodState:
        with self._lock:
            names = [container.name for container in self._pod.containers]
            codes: dict[str, int] = {}
            if self._main is not None and not self._main.running and (code := self._exit_code()) is not None:
                codes[names[0]] = code
            for name, machine in self._others.items():
                if name in names and not machine.running:
                    codes[name] = _KILLED if machine.killed else 1
            if self._ended:
                codes = dict.fromkeys(names, _KILLED) | codes
            running = {name for name in names if name not in codes} if self._main is not None else set()
            ready = self._ready and self._main is not None and self._main.running
            return PodState(self._address, frozenset(running), ready and names[0] in running, codes)

    @abstractmethod
    def _run(self) -> None:
        """Start the containers, and return when the pod is ready."""

    @abstractmethod
    def _terminate(self) -> None:
        """SIGTERM the Ray container."""

    @abstractmethod
    def _exit_code(self) -> int | None:
        """Return the exit code of the Ray container, whose Ray node has ended; None if the container goes on."""

    @abstractmethod
    def _directory(self) -> Path:
        """Return the working directory of a hook."""

    def _start(self) -> None:
        try:
            self._run()
        except Exception as error:
            if not self._is_going():
                self._runner.console.say(f"pod {self._pod.name} does not start: {error}")
            self.kill()

    def _has_launched(self, main: Machine | HeadMachine) -> None:
        with self._lock:
            self._main = main
            if self._ended:  # meanwhile
                main.begin_kill()

    def _wait_until_joined(self, node_id: str) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while not self._runner.is_alive(node_id):
            if self._ended or self._main is None or not self._main.running:
                raise RuntimeError("its Ray node has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"its Ray node has not joined within {JOIN_TIMEOUT_S:g} s")
            time.sleep(_LOOK_S)

    def _is_going(self) -> bool:
        return self._ended or self._deadline is not None

    def _stop(self) -> None:
        hook = self._pod.ray_container.pre_stop
        if hook and self._main is not None and self._main.running:
            machine = self._launch("hook", list(hook), self._variables, self._directory())
            self._wait_while(lambda: machine.running)
        if self._main is not None:
            self._terminate()
            self._wait_while(lambda: self._main is not None and self._main.running)
        self.kill()

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition() and not self._ended and time.monotonic() < (self._deadline or 0.0):
            time.sleep(_LOOK_S / 2)

    def _launch(self, name: str, command: list[str], variables: Mapping[str, str], directory: Path) -> Machine:
        environment = {**ray_settings(), **machine_environment(), **variables}
        machine = self._runner.workspace.launch(f"{self._pod.name}-{name}", command, env=environment, cwd=directory)
        with self._lock:
            self._others[name] = machine
            if self._ended:
                machine.begin_kill()
        return machine


class _HeadRun(_PodRun):
    """The pod of the head."""

    def __init__(self, runner: PodMachines, pod: Pod) -> None:
        # Other processes on the head find its GCS as on every simulated head, by looking for it.
        given = {name: value for name, value in pod.ray_container.environment.items() if name != "RAY_ADDRESS"}
        variables = {**runner.api_variables(), **_for_this_machine(given)}
        super().__init__(runner, pod, runner.head_address, variables)

    def kill(self) -> None:
        if not self._ended:
            self._runner.head_ready.clear()
        super().kill()

    def _run(self) -> None:
        head = self._runner.start_head(self._pod, self._variables)
        self._has_launched(head)
        self._wait_until_joined(head.ray.node_id)
        for container in self._pod.containers:
            if container.name == AUTOSCALER:
                self._start_autoscaler(head, container.environment)
        self._ready = True
        self._runner.head_ready.set()

    def _start_autoscaler(self, head: HeadMachine, environment: Mapping[str, str]) -> None:
        # KubeRay's command with the address of the GCS, which on a real head is at port 6379 of the pod.
        command = [sys.executable, "-m", "ray.scripts.scripts", "kuberay-autoscaler", "--gcs-address"]
        command += [head.ray.gcs_address, "--cluster-name", environment["RAY_CLUSTER_NAME"]]
        command += ["--cluster-namespace", environment["RAY_CLUSTER_NAMESPACE"]]
        variables = {**_for_this_machine(environment), **self._runner.api_variables()}
        variables |= self._runner.autoscaler_variables
        self._launch(AUTOSCALER, command, variables, self._directory())

    def _terminate(self) -> None:
        assert self._main is not None
        self._main.begin_kill()

    def _exit_code(self) -> int | None:
        return _KILLED if self._ended else 1

    def _directory(self) -> Path:
        return self._runner.workspace.root


class _HostRun(_PodRun):
    """A pod of a worker group."""

    def __init__(self, runner: PodMachines, pod: Pod, address: str) -> None:
        of_node = device_plugin_variables(pod.manifest["spec"].get("nodeSelector") or {})
        of_node |= runner.api_variables()
        super().__init__(runner, pod, address, {**of_node, **_for_this_machine(pod.ray_container.environment)})

    def _run(self) -> None:
        while not self._runner.head_ready.wait(_LOOK_S):  # as the init container does that KubeRay adds
            if self._is_going():
                return
        if self._is_going():
            return
        host = self._host()
        running = self._runner.start_host(host)
        self._variables = host.environment() | {TEST_METADATA_HOST: running.metadata.address}
        self._has_launched(running.machine)
        self._wait_until_joined(host.node_id)
        self._runner.joined(running)
        self._ready = True

    def _host(self) -> Host:
        head = self._runner.head
        assert head is not None
        # The names of the head's service are known to no resolver of this machine.
        self._variables = {
            **self._variables,
            "RAY_ADDRESS": head.ray.gcs_address,
            "RAY_PORT": head.ray.gcs_address.rpartition(":")[2],
            "RAY_IP": self._runner.head_address,
            "FQ_RAY_IP": self._runner.head_address,
        }
        chips = int(self._pod.ray_container.limits.get("google.com/tpu", 0))
        variables = self._variables if chips else {}
        return Host(
            name=self._pod.name,
            slice_name=variables.get("TPU_NAME", self._pod.name),
            worker_id=int(variables.get("TPU_WORKER_ID", 0)),
            node_id=new_node_id(),
            address=self._address,
            directory=self._directory(),
            chips=chips,
            variables=self._variables,
            ray_start_params=self._pod.ray_start_params,
        )

    def _terminate(self) -> None:
        assert isinstance(self._main, Machine)
        self._main.terminate_command()

    def _exit_code(self) -> int | None:
        log = self._runner.workspace.root / f"{self._pod.name}.log"
        found = _EXIT_CODE.search(log.read_text(errors="replace")) if log.exists() else None
        if found is None:
            return _KILLED
        return None if int(found[1]) in _EXPECTED_CODES and not self._is_going() else 1

    def _directory(self) -> Path:
        return self._runner.workspace.root / self._pod.name


def _for_this_machine(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in OF_THIS_MACHINE}
