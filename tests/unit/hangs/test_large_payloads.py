"""Large results that are lost while a hang is inspected are computed again. In virtual time."""

import asyncio
from typing import Any

import pytest

from iris_ray.model.outcomes import EndKind
from tests.support.virtual_cluster import VirtualCluster, played
from tests.unit.actors.pool.test_large_payloads import store

__all__ = ["store"]  # the fixture

BUSY_AFTER_S, STALL_S = 18.0, 20.0


@played()
@pytest.mark.parametrize("late_s", [None, 0.5])
async def test_results_lost_during_hang_inspection_are_computed_again(
    cluster: VirtualCluster, store: Any, late_s: float | None
) -> None:
    store(lambda _, end: end.kind is EndKind.RETURNED)

    results = cluster.run("job", stall_timeout=STALL_S, max_retries_failure=1)
    tasks = await cluster.runs("job", 2)
    if late_s is not None:
        asks = cluster.ray.calls["evidence"]
        await asyncio.sleep(BUSY_AFTER_S)
        cluster.ray.freeze(cluster.controller())
        await cluster.until(lambda: cluster.ray.calls["evidence"] > asks)
        await asyncio.sleep(late_s)
    for task in tasks:
        task.end.set_result("large")
    await asyncio.sleep(1.0)
    cluster.ray.thaw(cluster.controller())
    await asyncio.sleep(5.0)
    for task in cluster.tasks_of("job", 2):
        task.end.set_result("large")
    assert await results == ["large", "large"]
