"""The pools of children that later attempts of a task adopt: which child is whose, whatever happens to its pool."""

import asyncio
from dataclasses import replace
from typing import Any

from iris_ray.actors.calls.names import adopter_key
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.messages import Adoption, ChildOf, RunRequest
from iris_ray.model.lifecycle import JobState
from tests.support.hosts_in_process import Task, Work
from tests.support.ray_in_process import Handle
from tests.support.virtual_cluster import VirtualCluster, played
from tests.support.worlds import tasks_spec


async def until_cancelled(task: Task) -> None:
    await asyncio.Event().wait()


async def fail(task: Task) -> None:
    raise ValueError("no")


class Family:
    """A task that runs, and its children."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.cluster = cluster

    @classmethod
    async def of(cls, cluster: VirtualCluster) -> "Family":
        cluster.run_tasks("parent", 1, until_cancelled)
        await cluster.started("parent", 1)
        return cls(cluster)

    def request(self, job_id: str, attempt: int, number: int | None = 0, **changes: Any) -> RunRequest:
        """What an attempt of the task asks for: the name is the same for all children."""
        spec = tasks_spec(job_id, 1, name="trial", resources={"CPU": 0.1}, max_retries_failure=0)
        child_of = ChildOf("parent", 0, attempt, (), number)
        return replace(self.cluster.request(spec, **changes), child_of=child_of)

    def submit(self, job_id: str, number: int | None = 0, work: Work = until_cancelled, **changes: Any) -> Handle:
        """Submit a child from the task's first attempt; return its pool."""
        self.cluster.works[job_id] = work
        request = self.request(job_id, 1, number, **changes)
        return self.cluster.ray.create(SlicePoolManager, (request, None, request.child_of), {"lifetime": "detached"})

    async def state(self, job_id: str) -> JobState:
        return (await self.cluster.status(job_id)).state

    async def runs(self, *job_ids: str) -> None:
        for job_id in job_ids:
            await self.cluster.started(job_id, 1)


async def adopt(pool: Handle, request: RunRequest, replaces: bool = False) -> Adoption:
    found: Adoption = await pool.adopt.remote(request, replaces)
    return found


@played(slices=1)
async def test_new_process_of_a_pool_knows_that_its_child_was_adopted(cluster: VirtualCluster) -> None:
    """Otherwise, the attempt's next job of that name would be the same one, or would end it."""
    family = await Family.of(cluster)
    pool = family.submit("child")
    await family.runs("child")
    assert (await adopt(pool, family.request("again", 2))).job_id == "child"
    cluster.ray.restart(pool)
    await cluster.until(lambda: len(cluster.tasks_of("child")) == 2)
    assert await adopt(pool, family.request("second", 2, 1)) == Adoption()
    assert await adopt(pool, family.request("other", 2, 0, stall_timeout=60.0), replaces=True) == Adoption()
    assert (await adopt(pool, family.request("third", 3))).job_id == "child"


@played(slices=1)
async def test_what_a_pool_has_stored_goes_with_it(cluster: VirtualCluster) -> None:
    family = await Family.of(cluster)
    pool = family.submit("child")
    await family.runs("child")
    await adopt(pool, family.request("again", 2))
    (noted,) = (key for key in cluster.store.values if key.endswith(adopter_key("").rpartition("/")[2]))
    await cluster.ask("cancel", "parent", "enough", "")
    await cluster.until(lambda: noted not in cluster.store.values)


@played(slices=1)
async def test_sweep_keeps_its_other_trials_if_one_has_failed(cluster: VirtualCluster) -> None:
    """The next attempt submits the trials again in turn. The first finds no job of its own, and takes none away."""
    family = await Family.of(cluster)
    pools = [
        family.submit(f"trial-{i}", i, fail if i == 0 else until_cancelled, stall_timeout=60.0 + i) for i in range(3)
    ]
    await family.runs("trial-1", "trial-2")
    await cluster.until(lambda: not cluster.ray.is_alive(pools[0], SlicePoolManager))
    for replaces in (False, True):
        for pool in pools[1:]:
            assert await adopt(pool, family.request("new-0", 2, 0, stall_timeout=60.0), replaces) == Adoption()
    for i in (1, 2):
        answer = await adopt(pools[i], family.request(f"new-{i}", 2, i, stall_timeout=60.0 + i))
        assert answer.job_id == f"trial-{i}"
    assert [await family.state(f"trial-{i}") for i in (1, 2)] == [JobState.RUNNING] * 2


@played(slices=1)
async def test_same_submission_with_another_request_ends_the_child(cluster: VirtualCluster) -> None:
    family = await Family.of(cluster)
    for number, job_id in ((1, "counted"), (None, "named")):
        pool = family.submit(job_id, number)
        await family.runs(job_id)
        request = family.request("again", 2, number, stall_timeout=60.0)
        for replaces in (False, True):
            answer = await adopt(pool, request, replaces)
            assert answer == Adoption(None, ("stall_timeout was None and is 60.0",))
        assert await family.state(job_id) is JobState.KILLED


@played(slices=1)
async def test_cancelled_child_is_not_adopted_while_its_end_is_on_its_way(cluster: VirtualCluster) -> None:
    family = await Family.of(cluster)
    pool = family.submit("child")
    await family.runs("child")
    await cluster.ask("cancel", "child", "by its parent", "")
    assert await adopt(pool, family.request("again", 2)) == Adoption()


@played(slices=1)
async def test_child_is_adopted_while_the_controller_restarts(cluster: VirtualCluster) -> None:
    family = await Family.of(cluster)
    pool = family.submit("child")
    await family.runs("child")
    cluster.restart_controller()
    assert (await adopt(pool, family.request("again", 2))).job_id == "child"
    assert await adopt(pool, family.request("fourth", 2)) == Adoption()
