"""The Controller's metrics, as Prometheus reads them from a node of Ray's."""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from tests.support.ray_head import ray_head
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

SCRIPT = """
import json, ray, sys
from iris_ray import run_on_pod
ray.init()
print(json.dumps([[n["NodeManagerAddress"], n["MetricsExportPort"]] for n in ray.nodes()]), flush=True)
run_on_pod(lambda: None, "v4-8")
sys.stdin.readline()
"""


@pytest.mark.long
def test_prometheus_reads_what_job_has_done() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="m") as directory, ray_head(Path(directory)) as head:
        environ = {**head.environ, "RAY_ADDRESS": head.address, "IRIS_USER": "ann"}
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stdout is not None
            ((address, port),) = json.loads(driver.stdout.readline())
            url = f"http://{address}:{port}/metrics"
            wait_until(lambda: 'state="succeeded"' in series(url, "ray_iris_jobs_finished_total"))
            assert 'condition="' in series(url, "ray_iris_hosts")
            assert 'band="interactive"' in series(url, "ray_iris_admission_wait_seconds_count")
            assert 'tpu_type="v4-8"' in series(url, "ray_iris_launch_seconds_count")
            driver.communicate("\n")


def series(url: str, name: str) -> str:
    """Return the lines of a metric."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return "\n".join(re.findall(rf"^{name}{{.*$", answer.read().decode(), re.MULTILINE))
