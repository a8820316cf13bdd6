"""How Ray's processes of a node are run: by our launcher, with our environment, and with changed command lines."""

import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._private import services
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    get_port_filename,
)

from iris_ray.settings import GCS_BOUNDS
from iris_ray.testing.machine import script_command

Launch = Callable[[str, Sequence[str]], subprocess.Popen[bytes]]
"""Runs a command for a purpose ("raylet", "gcs_server", …) and returns the process to watch."""

GCS = "gcs_server"
"""The purpose for which Ray starts its GCS."""
RAYLET = "raylet"
"""The purpose for which Ray starts a raylet."""


@dataclass
class _Launching(threading.local):
    """The thread's own function that runs Ray's processes; None outside of a start."""

    launch: Launch | None = field(default=None)


_launching = _Launching()
_patch_lock = threading.Lock()


@contextmanager
def launched_by(launch: Launch) -> Iterator[None]:
    """Have ``launch`` run the processes that this thread asks Ray to start within the block."""

    def start_ray_process(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if _launching.launch is None:  # a ray.init() of another thread
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


# -- settings ----------------------------------------------------------------------------------------------------------

# A user's own environment may override these.
_RAY_SETTINGS = {
    # Ray finds a killed host in 0.6 s and a frozen one in 13 s, instead of 15 s and a minute. All hosts share one
    # machine, so a host must not count as frozen because that machine is busy.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    # A raylet that looks for its own object store a moment too early looks again after 20 ms, not after 1 s.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # No worker starts before it is needed: each costs CPU time.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # There is no agent that metrics could go to.
    "RAY_enable_metrics_collection": "0",
    # Every raylet would watch the same machine's memory, and kill workers because of the other hosts' use.
    "RAY_memory_monitor_refresh_ms": "0",
    # The GCS stays small, however many jobs there were.
    **{name: str(bound) for name, bound in GCS_BOUNDS.items()},
}


def ray_settings() -> dict[str, str]:
    """Return the environment for all of the cluster's Ray processes; a user's own environment wins over it."""
    return dict(_RAY_SETTINGS)


def gcs_storage(directory: Path) -> dict[str, str]:
    """Return the environment for a GCS that stores its state in a directory, so that its successor can read it."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)}


# -- command lines -----------------------------------------------------------------------------------------------------

_NOT_IN_USE = -1  # how Ray's agents themselves report a service that they do not offer


def without_agents(command: Sequence[str], session_dir: Path, address: str) -> list[str]:
    """Return a raylet's command line without its dashboard agent, and with a runtime_env agent that starts on demand.

    Side effect: this writes the port files of the dashboard agent, which the raylet reads.
    """
    node_id = flag(command, "node_id")
    for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
        (session_dir / get_port_filename(node_id, name)).write_text(str(_NOT_IN_USE))
    port_file = session_dir / get_port_filename(node_id, RUNTIME_ENV_AGENT_PORT_NAME)
    agent = shlex.split(flag(command, "runtime_env_agent_command"))
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
    return [replace_flag(argument, replaced) for argument in command]


def flag(command: Sequence[str], name: str) -> str:
    """Return the value of ``--name=value`` in a command line."""
    prefix = f"--{name}="
    return next(argument.removeprefix(prefix) for argument in command if argument.startswith(prefix))


def replace_flag(argument: str, values: Mapping[str, str]) -> str:
    """Return ``--name=value`` with the value that ``values`` has for it, or the argument as it is."""
    name, equals, _ = argument.partition("=")
    value = values.get(name.removeprefix("--"))
    return argument if not equals or value is None else f"{name}={value}"
