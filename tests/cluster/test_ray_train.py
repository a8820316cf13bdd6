"""Slices that Ray Train and `ray.util.tpu` hold are other work to iris_ray: it waits for them and never breaks them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray import IrisClient, get_job_info, run_on_pod, run_on_pod_ray
from iris_ray.testing import SimulatedCluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

tpu = pytest.importorskip("ray.util.tpu", reason="needs a newer Ray")


def slice_name() -> str:
    me = get_job_info()
    assert me is not None
    return me.slice_name


class Holder:
    """A process on a host of a slice of somebody else's."""

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_labels()["ray.io/tpu-slice-name"])


@contextmanager
def held_slice() -> Iterator[list[Any]]:
    """A slice that is reserved as Ray Train reserves it, with an actor on each host."""
    held = tpu.slice_placement_group(topology="2x2x2", accelerator_version="v4")
    group = held.placement_group
    try:
        ray.get(group.ready(), timeout=45)  # slices that a job has left would stay warm for a minute
        strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(held.num_hosts)]
        remote = ray.remote(num_cpus=0, resources={"TPU": 4})(Holder)
        actors = [remote.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        ray.get([actor.where.remote() for actor in actors], timeout=60)
        yield actors
    finally:
        held.shutdown()


def where(actors: list[Any]) -> set[str]:
    return set(ray.get([actor.where.remote() for actor in actors], timeout=30))


def why_waits(name: str) -> str:
    job = next(job for job in reversed(IrisClient().list_jobs()) if job.name == name)
    return str(job.waiting)


def test_held_slice_is_left_alone_and_used_afterwards(cluster: SimulatedCluster) -> None:
    with held_slice() as actors:
        (taken,) = where(actors)
        assert set(run_on_pod(slice_name, "v4-16", num_slices=2)) == set(cluster.slice_names) - {taken}
        ref = run_on_pod_ray.remote(slice_name, "v4-16", num_slices=3)
        wait_until(lambda: "in use outside iris_ray" in why_waits("slice_name"))
        time.sleep(3)  # some cycles of the Controller
        assert where(actors) == {taken}
    assert set(ray.get(ref, timeout=90)) == set(cluster.slice_names)


def test_slices_that_jobs_have_left_can_be_reserved(cluster: SimulatedCluster) -> None:
    assert set(run_on_pod(slice_name, "v4-16", num_slices=3)) == set(cluster.slice_names)
    with held_slice() as actors:
        assert where(actors) <= set(cluster.slice_names)


def train(config: dict[str, str]) -> None:
    folder = Path(config["folder"])
    (folder / f"{ray.train.get_context().get_world_rank()}").write_text(
        ray.get_runtime_context().get_node_labels()["ray.io/tpu-slice-name"]
    )
    while not (folder / "finish").exists():
        time.sleep(0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of Ray Data itself
def test_job_waits_for_jax_trainer_and_does_not_disturb_it(cluster: SimulatedCluster, tmp_path: Path) -> None:
    for package in ("pandas", "pyarrow"):
        pytest.importorskip(package, reason="Ray Train needs it: make marin has it")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    trainer = JaxTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(use_tpu=True, num_workers=2, topology="2x2x2", accelerator_type="TPU-V4"),
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"), worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}}
        ),
    )
    ends: list[Any] = []
    thread = threading.Thread(target=lambda: ends.append(trainer.fit()), daemon=True)
    thread.start()
    try:
        wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"), 120)
        taken = {(tmp_path / rank).read_text() for rank in "01"}
        assert len(taken) == 1
        assert set(run_on_pod(slice_name, "v4-16", num_slices=2)) == set(cluster.slice_names) - taken
        ref = run_on_pod_ray.remote(slice_name, "v4-16", num_slices=3)
        wait_until(lambda: "in use outside iris_ray" in why_waits("slice_name"))
    finally:
        (tmp_path / "finish").touch()
        thread.join(120)
    assert ends[0].error is None
    assert set(ray.get(ref, timeout=120)) == set(cluster.slice_names)
