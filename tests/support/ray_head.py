"""A real Ray head, as ``ray start --head`` starts it, with its dashboard; its node poses as a v4-8 slice, if asked."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from iris_ray.actors.host.task_environment import hold_ports
from tests.support.command_line import REPOSITORY
from tests.support.waiting import wait_until

LABELS = {
    "ray.io/accelerator-type": "TPU-V4",
    "ray.io/tpu-slice-name": "my-slice",
    "ray.io/tpu-worker-id": "0",
    "ray.io/tpu-topology": "2x2x1",
    "ray.io/tpu-pod-type": "v4-8",
}
RESOURCES = {"TPU": 4, "my-slice": 1, "TPU-v4-8-head": 1}
START_S = 120.0
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@dataclass(frozen=True, slots=True)
class RayHead:
    """A running head.

    Attributes:
        dashboard: the URL of its dashboard.
        address: of its GCS.
        environ: what a client of it needs in its environment.
    """

    dashboard: str
    address: str
    environ: Mapping[str, str]


@contextlib.contextmanager
def ray_head(
    directory: Path, token: str | None = None, *options: str, port: int = 0, is_slice: bool = True, **variables: str
) -> Iterator[RayHead]:
    """Start a head, and end it and all that runs on it with the block.

    Args:
        directory: for its files; it has a short path, for Ray's sockets are there.
        token: what clients must know; None: anybody is served.
        options: more options of ``ray start``.
        port: of its GCS; 0: any.
        is_slice: whether the head poses as a TPU host.
        variables: of its environment.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "IRIS_"))}
    environ |= {"PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled", "JAX_PLATFORMS": "cpu"}
    environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environ["PATH"]])
    if token is not None:
        token_file = directory / "token"
        token_file.write_text(token)
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    ports = free_ports("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports["port"] = port or ports["port"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
               *(f"--{name}={number}" for name, number in ports.items()), f"--temp-dir={directory}/ray", "--num-cpus=4",
               "--disable-usage-stats", *options]  # fmt: skip
    if is_slice:
        labels = ",".join(f"{name}={value}" for name, value in LABELS.items())
        command += [f"--resources={json.dumps(RESOURCES)}", f"--labels={labels}"]
    if shutil.which("setpriv"):  # of util-linux; a test run that is killed leaves no head
        command = ["setpriv", "--pdeathsig", "TERM", "--", *command]
    with (
        open(directory / "head.log", "wb") as log,
        subprocess.Popen(
            command,
            env=environ | {"IRIS_RAY_HOST_DIR": str(directory / "host"), DRAIN_VARIABLE: "1"} | variables,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as head,
    ):
        try:
            url = f"http://127.0.0.1:{ports['dashboard-port']}"
            wait_until(lambda: _answers(url, token), START_S)
            yield RayHead(url, f"127.0.0.1:{ports['port']}", environ)
        finally:
            head.send_signal(signal.SIGTERM)  # it ends its node's processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)


def free_ports(*names: str) -> dict[str, int]:
    held = hold_ports("127.0.0.1", len(names), ())
    numbers = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return dict(zip(names, numbers, strict=True))


def _answers(url: str, token: str | None) -> bool:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/api/jobs/", headers=headers), timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        time.sleep(0.2)
        return False
