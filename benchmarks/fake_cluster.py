"""A cluster that is made up: its nodes, and pools that answer the Controller's orders with nothing to carry out.

`benchmarks/controller.py` and `benchmarks/dashboard.py` put a real Controller in front of it.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL, NodeTable
from iris_ray.actors.protocol.messages import AttemptOrder, PoolProcess, PoolView
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.notices import Notice
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU_TOPOLOGY
from iris_ray.state.events import AttemptEndConfirmedEvent, Event, JobCancelledEvent, TaskStateChangedEvent

INCARNATION = 1
PAUSE_S = 0.05
"""Between two samples at most: they fall on any moment of the Controller's reading of the node table."""


def hosts_of(tpu_type: str) -> int:
    return get_tpu_config(tpu_type).vm_count


class FakeNodes:
    """Reads a node table with so many slices of each type. Everything in it is new each time, as in Ray's."""

    def __init__(self, fleet: dict[str, int]) -> None:
        self._fleet = fleet
        self._nodes: list[dict[str, Any]] = []  # the actor's arguments are to be small: Ray must be able to keep them

    def __call__(self) -> NodeTable:
        self._nodes = self._nodes or list(fake_nodes(self._fleet))
        nodes = tuple({**n, "Resources": dict(n["Resources"]), "Labels": dict(n["Labels"])} for n in self._nodes)
        return NodeTable(nodes, {}, {node["NodeID"]: dict(node["Resources"]) for node in nodes})


def fake_nodes(fleet: dict[str, int]) -> Iterator[dict[str, Any]]:
    slices = [(tpu_type, number) for tpu_type, count in fleet.items() for number in range(count)]
    for place, (tpu_type, number) in enumerate(slices):
        for worker in range(hosts_of(tpu_type)):
            node_id = random.Random(f"{place}/{worker}").randbytes(28).hex()
            labels = {
                SLICE_NAME_LABEL: f"{tpu_type}-slice-{number}",
                WORKER_ID_LABEL: str(worker),
                POD_TYPE_LABEL: tpu_type,
                "ray.io/node-id": node_id,
                "ray.io/accelerator-type": "TPU-V4",
                "iris/region": "us",
            }
            yield {
                "NodeID": node_id,
                "Alive": True,
                "NodeManagerAddress": f"10.{place // 256}.{place % 256}.{worker}",
                "Labels": labels,
                "Resources": {"TPU": 4.0, "CPU": 240.0, "memory": 4e11, f"node:10.0.{place}.{worker}": 1.0},
            }


def spec(tpu_type: str, owner: str, user: str = "", slices: int = 1) -> JobSpec:
    """What GangRun submits for a run_on_pod."""
    return JobSpec(
        job_id=f"train-{random.randbytes(4).hex()}",
        name="train",
        owner=owner,
        user=user,
        device=tpu_type,
        replicas=hosts_of(tpu_type),
        coscheduling=CoschedulingConfig(num_groups=(slices,)),
        constraints=(Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(tpu_type)),),
        resources={"TPU": 4.0},
        max_retries_failure=10,
        max_retries_preemption=10_000,
        whole_groups=True,
    )


@dataclass
class Timing:
    """Of one gang, in seconds: from the submission to the order's arrival, and of each report to its answer."""

    dispatched: float = 0.0
    reports: list[float] = field(default_factory=list)


class FakePool:
    """Carries out orders as a SlicePoolManager does, but there is nothing to carry out."""

    def __init__(self, controller: ActorHandle, user: str) -> None:
        self._controller = controller
        self._owner = ray.get_runtime_context().get_actor_id() or ""
        self._sender = PoolProcess(self._owner, INCARNATION)
        self._user = user
        self._orders: dict[str, asyncio.Future[AttemptOrder]] = {}
        self._held: dict[str, None] = {}
        self._finish = asyncio.Event()
        self._running: list[asyncio.Task[Timing]] = []
        self._queued: list[str] = []

    # As the Controller calls it.

    async def watched(self) -> None:
        await asyncio.Event().wait()

    async def reconnect(self, epoch: int) -> PoolView:
        return PoolView(INCARNATION, tuple(self._held))

    async def assign(self, order: AttemptOrder) -> bool:
        ordered = self._orders.get(order.attempt.job_id)
        if ordered is not None and not ordered.done():
            self._held.update(dict.fromkeys(hosts[0].slice_name for hosts in order.slices))
            ordered.set_result(order)
        return ordered is not None

    async def notify_attempt(self, attempt: AttemptId, notice: Notice, epoch: int, sent_at: float) -> None: ...

    async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> None: ...

    async def drop_spare(self, job_id: str) -> None: ...

    async def job_ended(self, job_id: str) -> None: ...

    async def give_up_slice(self, name: str, epoch: int) -> bool:
        self._held.pop(name, None)
        return True

    # As the benchmark calls it.

    async def storm(self, tpu_types: list[str]) -> None:
        """So many gangs at once; returns when they have ended."""
        await asyncio.gather(*(self._run(tpu_type) for tpu_type in tpu_types))

    async def one_by_one(self, tpu_type: str, count: int) -> list[Timing]:
        timings = []
        for _ in range(count):
            await asyncio.sleep(random.uniform(0, PAUSE_S))
            timings.append(await self._run(tpu_type))
        return timings

    async def start(self, tpu_types: list[str]) -> None:
        """Gangs that run until `finish`; returns when all of them run."""
        self._finish.clear()
        up = [asyncio.Event() for _ in tpu_types]
        self._running += [
            asyncio.ensure_future(self._run(tpu_type, event, self._finish))
            for tpu_type, event in zip(tpu_types, up, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in up))

    async def finish(self) -> None:
        self._finish.set()
        await asyncio.gather(*self._running)
        self._running.clear()

    async def queue(self, tpu_type: str, count: int) -> None:
        """Jobs that will have to wait."""
        specs = [spec(tpu_type, self._owner, self._user) for _ in range(count)]
        self._queued += [job.job_id for job in specs]
        for job in specs:
            self._orders[job.job_id] = asyncio.get_running_loop().create_future()
        await asyncio.gather(*(self._submit(job) for job in specs))

    async def cancel_queued(self) -> None:
        events = [JobCancelledEvent(job_id, "not needed any more") for job_id in self._queued]
        await self._controller.report.remote(None, events, 0, self._sender)
        self._queued.clear()

    async def _submit(self, job: JobSpec) -> None:
        await self._controller.submit.remote(job, ray.get_runtime_context().current_actor, INCARNATION)

    async def _run(self, tpu_type: str, up: asyncio.Event | None = None, finish: asyncio.Event | None = None) -> Timing:
        job, timing = spec(tpu_type, self._owner, self._user), Timing()
        ordered = self._orders[job.job_id] = asyncio.get_running_loop().create_future()
        submitted = time.perf_counter()
        submission = asyncio.ensure_future(self._submit(job))
        order = await ordered
        timing.dispatched = time.perf_counter() - submitted
        await submission
        await self._report(order, TaskState.RUNNING, timing)
        if up and finish:
            up.set()
            await finish.wait()
        await self._report(order, TaskState.SUCCEEDED, timing)
        await self._tell(job.job_id, [AttemptEndConfirmedEvent(order.attempt)], timing)
        del self._orders[job.job_id]
        return timing

    async def _report(self, order: AttemptOrder, state: TaskState, timing: Timing) -> None:
        tasks = range(len(order.slices) * order.hosts_per_slice)
        await self._tell(order.attempt.job_id, [TaskStateChangedEvent(order.attempt, i, state) for i in tasks], timing)

    async def _tell(self, job_id: str, events: list[Event], timing: Timing) -> None:
        started = time.perf_counter()
        await self._controller.report.remote(job_id, events, 0, self._sender)
        timing.reports.append(time.perf_counter() - started)
