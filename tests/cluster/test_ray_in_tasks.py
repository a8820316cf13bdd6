"""A task that uses Ray: it joins the cluster when it first needs it, as if it had been there from the beginning."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import ray

from iris_ray import get_job_info, run_on_pod
from iris_ray.testing import SimulatedCluster
from tests.support.waiting import wait_until


class CallCounter:
    """Counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def call(self) -> int:
        self.calls += 1
        return self.calls


Counter: Any = ray.remote(num_cpus=0)(CallCounter)


def looks_around() -> dict[str, Any]:
    found: dict[str, Any] = {"connected at first": ray.is_initialized()}
    before = signal.getsignal(signal.SIGTERM)
    found["hosts"] = len([node for node in ray.nodes() if "TPU" in node["Resources"]])  # the first call of Ray
    context = ray.get_runtime_context()
    found |= {
        "connected": ray.is_initialized(),
        "namespace": context.namespace,
        "node": context.get_node_id(),
        "same handler": signal.getsignal(signal.SIGTERM) is before,
        "of a child": ray.get(ray.remote(num_cpus=0)(lambda: os.environ.get("LC_OF_THE_USER")).remote()),
    }
    return found


def test_task_joins_the_drivers_cluster_at_its_first_call_of_ray(cluster: SimulatedCluster) -> None:
    function = ray.remote(runtime_env={"env_vars": {"LC_OF_THE_USER": "hers"}})(looks_around)
    found = run_on_pod(function, "v4-16", max_retries_failure=0)
    nodes = {one.pop("node") for one in found}
    assert found == 2 * [
        {
            "connected at first": False,
            "hosts": 6,
            "connected": True,
            "namespace": ray.get_runtime_context().namespace,
            "same handler": True,
            "of a child": "hers",
        }
    ]
    assert nodes in [{cluster.node_id(name, worker) for worker in range(2)} for name in cluster.slice_names]


@pytest.mark.parametrize(
    "address", [None, "auto", pytest.param("its own", marks=pytest.mark.proof)], ids=["none", "auto", "own"]
)
def test_users_own_ray_init_joins_the_same_cluster(cluster: SimulatedCluster, address: str | None) -> None:
    gcs_address = ray.get_runtime_context().gcs_address
    asked = gcs_address if address == "its own" else address

    def initialises() -> tuple[str, str]:
        ray.init(address=asked, namespace="another", ignore_reinit_error=True)
        context = ray.get_runtime_context()
        return context.gcs_address, context.namespace

    assert run_on_pod(initialises, "v4-16", max_retries_failure=0) == 2 * [(gcs_address, "another")]


def test_references_and_actors_of_the_driver_work_in_its_tasks(cluster: SimulatedCluster) -> None:
    """They can be unpickled only by a process that has joined the cluster."""
    value, counter = ray.put("a value"), Counter.remote()

    def uses_both() -> tuple[str, int]:
        return ray.get(value), ray.get(counter.call.remote())

    results = run_on_pod(uses_both, "v4-16", max_retries_failure=0)
    assert sorted(results) == [("a value", 1), ("a value", 2)]


def test_actors_of_a_task_have_its_namespace_and_end_with_it(cluster: SimulatedCluster) -> None:
    def makes_actors() -> int:
        info = get_job_info()
        assert info is not None
        name = f"named by task {info.task_index}"  # it ends with this task: the other one must not use it
        mine = Counter.options(name=name).remote()
        stays = Counter.options(name="detached by a task", lifetime="detached", get_if_exists=True).remote()
        return max(ray.get([mine.call.remote(), stays.call.remote()]))

    assert min(run_on_pod(makes_actors, "v4-16", max_retries_failure=0)) >= 1
    detached = ray.get_actor("detached by a task")
    assert ray.get(detached.call.remote()) == 3

    def is_gone(name: str) -> bool:
        try:
            ray.get_actor(name)
        except ValueError:
            return True
        return False

    wait_until(lambda: all(is_gone(f"named by task {index}") for index in range(2)))
    ray.kill(detached)


def test_output_of_nested_tasks_is_shown_once(cluster: SimulatedCluster, capfd: pytest.CaptureFixture[str]) -> None:
    def prints() -> None:
        @ray.remote(num_cpus=0)
        def nested() -> None:
            print("said by a nested task")

        print("said by the task")
        ray.get(nested.remote())

    run_on_pod(prints, "v4-16", max_retries_failure=0)
    seen = ""

    def shown() -> bool:
        nonlocal seen
        out, err = capfd.readouterr()
        seen += out + err
        return seen.count("said by a nested task") >= 2 and seen.count("said by the task") >= 2

    wait_until(shown)
    assert "Connecting to existing Ray cluster" not in seen


def test_programs_that_a_task_starts_join_by_themselves(cluster: SimulatedCluster) -> None:
    gcs_address = ray.get_runtime_context().gcs_address

    def starts_a_program() -> str:
        code = f"import ray; ray.init('{gcs_address}', logging_level='ERROR'); print(len(ray.nodes()))"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    found = run_on_pod(starts_a_program, "v4-16", max_retries_failure=0)
    assert len({*found}) == 1
