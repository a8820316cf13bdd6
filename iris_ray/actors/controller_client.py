"""Finding the cluster's Controller, and starting it if nobody has."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.actor import ActorHandle

import iris_ray
from iris_ray.errors import ControllerUnavailableError

CONTROLLER_NAME = "controller"
NAMESPACE = "iris_ray"
START_TIMEOUT_S = 120.0

# What a plain Ray driver needs of its environment. Anything else may be a secret, or someone's runtime environment.
_PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "RAY_AUTH_MODE",
              "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # fmt: skip


def bootstrap_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for the process that starts the Controller: nothing of its caller's but what Ray needs."""
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    return passed | {"PYTHONPATH": str(Path(iris_ray.__file__).parents[1])}


def start_controller(address: str) -> "subprocess.Popen[str] | None":
    """Start the Controller in a Ray job of its own, unless there is one. Returns at once.

    Args:
        address: the cluster's GCS address.

    Returns:
        The process that starts it, or None if the Controller is there already.
    """
    try:
        ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
        return None
    except ValueError:
        return subprocess.Popen(
            [sys.executable, "-m", "iris_ray.actors.bootstrap", address],
            env=bootstrap_environment(os.environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


async def find_controller() -> ActorHandle:
    """The Controller's handle; waits while it is being started.

    Raises:
        ControllerUnavailableError: there is none after `START_TIMEOUT_S` seconds.
    """
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while True:
        try:
            return await asyncio.to_thread(ray.get_actor, CONTROLLER_NAME, NAMESPACE)
        except ValueError:
            if asyncio.get_running_loop().time() > deadline:
                raise ControllerUnavailableError(
                    f"no iris_ray Controller appeared in the cluster within {START_TIMEOUT_S:g} s"
                ) from None
        await asyncio.sleep(0.1)
