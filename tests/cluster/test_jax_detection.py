"""The environment that a gang gets on a cluster, read by JAX's own Cloud TPU detection."""

import os

import pytest

from iris_ray import run_on_pod
from iris_ray.model.job_info import JobInfo
from iris_ray.task.job_info import get_job_info
from iris_ray.testing import SimulatedCluster
from tests.support.jax_reader import Found, jax_reader
from tests.support.proofs import in_proofs


@pytest.mark.parametrize("num_slices", [1, *in_proofs(3)])
def test_jax_finds_the_gang_that_runs_on_a_cluster(cluster: SimulatedCluster, num_slices: int) -> None:
    def tell() -> tuple[dict[str, str], JobInfo | None]:
        return dict(os.environ), get_job_info()

    told = run_on_pod(tell, "v4-16", num_slices=num_slices)
    coordinator = told[0][1].coordinator_address.partition(":")[0]
    environments = [env | {"GCE_METADATA_IP": env["IRIS_RAY_TEST_METADATA_HOST"]} for env, _ in told]

    def expected(kind: str) -> list[Found]:
        return [Found(kind, f"{coordinator}:8482", len(told), info.task_index) for _, info in told]

    with jax_reader() as as_jax_reads:
        assert as_jax_reads(environments) == expected("gketpu")
        for environment in environments:  # a TPU VM has its metadata server alone
            for name in ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TPU_SKIP_MDS_QUERY"):
                environment.pop(name, None)
        assert as_jax_reads(environments) == expected("gcetpu")
