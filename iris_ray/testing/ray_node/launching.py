"""Redirects how Ray runs the processes of a node."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._private import services

Launch = Callable[[str, Sequence[str]], subprocess.Popen[bytes]]
"""Runs a command for a purpose ("raylet", "gcs_server", …) and returns the process to watch."""

GCS = "gcs_server"
"""The purpose for which Ray starts its GCS."""
RAYLET = "raylet"
"""The purpose for which Ray starts a raylet."""


@dataclass
class _Launching(threading.local):
    """How the calling thread wants Ray's processes to be run; None outside of a start."""

    launch: Launch | None = field(default=None)


_launching = _Launching()
_patch_lock = threading.Lock()


@contextmanager
def launched_by(launch: Launch) -> Iterator[None]:
    """Within, ``launch`` runs the processes that this thread asks Ray to start."""

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
# The settings of Ray's processes in a simulated cluster, as environment variables.

# A user's own environment may override these.
_RAY_SETTINGS = {
    # Ray finds a killed host in 1.5 s and a frozen one in 15 s, instead of 15 s and a minute. All hosts share one
    # machine, so a host must not count as frozen because that machine is busy.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
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
    # Every raylet would watch the same machine's memory, and kill workers for what the others use.
    "RAY_memory_monitor_refresh_ms": "0",
}


def ray_settings() -> dict[str, str]:
    """Return the environment for all of the cluster's Ray processes; a user's own environment wins over it."""
    return dict(_RAY_SETTINGS)


def gcs_storage(directory: Path) -> dict[str, str]:
    """Return the environment for a GCS that stores everything in a directory, so that its successor can read it."""
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory)}
