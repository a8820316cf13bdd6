"""Slots and other jobs on one cluster: one queue, one ledger, the same taints and notices for both."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from iris_ray import IrisClient, ResourceSpec, Session, SlotClient, SlotHosts, run_on_pod_ray
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import SessionEndedError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.eviction_costs import GRACE_S
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris
from tests.support.gangs import Trace, alive, all_jobs, all_workers, result_of, the_controller
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof
GB = 2**30
EAGER = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0))
PATIENT = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(600.0)))
WHOLE_SLICE = SlotHosts(tpu_type="v4-16", memory=16 * GB)
LEAST_RUN_S = 120.0
"""So long an attempt of the lowest band runs before a higher one may take its hosts."""
BATCH: dict[str, Any] = {"priority": PriorityBand.BATCH, "keep_warm": 0}


class Sleeper:
    async def __call__(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()


class Member:
    """Says which process it is, and which one is the task that keeps its host."""

    async def __call__(self, seconds: float) -> tuple[int, int]:
        files = TaskFiles.of_this_task()
        assert files is not None
        await asyncio.sleep(seconds)
        return os.getpid(), int(files.pid)


@pytest.fixture
def everywhere(cluster: SimulatedCluster) -> Iterator[SlotClient]:
    """Slots on all three slices, which are idle as soon as nothing runs on them."""
    with SlotClient([SlotHosts(3, tpu_type="v4-16", memory=16 * GB)], policy=EAGER) as client:
        client.register(Sleeper, memory={4: GB})
        wait_until(lambda: len(client.status().runners) == 6, 120)
        yield client


def yielding(client: SlotClient) -> list[bool]:
    """Whether each job that has hosts for slots yields, as the Controller knows."""
    return [job.yields for job in all_jobs() if not job.state.finished and "slots" in job.job_id]


@pytest.mark.long
def test_same_band_gang_borrows_idle_slots_hosts(everywhere: SlotClient, trace: Trace) -> None:
    first = everywhere.submit("Sleeper", 0.0).result(60)
    wait_until(lambda: yielding(everywhere) == [True] * 3)
    gang = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3, **BATCH)
    trace.wait_for_tasks(6)
    assert everywhere.status().runners == {}
    assert not alive(first)
    waits = everywhere.submit("Sleeper", 0.0)
    trace.finish()
    assert len(result_of(gang)) == 6
    assert waits.result(120) != first
    wait_until(lambda: len(everywhere.status().runners) == 6, 120)


@pytest.mark.long
def test_busy_slots_keep_hosts_and_idle_ones_give_needed(everywhere: SlotClient, trace: Trace) -> None:
    wait_until(lambda: yielding(everywhere) == [True] * 3)
    answers = [everywhere.submit("Sleeper", 15.0) for _ in range(3)]
    wait_until(lambda: sum(slot.active for slot in everywhere.status().slots) == 3, 60)
    wait_until(lambda: False in yielding(everywhere))
    gang = run_on_pod_ray.remote(trace.gang(), "v4-16", **BATCH)
    pids = {answer.result(90) for answer in answers}
    trace.wait_for_tasks(2)
    assert len(pids) == 3, "no request ran twice"
    assert len(everywhere.status().runners) == 4
    trace.finish()
    assert len(result_of(gang)) == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_higher_band_gang_takes_host_of_open_session(everywhere: SlotClient, trace: Trace) -> None:
    """The session keeps its slot busy, so its job runs for the two minutes that it may. All three slices are needed."""
    with ThreadPoolExecutor(1) as thread:
        session = everywhere.session("Sleeper", idle_s=600.0).open()
        first = session.call(0.0)
        calls = thread.submit(calls_until_it_is_over, session)
        urgent: dict[str, Any] = {"priority": PriorityBand.PRODUCTION, "keep_warm": 0}
        gang = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=3, **urgent)
        wait_until(lambda: session.over, LEAST_RUN_S + 120)
        told = time.monotonic()
        assert "has to end: its host has to go: PRODUCTION job" in session.over
        answers, error = calls.result(GRACE_S)
        assert answers == {first}, "what ran was not cut off"
        assert session.over in error
        assert "This call has not run; open the session again" in error
        trace.wait_for_tasks(6, timeout_s=told + GRACE_S + 60.0 - time.monotonic())
        assert everywhere.status().runners == {}
        assert not alive(first)
        trace.finish()
        assert len(result_of(gang)) == 6
        with session:
            assert session.call(0.0) != first
            assert session.over == ""


def calls_until_it_is_over(session: Session) -> tuple[set[int], str]:
    """Make long calls one after the other; return which processes have answered, and what the last call was told."""
    pids: set[int] = set()
    while True:
        try:
            pids.add(session.call(20.0))
        except SessionEndedError as error:
            return pids, str(error)


@pytest.mark.long
def test_tainted_hosts_get_only_tolerating_slots(cluster: SimulatedCluster) -> None:
    first, second, third = cluster.slice_names
    iris(cluster, "cluster", "controller", "start")
    iris(cluster, "host", "drain", first)
    iris(cluster, "host", "drain", second, "for-slots")
    with SlotClient([SlotHosts(3, tpu_type="v4-16", memory=GB)], policy=EAGER) as client:
        wait_until(lambda: len(client.status().runners) == 2, 60)
        tolerant = SlotHosts(2, tpu_type="v4-16", memory=GB, tolerations=["for-slots"])
        with SlotClient([tolerant], policy=EAGER) as other:
            wait_until(lambda: len(other.status().runners) == 2, 60)
            there = [name for job in all_jobs() if not job.state.finished for name in job.groups]
            assert sorted(there) == sorted([second, third])
    iris(cluster, "host", "undrain", first)
    iris(cluster, "host", "undrain", second, "for-slots")


@pytest.mark.long
def test_notice_ends_slots_after_their_requests(cluster: SimulatedCluster) -> None:
    with SlotClient([WHOLE_SLICE], policy=EAGER) as client:
        client.register(Sleeper, memory={4: GB})
        wait_until(lambda: len(client.status().runners) == 2, 60)
        answers = [client.submit("Sleeper", 6.0) for _ in range(2)]
        wait_until(lambda: sum(slot.active for slot in client.status().slots) == 2, 60)
        before = {slot.pid for slot in client.status().slots}
        (doomed,) = (job.groups[0] for job in all_jobs() if not job.state.finished)
        preemption = cluster.preempt_slice(doomed, notice_s=40)
        assert {answer.result(60) for answer in answers} == before, "none was cut off"
        assert client.submit("Sleeper", 0.0).result(90) not in before
        (now,) = (job.groups[0] for job in all_jobs() if not job.state.finished)
        assert now != doomed
        assert preemption.wait(60)


def test_killed_runner_takes_slots_along_and_comes_back(cluster: SimulatedCluster) -> None:
    with SlotClient([SlotHosts(memory=GB)], policy=EAGER) as client:
        client.register(Member, memory={1: GB})
        slot, task = client.submit("Member", 0.0).result(60)
        long = client.submit("Member", 3.0)
        wait_until(lambda: any(slot.active for slot in client.status().slots))
        os.kill(task, signal.SIGKILL)
        assert {slot, task}.isdisjoint(long.result(90))
        assert not alive(slot)


@pytest.mark.long
def test_slots_and_tasks_never_overuse_a_host(cluster: SimulatedCluster, trace: Trace) -> None:
    """All CPUs of one host are of slots; a task that needs one there waits until they are given back."""
    iris(cluster, "cluster", "controller", "start")
    node = cluster.node_id(cluster.slice_names[0], 0)
    there = [Constraint("ray.io/node-id", ConstraintOp.EQ, AttributeValue(node))]
    cpus = int(next(w.resources["CPU"] for w in all_workers() if w.node_id == node))
    with SlotClient([SlotHosts(devices=cpus, memory=GB, constraints=there)], policy=PATIENT) as client:
        client.register(Sleeper, memory={1: 1}, replicas=1)
        client.submit("Sleeper", 0.0).result(60)
        assert client.status().runners["cpu-0"] == (GB - 1,), "all CPUs are one device, with the host's memory"
        task = IrisClient().submit(lambda: os.getpid(), resources=ResourceSpec(cpu=1), constraints=there)
        wait_until(lambda: "slots" in the_controller().ask(ControllerInterface.job_status, task.job_id).explanation)
    assert len(task.results(60)) == 1
