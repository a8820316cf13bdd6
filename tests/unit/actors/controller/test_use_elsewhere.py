"""CPUs and memory that other Ray work uses: from Ray's tables to where tasks are placed."""

from typing import Any

import pytest

from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.node_table import READINGS, NodeDiff, NodeTable
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import TPU
from iris_ray.state.events import JobRestoredEvent
from tests.support.worlds import World, assigned_tasks

S = TaskState
ALL = {"CPU": 8.0, "memory": 100.0, "node:10.0.0.1": 1.0, "object_store_memory": 50.0}


class Cluster:
    """Ray's tables on paper, and the state that reads them."""

    def __init__(self, *node_ids: str) -> None:
        self.world = World()
        self.diff = NodeDiff(self.world.state, Clock())
        self.available = {node_id: dict(ALL) for node_id in node_ids}
        self.totals = {node_id: dict(ALL) for node_id in node_ids}
        self.labels: dict[str, dict[str, str]] = {node_id: {} for node_id in node_ids}

    def read(self, times: int = 1) -> int:
        """How many events that brings."""
        events = 0
        for _ in range(times):
            nodes: tuple[dict[str, Any], ...] = tuple(
                {
                    "NodeID": node_id,
                    "Alive": True,
                    "NodeManagerAddress": "10.0.0.1",
                    "Labels": self.labels[node_id],
                    "Resources": dict(totals),
                }
                for node_id, totals in self.totals.items()
            )
            available = {node_id: dict(free) for node_id, free in self.available.items()}
            for event in self.diff.events_of(NodeTable(nodes, {}, available)):
                self.world.do(event)
                events += 1
        self.world.check()
        return events

    def use(self, node_id: str, cpus: float) -> None:
        """So many CPUs are claimed in all."""
        self.available[node_id]["CPU"] = 8.0 - cpus
        if cpus == 8.0:
            del self.available[node_id]["CPU"]  # as Ray does

    def elsewhere(self, node_id: str) -> dict[str, float]:
        return dict(self.world.state.workers[node_id].elsewhere)


@pytest.fixture
def tables() -> Cluster:
    return Cluster("a", "b")


def test_task_goes_where_foreign_work_leaves_room(tables: Cluster) -> None:
    """And to the host that comes first by all other rules if it is free again."""
    tables.use("a", 8.0)
    tables.read()
    job = tables.world.submit_tasks(replicas=3, resources={"CPU": 1.0})
    tables.world.schedule()
    assert [task.node_id for task in job.tasks] == ["b", "b", "b"]


def test_job_waits_for_room_in_foreign_use_and_says_so(tables: Cluster) -> None:
    for node_id in ("a", "b"):
        tables.use(node_id, 8.0)
    tables.read()
    tables.world.submit_tasks(replicas=1, resources={"CPU": 4.0})
    assert "in use by work outside iris_ray" in tables.world.why()
    tables.use("b", 3.0)
    tables.read(READINGS)
    assert [task.node_id for task in assigned_tasks(tables.world.plan())] == ["b"]


def test_foreign_memory_and_fractional_cpu_count_as_use(tables: Cluster) -> None:
    tables.available["a"] = {"CPU": 7.5, "memory": 30.0, "node:10.0.0.1": 0.9}
    tables.read()
    assert tables.elsewhere("a") == {"CPU": 0.5, "memory": 70.0}
    assert tables.world.state.workers["a"].free["memory"] == 30.0


def test_own_reservations_are_not_counted_as_foreign_use(tables: Cluster) -> None:
    tables.read()
    world = tables.world
    job = world.submit_tasks(replicas=2, resources={"CPU": 3.0})
    world.schedule()
    assert {task.node_id for task in job.tasks} == {"a"}
    tables.use("a", 6.0)  # its reservations are there
    tables.read(2 * READINGS)
    for index in range(2):
        world.report(job, S.RUNNING, index)
    tables.read(2 * READINGS)
    assert tables.elsewhere("a") == {}
    tables.use("a", 7.0)
    tables.read(READINGS)
    assert tables.elsewhere("a") == {"CPU": 1.0}
    assert world.state.workers["a"].free["CPU"] == 1.0


def test_reservation_outlasting_its_task_briefly_is_not_foreign_use(tables: Cluster) -> None:
    tables.read()
    world = tables.world
    job = world.start_tasks(replicas=1, resources={"CPU": 8.0})
    tables.use("a", 8.0)
    tables.read(READINGS)
    world.finish(job)
    assert tables.read(READINGS - 1) == 0
    tables.use("a", 0.0)
    assert tables.read(2 * READINGS) == 0
    assert tables.elsewhere("a") == {}


def test_steady_part_of_fluctuating_use_counts_and_rarely_reregisters(tables: Cluster) -> None:
    tables.read()
    events = 0
    for number in range(10 * READINGS):
        tables.use("a", 4.0 + number % 3)
        events += tables.read()
    assert tables.elsewhere("a") == {"CPU": 4.0}
    assert events <= 10


def test_warm_slices_show_no_foreign_use() -> None:
    cluster = Cluster("a-0")
    cluster.totals["a-0"][TPU] = cluster.available["a-0"][TPU] = 4.0
    cluster.labels["a-0"] = {
        "ray.io/tpu-slice-name": "a", "ray.io/tpu-worker-id": "0", "ray.io/tpu-pod-type": "v4-8"
    }  # fmt: skip
    cluster.read()
    world = cluster.world
    job = world.start(tpu_type="v4-8", resources={"TPU": 4.0, "CPU": 6.0})
    cluster.available["a-0"] = {"CPU": 1.0, "memory": 100.0}
    cluster.read(READINGS)
    assert cluster.elsewhere("a-0") == {"CPU": 1.0}
    world.finish(job)
    assert "a" in world.state.holders
    cluster.read(2 * READINGS)
    assert cluster.elsewhere("a-0") == {"CPU": 1.0}


def test_successor_soon_knows_own_reservations(tables: Cluster) -> None:
    """A Controller that comes back reads the hosts first and the jobs then."""
    tables.read()
    job = tables.world.start_tasks(replicas=1, resources={"CPU": 8.0})
    record = tables.world.state.record("job")
    assert record is not None
    successor = Cluster("a", "b")
    successor.use(job.tasks[0].node_id or "", 8.0)
    successor.read()
    assert successor.elsewhere("a") == {"CPU": 8.0}
    successor.world.do(JobRestoredEvent(record))
    successor.read()
    assert successor.elsewhere("a") == {}
