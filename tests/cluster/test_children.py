"""Jobs that tasks submit under ``children="adopt"``: a task's next attempt adopts them, and they end with its job."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from iris_ray import IrisClient, JobState, ResourceSpec, Secret, get_job_info, tpu_device
from iris_ray.client.job_handle import JobHandle
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import alive, kill_controller
from tests.support.waiting import wait_until

SMALL = ResourceSpec(cpu=0.1, memory_gb=0.1)


@pytest.fixture
def client(cluster: SimulatedCluster) -> IrisClient:
    return IrisClient()


class Family:
    """A parent whose first attempt is killed, and its children, which write down that they run.

    Args:
        client: submits the parent.
        directory: for what they write.
    """

    def __init__(self, client: IrisClient, directory: Path) -> None:
        self.client = client
        self.directory = directory

    def child(self, what: str, result: object = None) -> Callable[[], Any]:
        directory = self.directory

        def child() -> Any:
            (directory / f"{what}-{os.getpid()}").touch()
            while not (directory / f"finish {what}").exists():
                time.sleep(0.02)
            return result if result is not None else os.getpid()

        return child

    def submit(self, submits: Callable[[int], list[Any]], **options: Any) -> JobHandle:
        """Submit the parent. Its first attempt waits until it is killed, the second returns what it gets."""
        directory = self.directory

        def parent() -> Any:
            me = get_job_info()
            assert me is not None
            jobs = submits(me.attempt)
            (directory / f"parent-{me.attempt}").write_text(" ".join([str(os.getpid()), *(job.job_id for job in jobs)]))
            while me.attempt == 1 and not (directory / "return").exists():
                time.sleep(0.02)
            return [] if me.attempt == 1 else [job.results(120) for job in jobs]

        options = {"children": "adopt", "max_retries_failure": 3, **options}
        return self.client.submit(parent, "parent", resources=SMALL, **options)

    def jobs_of(self, attempt: int) -> list[str]:
        """Wait until an attempt of the parent has submitted its jobs, and return their ids."""
        return self._parent(attempt)[1:]

    def kill_parent(self) -> None:
        os.kill(int(self._parent(1)[0]), signal.SIGKILL)

    def running(self, what: str, count: int = 1) -> list[int]:
        """Wait until so many processes have run a child, and return their pids."""
        found = wait_until(lambda: len(all_ := list(self.directory.glob(f"{what}-*"))) == count and all_)
        return [int(each.name.rpartition("-")[2]) for each in found]

    def finish(self, what: str) -> None:
        (self.directory / f"finish {what}").touch()

    def state(self, job_id: str) -> JobState:
        return self.client.job_status(job_id).state

    def ended(self, job_id: str) -> str | None:
        wait_until(lambda: self.state(job_id).finished, 30)
        return self.client.job_status(job_id).error

    def _parent(self, attempt: int) -> list[str]:
        file = self.directory / f"parent-{attempt}"
        return wait_until(lambda: file.exists() and file.read_text().split(), 60)


@pytest.fixture
def family(client: IrisClient, tmp_path: Path) -> Family:
    return Family(client, tmp_path)


def pools_left(parent: str) -> list[str]:
    return [
        a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(f"pool/{parent}/")
    ]


def test_running_child_is_adopted_by_the_next_attempt_and_ends_with_its_pool(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL)])
    (pid,), (job_id,) = family.running("step"), family.jobs_of(1)
    family.kill_parent()
    assert family.jobs_of(2) == [job_id]
    family.finish("step")
    assert parent.results(120) == [[[pid]]]
    assert family.client.job_status(job_id).attempt == 1
    wait_until(lambda: not pools_left(parent.job_id), 30)


def test_result_of_child_that_ended_while_the_parent_was_away_is_delivered(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL)])
    (pid,), (job_id,) = family.running("step"), family.jobs_of(1)
    family.finish("step")
    wait_until(lambda: family.state(job_id) is JobState.SUCCEEDED)
    time.sleep(3.0)  # longer than the pool of a detached job lives after its job
    family.kill_parent()
    assert parent.results(120) == [[[pid]]]
    assert family.running("step") == [pid]


@pytest.mark.proof
def test_child_with_another_request_is_ended_before_the_new_one_begins(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(
        lambda attempt: [IrisClient().submit(step, "step", resources=SMALL, env={"LEVEL": f"{attempt}"})]
    )
    (pid,), (old,) = family.running("step"), family.jobs_of(1)
    family.kill_parent()
    (new,) = family.jobs_of(2)
    assert new != old
    assert not alive(pid)
    error = family.ended(old)
    assert error is not None
    assert error.endswith("has submitted another job of its name: the variable 'LEVEL'")
    family.finish("step")
    (again,) = set(family.running("step", 2)) - {pid}
    assert parent.results(120) == [[[again]]]


@pytest.mark.proof
def test_children_of_one_name_are_each_adopted_once(family: Family) -> None:
    one, two = family.child("one"), family.child("two")

    def submits(attempt: int) -> list[JobHandle]:
        steps = [one, two, two] if attempt == 1 else [two, one, two]
        return [IrisClient().submit(step, "step", resources=SMALL) for step in steps]

    parent = family.submit(submits)
    (first,), others = family.running("one"), family.running("two", 2)
    first_id, *other_ids = family.jobs_of(1)
    family.kill_parent()
    found = family.jobs_of(2)
    assert found[1] == first_id
    assert sorted(found) == sorted([first_id, *other_ids])
    family.finish("one")
    family.finish("two")
    (results,) = parent.results(120)
    assert results[1] == [first]
    assert sorted([*results[0], *results[2]]) == sorted(others)


def test_child_that_no_attempt_asks_for_ends_with_the_parents_job(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(lambda attempt: [IrisClient().submit(step, "step", resources=SMALL)] if attempt == 1 else [])
    (pid,), (job_id,) = family.running("step"), family.jobs_of(1)
    family.kill_parent()
    assert parent.results(120) == [[]]
    assert family.ended(job_id) == f"{parent.job_id}, whose task had submitted it, has ended"
    wait_until(lambda: not alive(pid), 10)
    wait_until(lambda: not pools_left(parent.job_id), 30)


def test_children_end_with_a_cancelled_parent_after_a_restart_of_the_controller(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL)])
    (pid,), (job_id,) = family.running("step"), family.jobs_of(1)
    kill_controller()
    family.kill_parent()
    assert family.jobs_of(2) == [job_id]
    assert alive(pid)
    kill_controller()
    parent.cancel()
    assert "has ended" in str(family.ended(job_id))
    wait_until(lambda: not alive(pid), 30)


@pytest.mark.proof
def test_failed_child_begins_again(family: Family, tmp_path: Path) -> None:
    def step() -> str:
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ValueError("once")
        return "done"

    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL)])
    (job_id,) = family.jobs_of(1)
    wait_until(lambda: family.state(job_id) is JobState.FAILED)
    family.kill_parent()
    assert parent.results(120) == [[["done"]]]


@pytest.mark.proof
def test_grandchild_stays_while_the_parent_restarts(family: Family, tmp_path: Path) -> None:
    leaf = family.child("leaf")

    def step() -> Any:
        job = IrisClient().submit(leaf, "leaf", resources=SMALL)
        (tmp_path / "grandchild").write_text(job.job_id)
        return job.results(120)

    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL, children="adopt")])
    (pid,), (job_id,) = family.running("leaf"), family.jobs_of(1)
    family.kill_parent()
    assert family.jobs_of(2) == [job_id]
    assert alive(pid)
    parent.cancel()
    grandchild = (tmp_path / "grandchild").read_text()
    assert family.ended(grandchild) == f"{job_id}, whose task had submitted it, has ended"
    wait_until(lambda: not alive(pid), 10)


@pytest.mark.proof
def test_children_with_a_secret_or_a_large_function_are_adopted(family: Family) -> None:
    step, data = family.child("step"), bytes(300_000)

    def large() -> tuple[int, Any]:
        return len(data), step()

    def submits(_: int) -> list[JobHandle]:
        client = IrisClient()
        with_secret = client.submit(step, "secret", resources=SMALL, secrets={"KEY": Secret("abc")})
        return [with_secret, client.submit(large, "large", resources=SMALL)]

    parent = family.submit(submits)
    family.running("step", 2)
    before = family.jobs_of(1)
    family.kill_parent()
    assert family.jobs_of(2) == before
    family.finish("step")
    assert parent.results(120)[0][1][0][0] == len(data)


@pytest.mark.proof
def test_each_task_of_a_gang_adopts_its_child_when_the_slice_is_preempted(
    family: Family, cluster: SimulatedCluster, tmp_path: Path
) -> None:
    step = family.child("step")

    def parent() -> Any:
        me = get_job_info()
        assert me is not None
        job = IrisClient().submit(step, "step", resources=SMALL)
        (tmp_path / f"task-{me.attempt}-{me.task_index}").write_text(f"{job.job_id} {me.slice_name}")
        time.sleep(600 if me.attempt == 1 else 0)
        return job.results(120)

    def written(attempt: int) -> list[list[str]]:
        files = sorted(tmp_path.glob(f"task-{attempt}-*"))
        texts = wait_until(lambda: len(files) == 2 and all(found := [f.read_text() for f in files]) and found, 1)
        return [text.split() for text in texts]

    job = family.client.submit(parent, "parent", resources=ResourceSpec(device=tpu_device("v4-16")), children="adopt")
    pids = family.running("step", 2)
    wait_until(lambda: len(list(tmp_path.glob("task-1-*"))) == 2)
    first = written(1)
    cluster.preempt_slice(first[0][1])
    wait_until(lambda: len(list(tmp_path.glob("task-2-*"))) == 2, 90)
    assert [job_id for job_id, _ in written(2)] == [job_id for job_id, _ in first]
    assert all(map(alive, pids))
    family.finish("step")
    assert sorted(job.results(120)) == sorted([pid] for pid in pids)


def test_child_whose_pool_dies_while_the_parent_is_away_is_adopted(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL)])
    family.running("step")
    (job_id,) = family.jobs_of(1)
    pool = ray.get_actor(f"pool/{job_id}", "iris_ray")
    os.kill(ray.get(pool.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    family.kill_parent()
    assert family.jobs_of(2) == [job_id]
    family.running("step", 2)  # a pool that dies takes its attempts along
    family.finish("step")
    assert len(parent.results(120)) == 1
    wait_until(lambda: not pools_left(parent.job_id), 30)


def test_without_the_option_children_end_and_begin_again(family: Family) -> None:
    step = family.child("step")
    parent = family.submit(lambda _: [IrisClient().submit(step, "step", resources=SMALL)], children="end")
    (pid,), (old,) = family.running("step"), family.jobs_of(1)
    family.kill_parent()
    (new,) = family.jobs_of(2)
    assert new != old
    wait_until(lambda: not alive(pid), 10)
    family.finish("step")
    (again,) = set(family.running("step", 2)) - {pid}
    assert parent.results(120) == [[[again]]]
