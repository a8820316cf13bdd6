"""A job does not run on hosts whose iris_ray does not go with the pool's: it tries others, or hears both versions."""

import asyncio
import time
from itertools import product
from typing import Any

import pytest

from iris_ray.actors.host.chips import NotFree
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.version import PROTOCOL_VERSION, package_directory
from iris_ray.errors import VersionMismatchError
from iris_ray.state.quarantine import AVOIDED_S
from tests.support.hosts_in_process import Task
from tests.support.ray_in_process import HEAD_NODE
from tests.support.virtual_cluster import VirtualCluster, played

NEWER: dict[str, Any] = {"version": "9.9.0", "protocol": PROTOCOL_VERSION + 1, "package": "/image/iris_ray"}
OLDER = NEWER | {"version": "0.0.9", "protocol": PROTOCOL_VERSION - 1}
STRANGER = NotFree("its chips are held by pid 1 (python3)")
EVERYWHERE = tuple(product(("v4-16-0", "v4-16-1", "v4-16-2"), (0, 1)))


def install(cluster: VirtualCluster, versions: dict[str, Any], *hosts: tuple[str, int]) -> None:
    for host in hosts:
        cluster.node(cluster.node_id(*host)).versions = versions


async def where(task: Task) -> str:
    return task.info.slice_name


@played()
async def test_hosts_of_other_protocol_refuse_with_both_versions(cluster: VirtualCluster) -> None:
    install(cluster, NEWER, *EVERYWHERE)
    with pytest.raises(VersionMismatchError) as refused:
        await cluster.run("job", (1,), where, max_retries_failure=5)
    ours = f"(protocol {PROTOCOL_VERSION}) from {package_directory()} on"
    theirs = f"is iris_ray 9.9.0 (protocol {PROTOCOL_VERSION + 1}) from /image/iris_ray on"
    for said in (ours, theirs, "host 0", "install iris_ray 9.9.0 here", "tried in 3 places"):
        assert said in str(refused.value)
    assert cluster.tasks == []
    assert (await cluster.view("job")).attempt == 4


@played(slices=1)
async def test_only_slice_of_other_protocol_is_tried_once(cluster: VirtualCluster) -> None:
    install(cluster, NEWER, *EVERYWHERE[:2])
    began = time.monotonic()
    with pytest.raises(VersionMismatchError, match=r"v4-16-0 host 0 is iris_ray 9\.9\.0"):
        await cluster.run("job", (1,), where)
    assert time.monotonic() - began < 5.0


@played()
@pytest.mark.parametrize("host", [0, 1])
async def test_gang_starts_where_versions_fit(cluster: VirtualCluster, host: int) -> None:
    """The host of the other version is not at fault: callers of that version may use it."""
    install(cluster, OLDER, ("v4-16-0", host), ("v4-16-1", host))
    assert await cluster.run("before", (1,), where, max_retries_failure=5) == ["v4-16-2"] * 2
    assert await cluster.charged("before") == (0, 0)
    assert await cluster.run("job", (1,), where, keep_warm=600.0) == ["v4-16-2"] * 2
    assert {worker.draining for worker in await cluster.workers()} == {None}
    assert not any("quarantine" in name for worker in await cluster.workers() for name in worker.attributes)


@played(slices=8)
async def test_gang_finds_its_version_during_a_rolling_upgrade(cluster: VirtualCluster) -> None:
    """The first half of the slices is old. Nothing counts against the job, and it does not pause for long."""
    old, new = ([f"v4-16-{number}" for number in numbers] for numbers in (range(4), range(4, 8)))
    install(cluster, OLDER, *product(old, (0, 1)))
    began = time.monotonic()
    assert set(await cluster.run("job", (1, 2, 4), where)) <= set(new)
    assert time.monotonic() - began < 30.0
    view = await cluster.view("job")
    assert (view.failures, view.preemptions, view.failed_launches) == (0, 0, 0)
    assert not any("quarantine" in name for worker in await cluster.workers() for name in worker.attributes)


@played()
async def test_gang_waits_for_a_busy_slice_of_its_version_and_says_why(cluster: VirtualCluster) -> None:
    install(cluster, OLDER, *EVERYWHERE[:4])
    freed = asyncio.Event()

    async def until_freed(_: Task) -> None:
        await freed.wait()

    other = cluster.ray.create(SlicePoolManager, (), {})
    cluster.run("holder", (1,), until_freed, pool=other)
    await cluster.started("holder", 2, attempt=3)
    job = cluster.run("job", (1,), where)

    async def waits() -> bool:
        why = await cluster.ask("why", "job")
        return "it avoids v4-16-0, v4-16-1 for a while" in why

    await cluster.until(waits)
    assert "host 0 is iris_ray 0.0.9 (protocol" in await cluster.ask("why", "job")
    await asyncio.sleep(1.5 * AVOIDED_S)  # it tries the others again meanwhile
    assert not (await cluster.view("job")).state.finished
    freed.set()
    assert await job == ["v4-16-2"] * 2
    assert await cluster.charged("job") == (0, 0)


@played(slices=2)
async def test_job_waits_for_a_slice_that_is_half_replaced(cluster: VirtualCluster) -> None:
    install(cluster, OLDER, *EVERYWHERE[:3])
    job = cluster.run("job", (1,), where)
    await asyncio.sleep(60.0)
    assert not (await cluster.view("job")).state.finished
    install(cluster, {}, EVERYWHERE[2])
    assert await job == ["v4-16-1"] * 2
    assert await cluster.charged("job") == (0, 0)


@played(slices=1)
async def test_job_that_has_run_waits_for_its_version_when_its_pool_is_new(cluster: VirtualCluster) -> None:
    """As a detached job whose head was replaced: this process of its pool has not seen a host that fits."""

    async def until_the_pool_dies(task: Task) -> str:
        if task.info.attempt == 1:
            await asyncio.Event().wait()
        return task.info.slice_name

    job = cluster.run("job", (1,), until_the_pool_dies, max_retries_preemption=1)
    await cluster.runs("job", 2)
    install(cluster, OLDER, *EVERYWHERE[:2])
    cluster.ray.restart(cluster.pool)
    await asyncio.sleep(1.5 * AVOIDED_S)
    assert not (await cluster.view("job")).state.finished
    assert await cluster.charged("job") == (0, 1)
    install(cluster, {}, *EVERYWHERE[:2])
    assert await job == ["v4-16-0"] * 2
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_failures_of_other_kinds_leave_a_job_hope(cluster: VirtualCluster) -> None:
    """A slice whose chips a stranger holds may have the right version."""
    install(cluster, OLDER, *EVERYWHERE[:4])
    for host in (0, 1):
        cluster.node(cluster.node_id("v4-16-2", host)).held_by = STRANGER
    job = cluster.run("job", (1,), where)
    await asyncio.sleep(30.0)
    for host in (0, 1):
        cluster.node(cluster.node_id("v4-16-2", host)).held_by = None
    assert await job == ["v4-16-2"] * 2


@played()
async def test_gang_runs_on_hosts_of_two_patch_versions(cluster: VirtualCluster) -> None:
    install(cluster, NEWER | {"protocol": PROTOCOL_VERSION}, *EVERYWHERE[:3])
    assert len(await cluster.run("job", (3,), where)) == 6


@played()
async def test_task_on_shared_host_of_other_protocol_is_refused(cluster: VirtualCluster) -> None:
    install(cluster, NEWER, *EVERYWHERE)
    cluster.node(HEAD_NODE).versions = NEWER
    with pytest.raises(VersionMismatchError, match=r"9\.9\.0"):
        await cluster.run_tasks("job", 1, where)


@played()
async def test_tasks_run_on_shared_hosts_of_their_version(cluster: VirtualCluster) -> None:
    async def node(task: Task) -> str:
        return task.host.node_id

    install(cluster, OLDER, *EVERYWHERE[:4])
    cluster.node(HEAD_NODE).versions = OLDER
    fitting = {cluster.node_id("v4-16-2", host) for host in (0, 1)}
    assert set(await cluster.run_tasks("job", 6, node)) <= fitting
