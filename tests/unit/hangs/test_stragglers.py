"""Which tasks of a gang are named as slow."""

import asyncio

from iris_ray.hangs.stragglers import MOST_NAMED, Speeds
from iris_ray.model.outcomes import TaskKey
from tests.support.hosts_in_process import Task
from tests.support.virtual_cluster import VirtualCluster, played

LOOK_S = 5.0


def after(minutes: float, speeds: dict[int, float], changed: dict[int, float] | None = None) -> list[int]:
    """Which hosts are named if they make so many steps a second for some minutes, and others in the second half."""
    seen, steps = Speeds(), dict.fromkeys(speeds, 0.0)
    looks = round(minutes * 60.0 / LOOK_S)
    for look in range(looks + 1):
        seen.note({TaskKey(0, host): int(done) for host, done in steps.items()}, look * LOOK_S)
        now = changed if changed is not None and look >= looks / 2 else speeds
        steps = {host: done + LOOK_S * now[host] for host, done in steps.items()}
    return [straggler.task.host_index for straggler in seen.stragglers()]


def test_slow_task_is_named_after_a_minute() -> None:
    speeds = {0: 2.0, 1: 2.0, 2: 1.0, 3: 1.9}
    assert after(0.9, speeds) == []
    assert after(1.1, speeds) == [2]
    for quarters in range(5, 40):
        assert after(quarters / 4, speeds) == [2], "it stays named"


def test_equally_slow_tasks_and_pairs_are_not_named() -> None:
    assert after(5.0, {0: 2.0, 1: 1.9, 2: 1.8}) == []
    assert after(5.0, {0: 2.0, 1: 0.1}) == []
    assert after(5.0, dict.fromkeys(range(4), 0.0)) == []


def test_slowest_tasks_come_first_and_are_limited() -> None:
    speeds = {host: 10.0 if host < 20 else 0.1 * host for host in range(30)}
    assert after(5.0, speeds) == [20, 21, 22, 23, 24][:MOST_NAMED]


def test_newly_slow_task_is_named_and_recovered_one_dropped() -> None:
    even, uneven = dict.fromkeys(range(4), 2.0), {0: 2.0, 1: 2.0, 2: 2.0, 3: 0.5}
    assert after(120.0, even, changed=uneven) == [3]
    assert after(120.0, uneven, changed=even) == []


@played()
async def test_users_see_slow_task_while_job_runs(cluster: VirtualCluster) -> None:
    async def work(task: Task) -> int:
        each = 4.0 if (task.info.slice_id, task.info.worker_id) == (1, 0) else 1.0
        for step in range(round(300.0 / each)):
            task.heartbeat(step)
            await asyncio.sleep(each)
        return 0

    results = cluster.run("job", (2,), work)
    await cluster.runs("job", 4)
    await asyncio.sleep(120.0)
    (named,) = (await cluster.status("job")).stragglers
    assert named.startswith("slice 1 (")
    assert "worker 0: 0.25 steps/s, the median is 1" in named
    await results
