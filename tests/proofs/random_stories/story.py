"""One story: some jobs, some faults, what people do meanwhile, and the end of the jobs."""

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.errors import IrisError
from iris_ray.model.cluster_settings import EVICTION_GRACE_S
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import LEAST_RUN_S
from iris_ray.state.attempt_ends import QUICK_ENDS_ARE_FAILURES
from tests.proofs.random_stories.faults import Faults
from tests.support.hosts_in_process import Task
from tests.support.ray_in_process import Handle, Reference
from tests.support.virtual_cluster import Stage, VirtualCluster

SLICES, JOBS = 3, 2
FAULTS = QUICK_ENDS_ARE_FAILURES - 1
"""iris_ray charges a failure for each further task that a gang loses so soon: see `docs/failures.md`."""


def play(seed: int) -> Counter[str]:
    """Play one story, where a job may be evicted soon after its start; return what has happened, by kind.

    Raises:
        AssertionError, Exception: something is wrong; the note says what has happened, and how to see it again.
    """
    story = Story(seed)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setitem(LEAST_RUN_S, PriorityBand.INTERACTIVE, 2.0)
        try:
            Stage(Path(directory), patch).play(story.play, slices=SLICES)
        except BaseException as error:
            error.add_note("; ".join(story.happened))
            error.add_note(f"again: python -m tests.proofs.random_stories --first {seed} --count 1")
            raise
    return Counter(what.split()[0].strip("_") for what in story.happened)


@dataclass
class Submitted:
    """A job of a story.

    Attributes:
        results: a reference to them.
        pool: of its driver.
        is_gang: or its tasks are placed one by one.
        ended_by: who or what has ended it before its time, or "".
    """

    results: Reference
    pool: Handle
    is_gang: bool = True
    ended_by: str = ""


class Story:
    """Some jobs, some faults, what people do meanwhile, and the end of the jobs.

    Args:
        seed: of all that is random.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._jobs: dict[str, Submitted] = {}
        self._faults: Faults
        self._cluster: VirtualCluster

    async def play(self, cluster: VirtualCluster) -> None:
        self._cluster, self._faults = cluster, Faults(cluster, SLICES, self._chance)
        await cluster.ask("set_settings", {EVICTION_GRACE_S.name: "3"}, False, "olga")
        cluster.process_start_s = self._chance.choice([0.0, 0.5, 2.0])
        for number in range(JOBS):
            self._submit(f"job-{number}")
        for number in range(FAULTS):
            await asyncio.sleep(self._chance.expovariate(1 / 5.0))
            self._faults.happen()
            if self._chance.random() < 0.3:
                self._somebody_acts(number)
        for job_id, job in self._jobs.items():
            await (self._ends(job_id) if job.ended_by else self._succeeds(job_id))
        await cluster.until(lambda: not cluster.reserved_nodes())
        await cluster.until(lambda: not any(map(cluster.is_running, cluster.tasks)))

    @property
    def happened(self) -> list[str]:
        return self._faults.happened

    def _submit(self, job_id: str, **more: Any) -> None:
        pool = self._cluster.pool
        if self._chance.random() < 0.3:
            pool = self._cluster.ray.create(SlicePoolManager, (), {})
        how: dict[str, Any] = {
            "max_retries_failure": FAULTS,
            "max_retries_preemption": 50,
            "pool": pool,
            "work": self._work,
        } | more
        if self._chance.random() < 0.25:
            results = self._cluster.run_tasks(job_id, 3, **how)
            self._jobs[job_id] = Submitted(results, pool, is_gang=False)
            return
        how |= {
            "slices": self._chance.choice([(1,), (2,), (1, 2)]),
            "keep_warm": self._chance.choice([0.0, 60.0]),
            "spares": self._chance.choice([0, 0, 1]),
            "grow_after": self._chance.choice([3.0, None, "auto"]),
        }
        self._jobs[job_id] = Submitted(self._cluster.run(job_id, **how), pool)

    def _somebody_acts(self, number: int) -> None:
        """Have somebody submit a job that may evict others, cancel one, or kill a driver."""
        act, job_id = self._chance.choice([self._submit_urgent, self._cancel, self._kill_driver]), f"urgent-{number}"
        if act != self._submit_urgent:
            job_id = self._chance.choice(list(self._jobs))
        self.happened.append(f"{act.__name__} {job_id}")
        act(job_id)

    def _submit_urgent(self, job_id: str) -> None:
        self._submit(job_id, priority=PriorityBand.PRODUCTION, user="ann")

    def _cancel(self, job_id: str) -> None:
        self._jobs[job_id].ended_by = "somebody has cancelled it"
        if self._chance.random() < 0.5:
            ray.cancel(self._jobs[job_id].results)
        else:
            self._cluster.controller().cancel.remote(job_id, "enough", "ann")

    def _kill_driver(self, job_id: str) -> None:
        pool = self._jobs[job_id].pool
        if pool is not self._cluster.pool:
            self._cluster.ray.kill(pool)
            for job in self._jobs.values():
                job.ended_by = "its driver was killed" if job.pool is pool else job.ended_by

    async def _succeeds(self, job_id: str) -> None:
        attempts, is_gang = await self._jobs[job_id].results, self._jobs[job_id].is_gang
        assert not is_gang or len(set(attempts)) == 1, f"{job_id} has results of several attempts"
        charged = [await self._cluster.charged(job_id, index) for index in range(1 if is_gang else len(attempts))]
        failures = sum(failures for failures, _ in charged)
        assert failures <= self._faults.killed[job_id], f"{job_id} was charged {failures} failures"

    async def _ends(self, job_id: str) -> None:
        """It has a result, since it had ended already, or it raises."""
        with contextlib.suppress(RayError, IrisError, asyncio.CancelledError):
            await self._jobs[job_id].results

    async def _work(self, task: Task) -> int:
        """Return at once, or late. Half of the tasks save when they are told to move, and fail when a peer is gone."""
        me = task.info
        for other in self._cluster.tasks_of(me.job_id):
            if me.slice_name and other.info.attempt < me.attempt and self._cluster.is_running(other):
                assert other.info.slice_name in self._faults.unwatched, "the attempt before goes on beside this one"
        self._keeps_its_number(task)
        for _ in range(self._chance.choice([0, 5, 20, 100, 200])):
            await asyncio.sleep(0.1)
            if task.notice is not None and self._chance.random() < 0.5:
                task.save()
            if me.slice_name and self._chance.random() < 0.5 and self._has_lost_a_peer(task):
                raise RuntimeError("Socket closed by peer")
        return me.attempt

    def _keeps_its_number(self, task: Task) -> None:
        """A task knows which one ran on its host before: the same one, unless there are too few slices now."""
        me, before = task.info, task.info.previous_task_index
        earlier = [t for t in self._cluster.tasks_of(me.job_id) if t.host is task.host and t.info.attempt < me.attempt]
        assert before is None or before in [other.info.task_index for other in earlier], f"{before} was not there"
        assert before in (None, me.task_index) or before >= me.num_tasks, f"task {before} is {me.task_index} now"

    def _has_lost_a_peer(self, task: Task) -> bool:
        peers = self._cluster.tasks_of(task.info.job_id, task.info.attempt)
        return any(peer.process.gone.done() for peer in peers)
