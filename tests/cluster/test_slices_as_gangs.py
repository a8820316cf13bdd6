"""Slices that do not stop each other: one is killed, the others go on in their processes, and it joins again."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from iris_ray import IrisClient, get_job_info, run_on_pod_ray
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import job_view
from tests.support.waiting import wait_until

STEP_S = 0.05
TOLD_S = 0.2
"""How long others may stand still after they were told of a loss."""


def trains(directory: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that makes rounds until the file ``finish`` names the last one."""
    folder = str(directory)

    def train() -> list[dict[str, Any]]:
        import numpy as np

        import iris_ray.jax
        import iris_ray.outer
        from iris_ray.actors.protocol.task_files import TaskFiles

        me, files = get_job_info(), TaskFiles.of_this_task()
        assert me is not None
        assert files is not None
        rounds: list[dict[str, Any]] = []
        log = Path(folder) / f"rounds-{me.task_index}-{me.attempt}.jsonl"
        finish = Path(folder) / "finish"
        with iris_ray.outer.join({"sum": np.zeros(1000)}, lambda s, mean: {"sum": s["sum"] + mean}) as group:
            while not group.is_over and not (finish.exists() and group.round >= int(finish.read_text())):
                time.sleep(STEP_S)
                before, number = time.time(), group.round
                group.advance(np.full(1000, me.slice_id + 1.0))
                told = files.membership.stat().st_mtime
                facts = {
                    **{"round": group.round, "after": number, "sum": float(group.state["sum"][0]), "pid": os.getpid()},
                    **{"members": group.members, "began": before, "ended": time.time(), "told": told},
                    "megascale": [name for name in os.environ if name.startswith("MEGASCALE_")],
                }
                rounds.append(facts)
                with log.open("a") as file:
                    file.write(json.dumps(facts) + "\n")
        return rounds

    return train


def rounds_of(directory: Path, task: int, attempt: int) -> list[dict[str, Any]]:
    path = directory / f"rounds-{task}-{attempt}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def test_killed_slice_stops_nobody_and_joins_again(cluster: SimulatedCluster, tmp_path: Path) -> None:
    reference = run_on_pod_ray.remote(
        trains(tmp_path), "v4-16", num_slices=2, failure_domain="slice", preload=["jax", "iris_ray.outer"]
    )
    job_id = run_on_pod_ray.job_id(reference)
    wait_until(lambda: len(rounds_of(tmp_path, 0, 1)) > 20 and len(rounds_of(tmp_path, 2, 1)) > 20)
    assert rounds_of(tmp_path, 0, 1)[-1]["members"] == [0, 1]
    killed_at = time.time()
    lost = IrisClient().list_tasks(job_id)[2].group
    assert lost is not None
    cluster.preempt_slice(lost)
    wait_until(lambda: len(rounds_of(tmp_path, 2, 2)) > 10 and len(rounds_of(tmp_path, 3, 2)) > 10)
    last = rounds_of(tmp_path, 0, 1)[-1]["round"] + 40
    (tmp_path / "finish").write_text(str(last))
    first, second, returned, _ = ray.get(reference)

    assert {one["pid"] for one in first} == {rounds_of(tmp_path, 0, 1)[0]["pid"]}
    for process in (first, second):
        assert [one["round"] for one in process] == list(range(process[0]["round"], last + 1)), (
            "none again, none left out"
        )
    assert (first[-1]["sum"], first[-1]["members"]) == (returned[-1]["sum"], (0, 1))
    assert not any(one["megascale"] for one in first)
    state = {one["round"]: one["sum"] for one in first}
    assert all(state[one["round"]] == one["sum"] for one in returned)
    at_the_loss = next(one for one in first if one["ended"] > killed_at and one["members"] == (0,))
    assert at_the_loss["ended"] - max(at_the_loss["told"], at_the_loss["began"]) < TOLD_S
    assert [job_view(job_id, gang).preemptions for gang in (0, 1)] == [0, 1]
