"""The head of a simulated cluster: its start, the end and restart of its GCS, its end and replacement."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from iris_ray.errors import InvalidRequestError
from iris_ray.testing.console import ConsoleOutput
from iris_ray.testing.machine import Machine
from iris_ray.testing.ray_node.head import RayHead, Resources
from iris_ray.testing.ray_node.launching import GCS, RAYLET, gcs_storage, ray_settings
from iris_ray.testing.tpu_host import machine_environment
from iris_ray.testing.workspace import Workspace

JOIN_TIMEOUT_S = 120.0
LOOK_S = 0.02
"""Seconds between two looks for nodes that join."""


class HeadMachine:
    """Ray's processes on the head, each a machine of its own: the GCS, a raylet without TPU, the log monitor.

    Args:
        workspace: where they run.
        address: IP address of the head.
        resources: of the head, as Ray counts them.
        dashboard: whether the head has Ray's dashboard.
        storage: the directory in which the GCS stores its state; None: in memory.
        console: told of every step.
        variables: more variables of its processes.

    Raises:
        RuntimeError: the head did not start; the message has the end of its log.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        address: str,
        resources: Resources,
        dashboard: bool,
        storage: Path | None,
        console: ConsoleOutput,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._workspace = workspace
        self._storage = storage
        self._console = console
        self._variables = variables or {}
        self._processes: dict[str, tuple[Machine, Sequence[str]]] = {}  # and their command lines, by purpose
        (workspace.root / "s").mkdir()

        def launch(kind: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
            return self._launch(kind, command).process

        try:
            self.ray = RayHead(workspace.root, address=address, resources=resources, dashboard=dashboard, launch=launch)
        except Exception as error:
            logs = [*workspace.root.glob("head-*.log"), *workspace.root.glob("session_2*/logs/*.err")]
            raise RuntimeError(f"The head node did not start: {error}{workspace.tail(*logs)}") from error

    @property
    def lacks_gcs(self) -> bool:
        """Whether `kill_gcs` has ended the GCS, and no other one runs."""
        return self._storage is not None and not self._processes[GCS][0].running

    @property
    def running(self) -> bool:
        """Whether both the GCS and the raylet run."""
        return all(self._processes[kind][0].running for kind in (GCS, RAYLET))

    def require_persistence(self) -> None:
        """Raise InvalidRequestError unless the cluster is persistent."""
        if self._storage is None:
            raise InvalidRequestError(
                "This cluster does not outlive its GCS: start it with persistent=True, or with from_raycluster give a"
                " file with RAY_gcs_storage=rocksdb."
            )

    def kill_gcs(self) -> None:
        self.require_persistence()
        self._console.say("killing the GCS")
        self._processes[GCS][0].kill()

    def restart_gcs(self) -> None:
        self.kill_gcs()
        self._console.say("starting the GCS again")
        self._launch(GCS, self.ray.gcs_command)
        self.ray.living_nodes()

    def restart(self) -> None:
        """Kill everything on the head and start it again at the same address; return when it has joined.

        Raises:
            RuntimeError: it did not join; the message has the end of its log.
        """
        self._console.say("killing the head")
        self.kill()
        self._console.say("starting the head again")
        self.start_again(self._variables)

    def begin_kill(self) -> None:
        """SIGKILL everything on the head, and return at once."""
        for machine, _ in self._processes.values():
            machine.begin_kill()

    def kill(self) -> None:
        """SIGKILL everything on the head; return when it is gone."""
        self.begin_kill()
        for machine, _ in self._processes.values():
            machine.kill()

    def start_again(self, variables: Mapping[str, str]) -> None:
        """Start the head again at the same address, with these variables. Raises like `restart`."""
        self._variables = variables
        others = {kind: command for kind, (_, command) in self._processes.items() if kind not in (GCS, RAYLET)}
        raylet_command = self.ray.begin_anew()
        self._launch(GCS, self.ray.gcs_command)
        self.ray.living_nodes()
        for socket in (self._workspace.root / "s").glob("head-*"):
            socket.unlink()
        self._launch(RAYLET, raylet_command)
        for kind, command in others.items():
            self._launch(kind, command)
        self._wait_until_joined()

    def _wait_until_joined(self) -> None:
        root = self._workspace.root
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while self.ray.node_id not in self.ray.living_nodes():
            if time.monotonic() > deadline or not self._processes[RAYLET][0].running:
                logs = [*root.glob("session_2*/logs/raylet.*"), root / f"head-{RAYLET}.log"]
                raise RuntimeError(f"The head did not come back.{self._workspace.tail(*logs)}")
            time.sleep(LOOK_S)

    def _launch(self, kind: str, command: Sequence[str]) -> Machine:
        environment = {**ray_settings(), **machine_environment(), **self._variables}
        if kind == GCS and self._storage is not None:
            environment |= gcs_storage(self._storage)
        machine = self._workspace.launch(f"head-{kind}", command, env=environment, cwd=Path.cwd())
        self._processes[kind] = machine, command
        return machine
