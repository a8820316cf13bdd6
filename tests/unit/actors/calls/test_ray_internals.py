"""What a process learns of Ray without being connected."""

import subprocess
import sys

import pytest

from iris_ray.actors.calls.ray_internals import address_of_own_cluster

LOOK = f"from {address_of_own_cluster.__module__} import address_of_own_cluster as own; print(own())"


@pytest.mark.parametrize(("program", "found"), [("/ray/raylet", "10.0.0.9:6379"), ("/ray/other", "None")])
def test_process_knows_the_cluster_whose_raylet_started_it(program: str, found: str) -> None:
    """Ray's job API names another one in RAY_ADDRESS, if two clusters run on the machine."""
    looks = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", LOOK]
    command = [program, "-c", '"$@"; exit $?', "--gcs-address=10.0.0.9:6379", *looks]
    done = subprocess.run(command, executable="/bin/sh", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
