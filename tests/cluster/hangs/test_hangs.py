"""A gang that hangs, on real nodes: JAX programs whose processes wait for each other in every step."""

import functools
import os
import signal
import time
from pathlib import Path

import pytest

import iris_ray.jax
from iris_ray import get_job_info, heartbeat, release, run_on_pod
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.pool.attempt import AT_ONCE_S
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris, iris_json

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CULPRITS = {1: 2, 2: 3, 3: 0}
"""The task at fault, by attempt."""
SAID = {1: "its process is stopped", 2: "reads_slowly", 3: "loops_for_ever"}


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def reads_slowly() -> None:
    time.sleep(60.0)


def loops_for_ever() -> None:
    while True:
        pass


FAULTS = {1: stops, 2: reads_slowly, 3: loops_for_ever}


def trains() -> tuple[str, int]:
    """Make steps with an all-reduce; in step 5 of the first attempts one task does something else."""
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    iris_ray.jax.initialize()
    me = get_job_info()
    assert me is not None
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",))
    ones = jax.make_array_from_callback(
        (count,), jax.NamedSharding(mesh, jax.P("all")), lambda index: np.ones(count)[index]
    )
    total = jax.jit(lambda values: values.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))
    for step in range(10):
        heartbeat(step)
        if step == 5 and CULPRITS.get(me.attempt) == me.task_index:
            FAULTS[me.attempt]()
        assert float(total(ones)) == count
    return me.slice_name, me.worker_id


def test_culprit_of_each_hang_is_named_and_avoided(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """Each attempt has another fault on another host."""
    run_on_pod(trains, "v4-16", num_slices=2, max_retries_failure=3, stall_timeout=20.0, keep_warm=0, preload=["jax"])
    controller = ControllerConnection()
    job = controller.ask_all(ControllerInterface.list_jobs)[-1].job_id
    tasks = controller.ask_all(ControllerInterface.list_tasks, job)
    for attempt, culprit in CULPRITS.items():
        past = tasks[culprit].attempts[attempt - 1]
        assert SAID[attempt] in (past.error or ""), past.error
        assert "holds the others up" in (past.error or "")
        after = tasks[0].attempts[attempt], tasks[2].attempts[attempt]
        assert past.group not in {one.group for one in after}, "a third slice is free"
    told = " ".join(event["what"] for event in iris_json(cluster, "job", "events", job))
    assert all(words in told for words in SAID.values())
    assert "holds the others up" in iris(cluster, "job", "status", job).stdout


def crashes_once(chip: Path | None, notes: Path) -> str:
    """Crash in the first attempt on host 1, whose chip does not open any more if it is given."""
    me = get_job_info()
    assert me is not None
    if me.attempt == 1 and me.task_index == 1:
        (notes / "first").write_text(me.slice_name)
        if chip is not None:
            chip = Path(os.environ["IRIS_RAY_HOST_DIR"]) / chip
            chip.unlink()
            chip.mkdir()
        time.sleep(2 * AT_ONCE_S)  # else the host counts as broken before
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.0 if me.attempt > 1 else 1000.0)
    return me.slice_name


@pytest.mark.parametrize("breaks", [False, True])
def test_suspected_host_is_tested_before_gang_returns(cluster: SimulatedCluster, breaks: bool, tmp_path: Path) -> None:
    release()
    chip = Path("dev", "accel0")
    task = functools.partial(crashes_once, chip if breaks else None, tmp_path)
    names = run_on_pod(task, "v4-16", max_retries_failure=1, max_retries_preemption=0, keep_warm=600)
    first = (tmp_path / "first").read_text()
    if breaks:
        broken = cluster.host_dir(first, 1) / chip
        broken.rmdir()
        broken.touch()
    assert (first in names) != breaks
    job = ControllerConnection().ask_all(ControllerInterface.list_jobs)[-1]
    assert (job.failures, job.preemptions) == (1, 0)
    release()
