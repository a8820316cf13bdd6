"""The provisioner as docs/gce.md starts it: a Ray job on the head, which finds the head's address by itself."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from iris_ray.settings import TEST_CLOUD_TPU_ENDPOINT
from iris_ray.testing.cloud_tpu_server import CloudTpuServer
from tests.support.ray_head import RayHead, ray_head


def ray_job(head: RayHead, *arguments: str) -> str:
    """What ``ray job`` prints on a laptop."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", arguments[0], "--address", head.dashboard]
    done = subprocess.run([*command, *arguments[1:]], env=head.environ, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


@pytest.mark.long
def test_provisioner_as_ray_job_knows_head_and_has_no_second() -> None:
    with tempfile.TemporaryDirectory(prefix="head", ignore_cleanup_errors=True) as directory, CloudTpuServer() as api:
        variable: dict[str, Any] = {TEST_CLOUD_TPU_ENDPOINT: api.address}
        with ray_head(Path(directory), None, is_slice=False, **variable) as head:
            provision = [sys.executable, "-m", "iris_ray", "cluster", "provision", "--tpu", "v6e-16", "--max", "2"]
            provision += ["--min", "1", "--spot", "--location", api.location, "--runtime-version", "v", "--once"]
            provision += ["--docker-image", "us-docker.pkg.dev/p/i/iris-ray:1"]
            said = ray_job(head, "submit", "--submission-id", "provision-v6e", "--", *provision)
            assert "create iris-iris-v6e-16-" in said, said
            (name,) = api.queued_states()
            (spec,) = api.queued(name).tpu.node_spec
            port = head.address.rpartition(":")[2]  # the address is that of this machine, as others see it
            assert re.search(rf"ray start --address='[\d.]+:{port}' --block", spec.node.metadata["startup-script"])
            again = ray_job(head, "submit", "--submission-id", "provision-v6e", "--", *provision)
            assert "already" in again, again
