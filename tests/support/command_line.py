"""``iris-ray`` for tests: in this process, and as people run it, on a cluster."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner, Result

from iris_ray.cli.exits import FAILED, OK
from iris_ray.cli.main import main

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster

REPOSITORY = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]


def invoke(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


def address_of_nobody() -> str:
    """An address at which nothing answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return f"127.0.0.2:{probe.getsockname()[1]}"


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "iris_ray", *arguments]


def environment(cluster: "SimulatedCluster", user: str = "ann") -> dict[str, str]:
    return {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(REPOSITORY), "IRIS_USER": user}


def iris(cluster: "SimulatedCluster", *arguments: str, code: int = OK, user: str = "ann") -> Done:
    """Its end; fails if that is not the one that was expected, or if bad usage takes more than a line to tell."""
    done = subprocess.run(
        command_line(*arguments), capture_output=True, text=True, timeout=120, env=environment(cluster, user)
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert code in (OK, FAILED) or done.stderr.count("\n") == 1, done.stderr
    return done


def iris_json(cluster: "SimulatedCluster", *arguments: str) -> Any:
    return json.loads(iris(cluster, *arguments, "--json").stdout)
