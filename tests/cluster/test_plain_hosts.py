"""An ordinary Ray node that says it is a TPU host: no variable of ours, no directory of its own, nothing simulated."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from iris_ray import release, run_on_pod
from iris_ray.errors import TaskCrashedError
from tests.support.clusters import Clusters

pytestmark = pytest.mark.usefixtures("no_shared_cluster", "plain_host")


@pytest.fixture(scope="module")
def plain_host(clusters: Clusters) -> Iterator[None]:
    """A slice of one host, as a raylet on a TPU VM describes it."""
    clusters.give_back_and_end()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("IRIS_RAY_HOST_DIR", raising=False)
        ray.init(
            num_cpus=4,
            resources={"TPU": 4.0, "accelerator_type:TPU-V4": 1.0, "plain": 1.0, "TPU-v4-8-head": 1.0},
            labels={
                "ray.io/accelerator-type": "TPU-V4",
                "ray.io/tpu-slice-name": "plain",
                "ray.io/tpu-worker-id": "0",
                "ray.io/tpu-topology": "2x2x1",
                "ray.io/tpu-pod-type": "v4-8",
            },
            include_dashboard=False,
            log_to_driver=False,
        )
        yield
        release()
        ray.shutdown()


def test_tmpdir_of_a_user_does_not_part_a_task_from_its_host(tmp_path: Path) -> None:
    function = ray.remote(runtime_env={"env_vars": {"TMPDIR": str(tmp_path)}})(lambda: os._exit(3))
    with pytest.raises(TaskCrashedError, match="code 3"):
        run_on_pod(function, "v4-8", max_retries_failure=0)
