"""One process is killed again and again at random moments under random jobs: no job pays for it."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from iris_ray import run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import Crowd, CrowdOfTasks, Trace, alive, controller_pid, job_view, kill_controller, result_of
from tests.support.proofs import in_long, in_proofs, in_test
from tests.support.waiting import wait_until

SEED = 20_261_121

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.proof
@pytest.mark.parametrize("round_number", range(2))
def test_host_killed_at_any_moment_ends_in_the_right_results(
    cluster: SimulatedCluster, trace: Trace, round_number: int
) -> None:
    """Before, during and after a launch, cold and warm; every task of the last attempt returned, and no other."""
    rng = random.Random(SEED + round_number)

    def work(facts: dict[str, Any]) -> tuple[int, int]:
        time.sleep(1.0)
        return facts["attempt"], facts["index"]

    ref = run_on_pod_ray.remote(trace.gang(work), "v4-16", num_slices=2, max_retries_failure=0)
    time.sleep(rng.uniform(0.0, 4.0))
    victim, worker_id = rng.choice(cluster.slice_names), rng.randrange(2)
    if worker_id in cluster.worker_ids(victim):
        cluster.kill_host(victim, worker_id)
    results = result_of(ref)
    last = results[0][0]
    assert results == [(last, i) for i in range(4)]
    started = trace.starts(last)
    assert len({start["slice"] for start in started}) == 2
    view = job_view(started[0]["job"])
    assert view.failures == 0
    assert view.preemptions <= 1
    wait_until(lambda: not any(alive(start["pid"]) for start in trace.starts()), 20)


GANGS, AND_TASKS = (Crowd,), (Crowd, CrowdOfTasks)


@pytest.mark.parametrize(
    ("crowd_types", "kills"),
    [*in_test((GANGS, 2)), *in_proofs((AND_TASKS, 3)), *in_long((AND_TASKS, 20))],
    ids=["gangs", "and tasks", "and tasks, long"],
)
def test_controller_killed_again_and_again_costs_no_job_anything(
    cluster: SimulatedCluster, tmp_path: Path, crowd_types: tuple[type[Crowd], ...], kills: int
) -> None:
    """Every job has the right result and counts; independent tasks are charged for their own failures alone."""
    for _ in range(2 if CrowdOfTasks in crowd_types else 0):
        cluster.add_slice("v4-8")
    directories = [tmp_path / crowd_type.__name__ for crowd_type in crowd_types]
    for directory in directories:
        directory.mkdir()
    crowds = [crowd_type(directory) for crowd_type, directory in zip(crowd_types, directories, strict=True)]
    for _ in range(kills):
        for crowd in crowds:
            crowd.fill_up()
        time.sleep(crowds[0].chance.uniform(0.5, 4.0))
        kill_controller()
        for crowd in crowds:
            crowd.check_ended()
    for crowd in crowds:
        crowd.check_all()


@pytest.mark.parametrize("kills", [*in_proofs(3), *in_long(20)])
def test_gcs_killed_again_and_again_costs_no_job_anything(
    cluster: SimulatedCluster, tmp_path: Path, kills: int
) -> None:
    """Every job ends with the right result and the right counts.

    With every new GCS Ray begins anew with all actors that have not started yet: kills that come faster than processes
    start would only heap up processes for nobody. So the slices are warm before the first one, and some task starts
    between two.
    """
    assert run_on_pod(lambda: 1, "v4-16", num_slices=3, keep_warm=600) == [1] * 6
    crowd = Crowd(tmp_path)
    for _ in range(kills):
        crowd.keep_busy_until_a_task_starts()
        time.sleep(crowd.chance.uniform(0.0, 3.0))
        cluster.restart_gcs()  # kills it first
        controller_pid()
    crowd.check_all()
