"""An actor in an environment that Ray has made for a job's tasks: packages, directories, modules."""

import socket
import sys
from typing import Any

import ray

from iris_ray.actors.host.forks import ZygoteStart
from iris_ray.actors.protocol.version import versions_here


class EnvironmentActor:
    """Starts zygotes in its environment. Ray keeps the environment as long as this actor lives."""

    def versions(self) -> dict[str, Any]:
        """Return `versions_here`. Answer callers of all versions."""
        return versions_here()

    def start(self, how: ZygoteStart, address: str) -> tuple[list[str], dict[str, Any]]:
        """Start a zygote that talks to the host at this address.

        Returns:
            The module path for it, and Ray's runtime environment.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.connect(address)
            how.start(channel)
        return sys.path, dict(ray.get_runtime_context().runtime_env or {})
