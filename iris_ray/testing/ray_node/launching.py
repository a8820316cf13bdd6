"""Redirects how Ray runs the processes of a node."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
