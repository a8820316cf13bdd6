"""JAX programs keep steps in the memory of simulated hosts, lose slices at any moment, and go on with the same bits."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import run_on_pod_ray
from iris_ray.state.attempt_ends import QUICK_ENDS_ARE_FAILURES
from iris_ray.testing import SimulatedCluster
from tests.support.proofs import a_seed, in_long, in_proofs, in_test
from tests.support.waiting import wait_until

PRELOAD = ["iris_ray.checkpoint"]
ROWS, COLUMNS = 48, 1000


def training(directory: str, sharded: bool, steps: int) -> Callable[[], dict[str, Any]]:
    """A program whose state after each step follows from the seed; each process checks what it has restored."""

    def train() -> dict[str, Any]:
        import os

        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        import iris_ray
        import iris_ray.jax
        from iris_ray.checkpoint import MemoryCheckpointer

        iris_ray.jax.initialize()
        me = iris_ray.get_job_info()
        assert me is not None
        devices = np.array(jax.devices()).reshape(me.num_slices, -1)
        mesh = jax.sharding.Mesh(devices, ("slice", "host"))
        over = NamedSharding(mesh, PartitionSpec("slice" if sharded else None, "host"))

        def state(step: int) -> dict[str, Any]:
            whole = np.random.default_rng(step).normal(size=(ROWS, COLUMNS)).astype(np.float32)
            array = jax.make_array_from_callback(whole.shape, over, lambda index: whole[index])
            return {"array": array, "key": jax.random.key(step), "step": step}

        def note(**what: Any) -> None:
            if me.task_index == 0:
                line = {"attempt": me.attempt, "slices": me.num_slices, "slice": me.slice_name, **what}
                with open(f"{directory}/lines", "a") as lines:
                    lines.write(json.dumps(line) + "\n")

        with MemoryCheckpointer() as memory:
            found = memory.restore(state(0))
            start, restored = found or (0, state(0))
            assert restored["step"] == start
            for got, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state(start)), strict=True):
                if isinstance(got, jax.Array) and got.shape:
                    for one, other in zip(got.addressable_shards, expected.addressable_shards, strict=True):
                        assert (np.asarray(one.data) == np.asarray(other.data)).all()
            note(start=start)
            for step in range(start + 1, steps + 1):
                iris_ray.heartbeat(step)
                now = state(step)
                notice = iris_ray.jax.agreed_notice(step)
                memory.save(step, now, now=notice is not None)
                note(step=step)
                if notice is not None:
                    assert memory.outlives(notice)
                    notice.saved()
                time.sleep(0.05)
            memory.wait()
        return {"start": start, "attempt": me.attempt, "slices": me.num_slices}

    return train


def lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "lines"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def latest(directory: Path, attempt: int) -> int:
    return max((line.get("step", 0) for line in lines(directory) if line["attempt"] == attempt), default=0)


def wait_for(directory: Path, attempt: int, step: int) -> None:
    wait_until(lambda: latest(directory, attempt) >= step, 120)


def check(directory: Path, most_lost: int) -> None:
    """No attempt began more than so many steps before the last one that the attempt before it had done."""
    starts = {line["attempt"]: line["start"] for line in lines(directory) if "start" in line}
    for attempt, start in starts.items():
        if attempt > 1 and attempt - 1 in starts:
            assert start >= latest(directory, attempt - 1) - most_lost, lines(directory)


CASES = [*in_test((True, 1)), *in_proofs((True, 2), (False, 2)), *in_long((True, 12), (False, 12))]


@pytest.mark.parametrize(("sharded", "kills"), CASES)
def test_lost_slices_cost_a_step_or_two_and_no_bit(
    cluster: SimulatedCluster, tmp_path: Path, sharded: bool, kills: int
) -> None:
    """Slices are killed at random moments, also during saves, which are most of each step."""
    chance = random.Random(a_seed(38))
    quick = max(0, kills - QUICK_ENDS_ARE_FAILURES)  # they may be heard of before Ray knows that the host is lost
    ref = run_on_pod_ray.remote(
        training(str(tmp_path), sharded, 80 * kills), "v4-16", num_slices=2, max_retries_failure=quick, preload=PRELOAD
    )
    for attempt in range(1, kills + 1):
        wait_for(tmp_path, attempt, 5 * attempt)
        time.sleep(chance.random() / 5)
        where = {line["slice"] for line in lines(tmp_path) if line["attempt"] == attempt}
        cluster.preempt_slice(where.pop())
        wait_for(tmp_path, attempt + 1, 1)
        cluster.add_slice("v4-16")
    results = ray.get(ref)
    assert {result["attempt"] for result in results} == {kills + 1}
    assert results[0]["start"] > 0
    check(tmp_path, most_lost=2)


@pytest.mark.proof
def test_noticed_slice_costs_no_step(cluster: SimulatedCluster, tmp_path: Path) -> None:
    ref = run_on_pod_ray.remote(
        training(str(tmp_path), True, 60), "v4-16", num_slices=2, max_retries_failure=0, preload=PRELOAD
    )
    wait_for(tmp_path, 1, 5)
    cluster.preempt_slice(lines(tmp_path)[-1]["slice"], notice_s=60)
    assert ray.get(ref)[0]["attempt"] == 2
    check(tmp_path, most_lost=0)


@pytest.mark.proof
def test_gang_of_fewer_slices_goes_on_from_memory(cluster: SimulatedCluster, tmp_path: Path) -> None:
    """Three slices, of which one is lost without a replacement: the state is put together for two."""
    ref = run_on_pod_ray.remote(
        training(str(tmp_path), True, 60), "v4-16", num_slices=[2, 3], max_retries_failure=0, preload=PRELOAD
    )
    wait_for(tmp_path, 1, 5)
    cluster.preempt_slice(lines(tmp_path)[-1]["slice"])
    results = ray.get(ref)
    assert results[0]["start"] > 0
    check(tmp_path, most_lost=2)
