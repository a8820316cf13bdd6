"""Groups of jobs on a real cluster, when something else than a slice is lost."""

from pathlib import Path

import pytest

from iris_ray import IrisClient, JobGroup, ResourceSpec, run_on_pod_ray, tpu_device
from iris_ray.model.lifecycle import JobState
from tests.support.gangs import Trace, kill_controller, result_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.proof
def test_group_that_waits_outlives_controller_and_starts_together(trace: Trace, tmp_path: Path) -> None:
    members = {name: Trace(tmp_path / name) for name in ("trainer", "sampler")}
    group = JobGroup("rl")
    for name, member in members.items():
        member.directory.mkdir()
        member.finish()
        group.add(member.gang(), name, resources=ResourceSpec(device=tpu_device("v4-16")))
    before = run_on_pod_ray.remote(trace.gang(), "v4-16", num_slices=2)
    trace.wait_for_tasks(4)
    handle = IrisClient().submit_group(group)
    wait_until(lambda: all("rl" in str(status.waiting) for status in handle.status().values()))
    for _ in range(2):
        kill_controller()
        assert handle.state is JobState.PENDING
    assert not any(member.starts() for member in members.values()), "one slice is free, and half a group is none"
    trace.finish()
    assert len(result_of(before)) == 4
    results = handle.results()
    assert {name: len(of or ()) for name, of in results.items()} == {"trainer": 2, "sampler": 2}
    assert handle.state is JobState.SUCCEEDED
    assert [len(member.starts()) for member in members.values()] == [2, 2]
