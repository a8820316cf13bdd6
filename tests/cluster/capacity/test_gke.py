"""examples/clusters/gke.yaml in an emulated GKE, where Ray's own autoscaler runs, and pods are hosts."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import IrisClient, ResourceSpec, run_on_pod, run_on_pod_ray, tpu_device
from iris_ray.errors import InvalidRequestError
from iris_ray.testing import SimulatedCluster
from iris_ray.testing.kubernetes_cluster import KubernetesCluster
from tests.support.clusters import Clusters
from tests.support.gangs import Trace, all_jobs, job_view, result_of, slice_of_this_task
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("no_shared_cluster")

GKE = Path(__file__).parents[3] / "examples" / "clusters" / "gke.yaml"
V6E = "tpu-v6e-slice"


@pytest.fixture(scope="module")
def box(clusters: Clusters) -> Iterator[KubernetesCluster]:
    """An empty cluster, from which idle slices go after three seconds."""
    clusters.give_back_and_end()
    with SimulatedCluster.from_raycluster(GKE, idle_timeout_s=3, quiet=True) as running:
        yield running


@pytest.fixture
def empty_box(box: KubernetesCluster) -> Iterator[KubernetesCluster]:
    """The same without slices, pods and nodes for them."""
    yield box
    wait_until(lambda: all(job.state.finished for job in all_jobs()))
    wait_until(lambda: is_empty(box), 90)


def replicas(box: KubernetesCluster, group: str = "v6e-16") -> int:
    groups = box.kubernetes.raycluster()["spec"]["workerGroupSpecs"]
    return next(int(found["replicas"]) for found in groups if found["groupName"] == group)


def workers(box: KubernetesCluster) -> list[dict[str, Any]]:
    """The pods of all worker groups, those that wait for a node included."""
    pods = box.kubernetes.pod_manifests()
    return [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"]


def is_empty(box: KubernetesCluster) -> bool:
    nodes = len(box.kubernetes.nodes())
    return not workers(box) and nodes == 1 and replicas(box) == replicas(box, "v6e-8") == 0


def want_no_slices(box: KubernetesCluster) -> None:
    """Do at once, as an operator can, what the Controller does after a minute about pods that nobody needs."""
    raycluster = box.kubernetes.raycluster()
    for group in raycluster["spec"]["workerGroupSpecs"]:
        group["replicas"] = 0
    box.kubernetes.apply(raycluster)
    for pod in workers(box):
        box.kubernetes.delete_pod(pod["metadata"]["name"])


def explanation(job_id: str) -> str:
    return next(job.explanation for job in all_jobs() if job.job_id == job_id)


def saves_when_told(directory: Path) -> Callable[[dict[str, Any]], Any]:
    """A task that leaves the reason of a notice, and waits until it is over."""

    def work(facts: dict[str, Any]) -> dict[str, Any]:
        import iris_ray

        while not (directory / "finish").exists():
            if notice := iris_ray.preemption_notice():
                (directory / f"told-{facts['attempt']}-{facts['index']}").write_text(notice.reason)
                notice.saved()
            time.sleep(0.05)
        return facts

    return work


def test_job_on_empty_cluster_gets_slices_that_go_again(empty_box: KubernetesCluster) -> None:
    assert not empty_box.slice_names
    found = run_on_pod(slice_of_this_task, "v6e-16", num_slices=2, keep_warm=0)
    assert found == ["v6e-16-0"] * 4 + ["v6e-16-1"] * 4
    wait_until(lambda: not workers(empty_box), 90)
    wait_until(lambda: "TPU" not in ray.cluster_resources())


@pytest.mark.proof
def test_hosts_are_what_ray_detects_in_their_pods(empty_box: KubernetesCluster) -> None:
    ref = run_on_pod_ray.remote(slice_of_this_task, "v6e-8", keep_warm=3)
    assert result_of(ref) == ["v6e-8-0"]
    pod = empty_box.pod("v6e-8-0", 0)
    node = next(node for node in ray.nodes() if node["NodeID"] == empty_box.node_id("v6e-8-0", 0))
    assert {name: node["Resources"][name] for name in ("CPU", "TPU", "TPU-v6e-8-head", "v6e-8-0")} == {
        "CPU": 100,
        "TPU": 8,
        "TPU-v6e-8-head": 1,
        "v6e-8-0": 1,
    }
    assert node["Labels"]["ray.io/node-group"] == pod.group == "v6e-8"
    with pytest.raises(InvalidRequestError, match="minReplicas"):
        empty_box.add_slice("v6e-8")


@pytest.mark.proof
def test_missing_slices_are_as_many_replicas_and_why_tells(empty_box: KubernetesCluster) -> None:
    """There is no node to be had, so that the pods wait."""
    empty_box.kubernetes.set_stock(V6E, 0)
    with IrisClient() as client:
        jobs = []
        for missing in (1, 2, 3):
            need = ResourceSpec(device=tpu_device("v6e-16"))
            jobs.append(client.submit(slice_of_this_task, resources=need))
            wait_until(lambda: (replicas(empty_box), len(workers(empty_box))) == (missing, 4 * missing))  # noqa: B023
        wait_until(lambda: "GCE out of resources" in explanation(jobs[0].job_id))
        empty_box.kubernetes.set_quota(V6E, 8)
        empty_box.kubernetes.set_stock(V6E, None)  # and Kubernetes asks again
        wait_until(lambda: "GCE quota exceeded" in explanation(jobs[0].job_id))
        for job in jobs:
            job.cancel()
    want_no_slices(empty_box)
    empty_box.kubernetes.set_quota(V6E, None)


@pytest.mark.proof
def test_preempted_spot_slice_gives_notice_and_another_comes(empty_box: KubernetesCluster, trace: Trace) -> None:
    ref = run_on_pod_ray.remote(trace.gang(saves_when_told(trace.directory)), "v6e-16", keep_warm=0)
    first = trace.wait_for_tasks(4, timeout_s=90)
    preemption = empty_box.preempt_slice(first[0]["slice"])
    second = trace.wait_for_tasks(4, attempt=2, timeout_s=90)
    assert preemption.wait(20)
    told = [path.read_text() for path in trace.directory.glob("told-1-*")]
    assert len(told) == 4
    assert all("the pod ends" in reason for reason in told)
    trace.finish()
    assert [one["attempt"] for one in result_of(ref)] == [2] * 4
    view = job_view(second[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)


@pytest.mark.long
def test_new_image_reaches_slices_whose_pods_are_deleted(empty_box: KubernetesCluster, trace: Trace) -> None:
    """A changed image alone leaves pods as they are. A deleted pod gives its tasks notice, and the job moves."""
    ref = run_on_pod_ray.remote(trace.gang(saves_when_told(trace.directory)), "v6e-8", keep_warm=0)
    (first,) = trace.wait_for_tasks(1, timeout_s=90)
    changed = json.loads(json.dumps(empty_box.kubernetes.raycluster()).replace("iris-ray:1", "iris-ray:2"))
    empty_box.kubernetes.apply(changed)
    time.sleep(3)
    (before,) = workers(empty_box)
    assert before["spec"]["containers"][0]["image"].endswith("iris-ray:1")
    empty_box.kubernetes.delete_pod(before["metadata"]["name"])
    (second,) = trace.wait_for_tasks(1, attempt=2, timeout_s=90)
    assert "the pod ends" in (trace.directory / "told-1-0").read_text()
    images = {pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"] for pod in workers(empty_box)}
    assert images[empty_box.pod(second["slice"], 0).name].endswith("iris-ray:2")
    trace.finish()
    assert result_of(ref)[0]["attempt"] == 2
    assert job_view(first["job"]).failures == 0
