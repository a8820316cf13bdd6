"""Suspected hosts are tested before a gang returns to them."""

import asyncio

import pytest

from iris_ray.actors.pool.attempt import AT_ONCE_S
from iris_ray.preflight.calls import Link
from tests.support.hosts_in_process import Crash, Host, Task, returns_at_once
from tests.support.virtual_cluster import VirtualCluster, played


async def crashes_once(task: Task) -> str:
    await asyncio.sleep(2 * AT_ONCE_S)
    if task.info.attempt == 1 and task.info.task_index == 1:
        raise Crash("was killed by SIGSEGV")
    await asyncio.sleep(0.0 if task.info.attempt > 1 else 1_000.0)
    return task.info.slice_name


@played()
async def test_only_suspected_host_is_tested_before_gang_returns(cluster: VirtualCluster) -> None:
    results = cluster.run("job", (2,), crashes_once, max_retries_failure=1)
    tasks = await cluster.started("job", 4)
    names = [task.info.slice_name for task in tasks]
    assert await results == names, "it returns to the same slices"
    await cluster.run("next", (2,), returns_at_once)
    tested = {name: [cluster.node(cluster.node_id(name, host)).tested for host in (0, 1)] for name in names}
    assert tested == {names[0]: [0, 1], names[2]: [0, 0]}


PROBLEMS = {
    "chips": ("its chip /dev/accel0 can't be opened", None),
    "late": (None, Link(2.0, 1e8)),
    "narrow": (None, Link(0.001, 1e3)),
}


@played()
@pytest.mark.parametrize("problem", PROBLEMS)
async def test_suspected_host_that_fails_its_test_is_replaced(cluster: VirtualCluster, problem: str) -> None:
    """It costs no more than the crash, and the host takes nothing for a while."""
    results = cluster.run("job", (1,), crashes_once, max_retries_failure=1)
    first, suspect = await cluster.started("job", 2)
    suspect.host.fails_test, first.host.link = PROBLEMS[problem]
    assert first.info.slice_name not in await results
    assert await cluster.charged("job") == (1, 0)
    (worker,) = [one for one in await cluster.workers() if one.node_id == suspect.host.node_id]
    assert (PROBLEMS[problem][0] or "its links to 1 other hosts are bad") in (worker.suspected or "")


@played()
async def test_suspected_host_that_never_answers_test_is_replaced(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(host: Host) -> None:
        await asyncio.sleep(10_000.0)

    monkeypatch.setattr(Host, "preflight", hangs)
    results = cluster.run("job", (1,), crashes_once, max_retries_failure=1)
    first, _ = await cluster.started("job", 2)
    assert first.info.slice_name not in await results
