"""Whatever happens to hosts and to processes of ours: no job is charged a failure unless a task fails, or is lost.

Meanwhile other jobs evict these, and people cancel some or kill a driver. Whole jobs run in virtual time, a few hundred
milliseconds each. Everything of iris_ray is real but the hosts.
"""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from iris_ray.actors.controller.eviction_settings import GRACE
from iris_ray.actors.host.chip_release import NotFree
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.errors import IrisError
from iris_ray.model.job_spec import PriorityBand
from iris_ray.scheduler.evictions import LEAST_RUN_S
from iris_ray.state.retry_budget import QUICK_ENDS_ARE_FAILURES
from tests.support.hosts_in_process import Task
from tests.support.proofs import in_proofs
from tests.support.ray_in_process import Handle, Reference
from tests.support.virtual_cluster import Stage, VirtualCluster

SLICES, JOBS = 3, 2
FAULTS = QUICK_ENDS_ARE_FAILURES - 1
"""iris_ray charges a failure for each further task that a gang loses so soon: see `docs/failures.md`."""


class Faults:
    """What happens to a cluster, one thing at a time. Slices that are gone are replaced.

    Attributes:
        happened: the faults so far, in words; a test that fails prints them.
        disturbed: names of slices to which something has happened.
        killed: how many tasks of each job were killed.
    """

    def __init__(self, cluster: VirtualCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self._slices = [f"v4-16-{number}" for number in range(SLICES)]
        self._made = SLICES
        self.happened: list[str] = []
        self.disturbed: set[str] = set()
        self.killed: Counter[str] = Counter()

    def happen(self) -> None:
        """Have one happen."""
        kinds = [
            self._kill_host, self._freeze, self._kill_slice_actor, self._kill_host_actor, self._drain, self._restart,
            self._kill_task, self._restart_pool, self._take_chips, self._break_setup,
        ]  # fmt: skip
        fault, name, host = self._chance.choice(kinds), self._chance.choice(self._slices), self._chance.randrange(2)
        self.happened.append(f"{fault.__name__} {name} {host}")
        self.disturbed.add(name)
        fault(name, host)

    def _kill_host(self, name: str, host: int) -> None:
        self._cluster.kill_host(name, host)
        self._replace(name)

    def _freeze(self, name: str, host: int) -> None:
        self._cluster.freeze_host(name, host)
        asyncio.get_running_loop().call_later(self._chance.uniform(0.5, 15.0), self._cluster.thaw_host, name, host)

    def _kill_slice_actor(self, name: str, _: int) -> None:
        self._kill_actor(SliceActor, name, 0)

    def _kill_host_actor(self, name: str, host: int) -> None:
        self._kill_actor(TPUHostActor, name, host)

    def _kill_actor(self, kind: type, name: str, host: int) -> None:
        try:
            self._cluster.kill_actor(kind, name, host)
        except LookupError:
            return  # there is none

    def _drain(self, name: str, _: int) -> None:
        notice_s = self._chance.uniform(1.0, 20.0)
        self._cluster.drain(name, notice_s)
        self._replace(name)
        for host in range(2):
            asyncio.get_running_loop().call_later(notice_s, self._cluster.kill_host, name, host)

    def _kill_task(self, name: str, host: int) -> None:
        for task in self._cluster.tasks:
            if (task.info.slice_name, task.info.worker_id) == (name, host) and not task.process.gone.done():
                self.killed[task.info.job_id] += 1
                self._cluster.ray.kill(task.process.handle)

    def _restart(self, _: str, __: int) -> None:
        self._cluster.restart_controller()

    def _restart_pool(self, _: str, __: int) -> None:
        self._cluster.ray.restart(self._cluster.pool, takes_s=self._chance.uniform(0.1, 5.0))
        self.disturbed.update(self._slices)

    def _take_chips(self, name: str, host: int) -> None:
        """Have a stranger, or a task of iris_ray, hold a host's chips for a while."""
        self._spoil(name, host, "held_by", NotFree("somebody holds its chips", ours=self._chance.random() < 0.5))

    def _break_setup(self, name: str, host: int) -> None:
        """Let a host be unable for a while to set up what tasks ask for."""
        self._spoil(name, host, "setup_error", "its disk is full")

    def _spoil(self, name: str, host: int, what: str, value: Any) -> None:
        node = self._cluster.node(self._cluster.node_id(name, host))
        setattr(node, what, value)
        asyncio.get_running_loop().call_later(self._chance.uniform(1.0, 20.0), setattr, node, what, None)

    def _replace(self, name: str) -> None:
        self._slices.remove(name)
        self._slices.append(f"v4-16-{self._made}")
        self._made += 1
        self._cluster.add_slice(self._slices[-1])


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Play on clusters where a job may be evicted soon after its start."""
    monkeypatch.setenv(GRACE, "3")
    monkeypatch.setitem(LEAST_RUN_S, PriorityBand.INTERACTIVE, 2.0)
    return Stage(tmp_path, monkeypatch)


@pytest.mark.parametrize("part", [0, *in_proofs(*range(1, 10))])
def test_no_job_is_charged_for_what_happens_to_hosts_and_none_is_lost(
    stage: Stage, part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(20 * part, 20 * part + 20):
        story = Story(seed)
        try:
            stage.play(story.play, slices=SLICES)
        except BaseException:
            with capsys.disabled():
                print(f"\nseed {seed}: {'; '.join(story.happened)}")
            raise


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
        self._cluster, self._faults = cluster, Faults(cluster, self._chance)
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
            "grow_after": self._chance.choice([3.0, None]),
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
                assert other.info.slice_name in self._faults.disturbed, "the attempt before goes on beside this one"
        for _ in range(self._chance.choice([0, 5, 20, 100, 200])):
            await asyncio.sleep(0.1)
            if task.notice is not None and self._chance.random() < 0.5:
                task.save()
            if me.slice_name and self._chance.random() < 0.5 and self._has_lost_a_peer(task):
                raise RuntimeError("Socket closed by peer")
        return me.attempt

    def _has_lost_a_peer(self, task: Task) -> bool:
        peers = self._cluster.tasks_of(task.info.job_id, task.info.attempt)
        return any(peer.process.gone.done() for peer in peers)
