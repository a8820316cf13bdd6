"""Real Ray nodes beside an emulated Cloud TPU API: whose fault a loss was, and demand for slices that are not there."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
from google.cloud import tpu_v2

from iris_ray import run_on_pod_ray
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.calls.ray_internals import waiting_placement_groups
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.capacity import autoscaler as autoscaler_demand
from iris_ray.capacity.autoscaler import NAME_PREFIX, AutoscalerDemand
from iris_ray.capacity.calls import CapacityCalls
from iris_ray.client.connection import current_user
from iris_ray.settings import TEST_CLOUD_TPU_ENDPOINT
from iris_ray.testing import SimulatedCluster
from iris_ray.testing.cloud_tpu_server import CloudTpuServer
from tests.conftest import Terminal, shared
from tests.support.clusters import Clusters, Shape
from tests.support.gangs import Trace, all_jobs, job_view, result_of, the_controller
from tests.support.proofs import in_long
from tests.support.waiting import wait_until

HEAD = "TPU-v4-16-head"
NodeState = tpu_v2.Node.State


@pytest.fixture(scope="module")
def provider(clusters: Clusters) -> Iterator[CloudTpuServer]:
    with CloudTpuServer() as running:
        yield running
        clusters.end()  # its Controller asks this server


@pytest.fixture(scope="module")
def cloud_cluster(clusters: Clusters, provider: CloudTpuServer) -> Iterator[SimulatedCluster]:
    """Two v4-16 slices whose Controller asks the provider, and shows the autoscaler what is missing."""

    @contextmanager
    def start() -> Iterator[SimulatedCluster]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TEST_CLOUD_TPU_ENDPOINT, provider.address)
            with SimulatedCluster({"v4-16": 2}, quiet=True) as running:
                settings = f"--setting=cloud_tpu={provider.location}", "--setting=autoscaler_demand=always"
                iris_ray("cluster", "controller", "start", "--address", running.address, *settings)
                yield running

    yield from shared(clusters, Shape("cloud", start, slices=2))


def missing() -> list[tuple[str, int]]:
    """The types and numbers of the slices that waiting gangs miss."""
    return [(one.tpu_type, one.missing) for one in the_controller().ask(CapacityCalls.demand) if one.missing]


def iris_ray(*args: str) -> str:
    """What a command prints; its errors, too."""
    command = [sys.executable, "-m", "iris_ray", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def demand_groups() -> list[str]:
    """States of the placement groups that stand for missing slices."""
    table = ray.util.placement_group_table().values()
    return [group["state"] for group in table if group["name"].startswith(NAME_PREFIX) and group["state"] != "REMOVED"]


def gang_demand() -> list[dict[str, float]]:
    """What Ray's autoscaler gets to see."""
    return [bundle for bundles in waiting_placement_groups().values() for bundle in bundles]


@pytest.mark.parametrize(
    ("state", "outcome"), in_long((NodeState.PREEMPTED, "TpuPreempted"), (NodeState.REPAIRING, "TpuFailed"))
)
def test_unannounced_host_loss_is_judged_by_providers_word(
    cloud_cluster: SimulatedCluster,
    provider: CloudTpuServer,
    trace: Trace,
    terminal: Terminal,
    state: tpu_v2.Node.State,
    outcome: str,
) -> None:
    terminal.listen()
    ref = run_on_pod_ray.remote(trace.gang(), "v4-16", max_retries_failure=0)
    first = trace.wait_for_tasks(2, timeout_s=120)
    victim = first[0]["slice"]
    provider.add_node(victim)
    provider.set_node(victim, state)
    cloud_cluster.kill_host(victim, 1)
    cloud_cluster.add_slice("v4-16")
    trace.wait_for_tasks(2, attempt=2, timeout_s=120)
    trace.finish()
    ray.get(ref)
    view = job_view(first[0]["job"])
    assert (view.failures, view.preemptions) == (0, 1)
    line = wait_until(lambda: next((line for line in terminal.lines if " attempt 1 ended: " in line), None), 10)
    assert f"ended: {outcome}: " in line
    assert f"the provider says that its node is {state.name}" in line


@pytest.mark.long
def test_missing_slices_are_requested_from_autoscaler_until_they_come(
    cloud_cluster: SimulatedCluster, trace: Trace
) -> None:
    whole = sum(len(cloud_cluster.worker_ids(name)) == 2 for name in cloud_cluster.slice_names)
    running = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=whole)
    trace.wait_for_tasks(2 * whole, timeout_s=120)
    waiting = run_on_pod_ray.remote(lambda: "ran", "v4-16", num_slices=1)
    wait_until(lambda: missing() == [("v4-16", 1)])
    wait_until(lambda: len(gang_demand()) == 1)  # though the heads of the slices in use are free
    assert gang_demand()[0][HEAD] == 1
    time.sleep(3)
    assert demand_groups() == ["PENDING"]

    cloud_cluster.add_slice("v4-16")
    assert result_of(waiting) == ["ran"] * 2
    wait_until(lambda: not demand_groups() and not gang_demand())
    wait_until(lambda: ray.available_resources().get(HEAD) == ray.cluster_resources()[HEAD])
    trace.finish()
    ray.get(running)


def test_version_2_demand_is_served_by_no_present_slice(
    cloud_cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of slices in use are free, as jobs claim chips: without a selector Ray would give one of them."""
    monkeypatch.setattr(autoscaler_demand, "has_autoscaler_v2", lambda: True)
    demand, missing = AutoscalerDemand(), {"v4-16": [1]}
    there = dict.fromkeys(cloud_cluster.slice_names, ("v4-16", True))
    demand.update(missing, there)
    wait_until(lambda: gang_demand() == [{HEAD: 1.0}])
    time.sleep(2)
    assert demand_groups() == ["PENDING"]
    new = cloud_cluster.add_slice("v4-16")
    wait_until(lambda: demand_groups() == ["CREATED"])
    demand.update(missing, there | {new: ("v4-16", False)})  # its other hosts are still to come
    assert demand_groups() == []
    demand.update(missing, there | {new: ("v4-16", True)})  # and it was not for the job that waits
    assert demand_groups() == ["PENDING"]
    demand.update({}, there | {new: ("v4-16", True)})
    assert demand_groups() == []
    wait_until(lambda: ray.available_resources().get(HEAD) == ray.cluster_resources()[HEAD])


@pytest.mark.long
def test_demand_ends_with_job_and_controller(cloud_cluster: SimulatedCluster) -> None:
    ref = run_on_pod_ray.remote(lambda: None, "v5p-16", num_slices=3)
    wait_until(lambda: demand_groups() == ["PENDING"] * 3)
    controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    ray.kill(controller, no_restart=False)
    time.sleep(3)
    wait_until(lambda: demand_groups() == ["PENDING"] * 3)  # those of the process before were removed
    ray.kill(ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE), no_restart=True)
    wait_until(lambda: not demand_groups())
    iris_ray("cluster", "controller", "start", "--address", cloud_cluster.address)
    wait_until(lambda: demand_groups() == ["PENDING"] * 3)
    (job,) = [job for job in all_jobs() if not job.state.finished]
    the_controller().ask(ControllerInterface.cancel, job.job_id, "test", current_user())
    wait_until(lambda: not demand_groups())
    with pytest.raises(RuntimeError, match="cancelled"):
        ray.get(ref)


@pytest.mark.long
def test_provision_requests_missing_slice_and_cancels_with_job(
    cloud_cluster: SimulatedCluster, provider: CloudTpuServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TEST_CLOUD_TPU_ENDPOINT, provider.address)
    common = ["--tpu", "v6e-16", "--spot", "--runtime-version", "v2-alpha-tpuv6e", "--idle", "0"]
    too_few = ["cluster", "provision", *common, "--address", cloud_cluster.address, "--max", "2"]
    command = [*too_few[:-1], "3"]
    assert "would do nothing" in iris_ray(*command, "--dry-run")
    ref = run_on_pod_ray.remote(lambda: None, "v6e-16", num_slices=3)
    wait_until(lambda: missing() == [("v6e-16", 3)])
    dry = iris_ray(*command, "--dry-run")
    assert dry.count("would create iris-iris-v6e-16-") == 3
    assert "create" not in (dry := iris_ray(*too_few, "--dry-run")), "two are of no use"
    assert "would wait: gangs miss 3 more slices" in dry
    assert not provider.queued_states()

    iris_ray(*command, "--once")
    assert sorted(provider.queued_states().values()) == ["ACCEPTED"] * 3
    (spec,) = provider.queued(next(iter(provider.queued_states()))).tpu.node_spec
    assert f"ray start --address='{cloud_cluster.address}'" in spec.node.metadata["startup-script"]
    why = iris_ray("why", all_jobs()[-1].job_id, "--address", cloud_cluster.address)
    assert f"provisioner iris has asked for 3 in {provider.location.rpartition('/')[2]} (spot" in why
    assert "create" not in iris_ray(*command, "--once")

    (job,) = [job for job in all_jobs() if not job.state.finished]
    the_controller().ask(ControllerInterface.cancel, job.job_id, "test", current_user())
    iris_ray(*command, "--once")
    provider.advance()
    assert provider.queued_states() == {}
    with pytest.raises(RuntimeError, match="cancelled"):
        ray.get(ref)
