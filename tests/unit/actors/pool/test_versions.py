"""A host whose iris_ray does not go with the pool's runs nothing, and the caller hears both versions."""

from itertools import product
from typing import Any

import pytest

from iris_ray.actors.protocol.version import PROTOCOL_VERSION, package_directory
from iris_ray.errors import VersionMismatchError
from tests.support.hosts_in_process import Task
from tests.support.ray_in_process import HEAD_NODE
from tests.support.virtual_cluster import VirtualCluster, played

NEWER: dict[str, Any] = {"version": "9.9.0", "protocol": PROTOCOL_VERSION + 1, "package": "/image/iris_ray"}
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
    for said in (ours, theirs, "v4-16-0 host 0", "install iris_ray 9.9.0 here"):
        assert said in str(refused.value)
    assert cluster.tasks == []


@played()
@pytest.mark.parametrize("host", [0, 1])
async def test_gang_starts_where_versions_fit(cluster: VirtualCluster, host: int) -> None:
    """The host of the other version is not at fault: callers of that version may use it."""
    install(cluster, NEWER | {"protocol": PROTOCOL_VERSION - 1}, ("v4-16-0", host), ("v4-16-1", host))
    assert await cluster.run("before", (1,), where, max_retries_failure=5) == ["v4-16-2"] * 2
    assert await cluster.charged("before") == (0, 0)
    assert await cluster.run("job", (1,), where, keep_warm=600.0) == ["v4-16-2"] * 2
    assert {worker.draining for worker in await cluster.workers()} == {None}
    assert not any("quarantine" in name for worker in await cluster.workers() for name in worker.attributes)


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
