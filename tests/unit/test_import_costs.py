"""What processes do not import until they need it. Each import delays their start, and so a cluster's first run."""

import subprocess
import sys

import pytest

ALL_OF_CONTROLLER = """
from iris_ray.actors.protocol.services import imported, installed_services
for service in installed_services():
    if service.controller is not None:
        imported(service.controller)
"""
LIGHT = {
    "a caller": (
        "import iris_ray.client.run_on_pod, iris_ray.client.client",
        {
            "iris_ray.scheduler.scheduler",
            "iris_ray.state.controller_state",
            "iris_ray.actors.pool.slice_pool_manager",
            "iris_ray.actors.host.host_actor",
            "aiohttp",
            "tenacity",
        },
    ),
    "a process that gets the handle of a pool": (
        "import iris_ray.actors.pool.actor",
        {"iris_ray.actors.pool.slice_pool_manager", "iris_ray.actors.host"},
    ),
    "a pool": (
        "import iris_ray.actors.pool.slice_pool_manager",
        {"iris_ray.scheduler.scheduler", "iris_ray.state.controller_state", "aiohttp", "tenacity"},
    ),
    "a host": (
        "import iris_ray.actors.host.host_actor",
        {"iris_ray.scheduler", "iris_ray.state", "iris_ray.actors.pool", "aiohttp", "tenacity"},
    ),
    "the Controller": (f"import iris_ray.actors.controller.controller_process{ALL_OF_CONTROLLER}", {"aiohttp"}),
}


@pytest.mark.parametrize("process", LIGHT)
def test_process_starts_without(process: str) -> None:
    what, without = LIGHT[process]
    script = f"import sys\n{what}\nprint({without} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
