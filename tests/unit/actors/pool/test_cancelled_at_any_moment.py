"""A caller cancels its job in whatever turn of the event loop: the job ends. In virtual time."""

import asyncio
from collections import Counter

import pytest

from iris_ray.model.lifecycle import JobState
from tests.support.virtual_cluster import Stage, VirtualCluster


class Calls(Counter[str]):
    """Counts calls, and tells when there is another one of ``awaited``."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited
        self.came = asyncio.Event()

    def __setitem__(self, name: str, count: int) -> None:
        super().__setitem__(name, count)
        if name == self._awaited:
            self.came.set()


@pytest.mark.parametrize("turns", range(4, 16))
def test_waiting_job_cancelled_during_controllers_call_ends(stage: Stage, turns: int) -> None:
    """An answer and the cancellation may come in the same turn: neither hides the other."""

    async def story(cluster: VirtualCluster) -> None:
        cluster.run("other")
        await cluster.runs("other", 2)
        results = cluster.run("job")
        await asyncio.sleep(1.9)
        cluster.ray.calls = calls = Calls("report")
        await calls.came.wait()
        for _ in range(turns):
            await asyncio.sleep(0)
        results.future().cancel()
        await asyncio.sleep(100.0)
        assert (await cluster.status("job")).state is JobState.KILLED

    stage.play(story, slices=1)
