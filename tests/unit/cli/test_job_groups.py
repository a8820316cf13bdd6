"""Groups of jobs at the real Controller: what is refused, what people see, and the Python side."""

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from iris_ray import IrisClient, JobGroup, ResourceSpec, tpu_device
from iris_ray.client.job_group import GroupHandle
from iris_ray.errors import InvalidJobError, InvalidRequestError
from iris_ray.model.lifecycle import JobState
from iris_ray.model.options import PriorityBand
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until
from tests.support.worlds import gang_spec, in_group

SLICE = ResourceSpec(device=tpu_device("v4-16"))


def submit(world: ControllerInProcess, **slices: int) -> list[str]:
    """Submit jobs of a group, each on so many slices."""
    values: dict[str, Any] = {"user": "ann", "max_retries_failure": 0}
    specs = in_group(*(gang_spec(name, slices=(count,), **values) for name, count in slices.items()))
    return [world.submitted(spec) for spec in specs]


def test_group_is_seen_waiting_running_and_ending(world: ControllerInProcess) -> None:
    first = world.start("first", slices=(2,))
    trainer, sampler = submit(world, trainer=1, sampler=1)
    why = world.iris("why", sampler).stdout
    assert "group rl starts as a whole, and sampler can't start" in why
    assert "group" in world.iris("job", "status", trainer).stdout
    assert [job["group"] for job in world.json("ls")] == ["", "rl", "rl"]
    assert "GROUP" in world.iris("ls").stdout
    world.succeed(first)
    for job_id in (trainer, sampler):
        world.wait_for_attempt(job_id, 1)
    world.iris("cancel", sampler)
    assert world.state(trainer) is JobState.KILLED
    assert "sampler of its group rl has ended as killed: cancelled by ann" in world.iris("why", trainer).stdout


def test_jobs_of_a_group_that_are_cancelled_together_are_all_cancelled(world: ControllerInProcess) -> None:
    jobs = submit(world, trainer=1, sampler=1)
    for job_id in jobs:
        world.wait_for_attempt(job_id, 1)
    found = world.json("cancel", *jobs)
    assert [(one["job_id"], one["cancelled"]) for one in found] == [("trainer", True), ("sampler", True)]
    assert {one["state_before"] for one in found} <= {"STARTING", "RUNNING"}
    assert not any(one["cancelled"] for one in world.json("cancel", *jobs))


def test_group_that_can_never_start_is_refused_as_a_whole(world: ControllerInProcess) -> None:
    with pytest.raises(InvalidJobError, match="trainer and sampler need 8 hosts with chips at once"):
        submit(world, trainer=2, sampler=2)
    assert world.state("trainer") is JobState.KILLED
    assert "can never start: trainer and sampler need 8 hosts" in world.iris("why", "trainer").stdout


def test_incomplete_group_says_what_it_waits_for(world: ControllerInProcess) -> None:
    one, two = in_group(gang_spec("trainer", user="ann"), gang_spec("sampler", user="ann"))
    world.submitted(one)
    assert "waits until the other jobs of its group rl are submitted" in world.iris("why", "trainer").stdout
    with pytest.raises(InvalidJobError, match="differ in group, user, team or band"):
        world.submitted(replace(two, priority=PriorityBand.BATCH))


def test_client_submits_waits_for_and_cancels_group(world: ControllerInProcess) -> None:
    def ends(handle: GroupHandle, *names: str) -> None:
        for name in names:
            world.wait_for_attempt(handle.jobs[name].job_id, 1)
            world.succeed(handle.jobs[name].job_id)

    group = JobGroup("rl", main="trainer").add(time.time, "trainer", resources=SLICE)
    group.add(time.time, "sampler", resources=SLICE)
    with mock.patch.dict("os.environ", IRIS_USER="ann"):
        client = IrisClient()
        handle = client.submit_group(group)
        assert handle.state in (JobState.PENDING, JobState.RUNNING)
        ends(handle, "trainer")
        assert handle.results(60) == {"trainer": [None, None], "sampler": None}
        wait_until(lambda: handle.state is JobState.SUCCEEDED)
        assert {name: one.state for name, one in handle.wait().items()}["sampler"] is JobState.KILLED
        again = client.submit_group(group)
        assert {*again.jobs} == {*handle.jobs}
        assert again.cancel()
        assert not again.cancel()
        assert again.state is JobState.KILLED


def test_group_that_makes_no_sense_is_refused_here() -> None:
    group = JobGroup("rl").add(time.time, "trainer")
    for wrong in (
        lambda: JobGroup("no name"),
        lambda: JobGroup("rl")._requests(),
        lambda: JobGroup("rl", main="nobody").add(time.time, "trainer")._requests(),
        lambda: group.add(time.time, "trainer"),
        lambda: group.add(time.time, "a/b"),
        lambda: group.add(time.time, "x", resources=3),  # type: ignore[arg-type]
        lambda: group.add(divmod, "x"),
        lambda: JobGroup("rl").add(time.time, "a").add(time.time, "b", priority=PriorityBand.BATCH)._requests(),
    ):
        with pytest.raises(InvalidRequestError):
            wrong()
