"""examples/clusters/gke.yaml in an emulated GKE: Ray's own autoscaler brings and removes slices of pods."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from iris_ray import run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster
from iris_ray.testing.kubernetes_cluster import KubernetesCluster
from tests.support.clusters import Clusters
from tests.support.gangs import all_jobs, slice_of_this_task
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_shared_cluster")

GKE = Path(__file__).parents[2] / "examples" / "clusters" / "gke.yaml"
V6E = "tpu-v6e-slice"
GATES = ["GCSFaultToleranceEmbeddedStorage"]


@pytest.fixture(scope="module")
def box(clusters: Clusters) -> Iterator[KubernetesCluster]:
    """An empty cluster, from which idle slices go after three seconds."""
    clusters.give_back_and_end()
    with SimulatedCluster.from_raycluster(GKE, idle_timeout_s=3, quiet=True, feature_gates=GATES) as running:
        yield running


def replicas(box: KubernetesCluster, group: str = "v6e-16") -> int:
    groups = box.kubernetes.raycluster()["spec"]["workerGroupSpecs"]
    return next(int(found["replicas"]) for found in groups if found["groupName"] == group)


def pods(box: KubernetesCluster) -> list[str]:
    """The pods of all worker groups, those that wait for a node included."""
    found = [pod["metadata"] for pod in box.kubernetes.pod_manifests()]
    return [metadata["name"] for metadata in found if metadata["labels"]["ray.io/node-type"] == "worker"]


def wait_until_empty(box: KubernetesCluster) -> None:
    wait_until(lambda: not pods(box) and replicas(box) == replicas(box, "v6e-8") == 0, 90)


@contextmanager
def waiting_job(num_slices: int) -> Iterator[ray.ObjectRef]:
    """A job for slices of v6e-16 that is cancelled at the end."""
    run = run_on_pod_ray.remote(slice_of_this_task, "v6e-16", num_slices=num_slices, keep_warm=0)
    yield run
    ray.cancel(run)


def explanation() -> str:
    """Why the one job that is not over waits."""
    return " ".join(job.explanation for job in all_jobs() if not job.state.finished)


def test_job_on_empty_cluster_gets_slices_that_go_again(box: KubernetesCluster) -> None:
    assert not box.slice_names
    found = run_on_pod(slice_of_this_task, "v6e-16", num_slices=2, keep_warm=0)
    assert found == ["v6e-16-0"] * 4 + ["v6e-16-1"] * 4
    wait_until_empty(box)
    wait_until(lambda: "TPU" not in ray.cluster_resources())


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_missing_slices_are_as_many_replicas(box: KubernetesCluster, missing: int) -> None:
    """No node comes, so the pods wait."""
    wait_until_empty(box)
    box.kubernetes.set_stock(V6E, 0)
    with waiting_job(missing):
        wait_until(lambda: len(pods(box)) == missing * 4)
        assert replicas(box) == missing
    box.kubernetes.set_stock(V6E, None)
    wait_until_empty(box)
