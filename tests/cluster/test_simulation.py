"""The simulator against the real thing: the same short story, the same decisions.

The story is played on a simulated cluster with the real Controller, real pools and real processes, and in virtual time.
After each step both have the same gangs on the same slices.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from iris_ray import CoschedulingConfig, IrisClient, PriorityBand, ResourceSpec, tpu_device
from iris_ray.model.lifecycle import JobState
from iris_ray.study import SimulatedJob, Simulation
from iris_ray.study.jobs import slice_spec
from iris_ray.testing import SimulatedCluster
from tests.support.waiting import wait_until

Places = dict[str, tuple[str, ...]]
"""The slices of each gang that runs, by the name of its job."""
STEP_S = 30.0
LONG_S = 1e6


class RealCluster:
    """The story's steps on real processes. Each job runs until its file is there."""

    def __init__(self, cluster: SimulatedCluster, directory: Path) -> None:
        self._cluster = cluster
        self._client = IrisClient()
        self._directory = directory
        self._ids: dict[str, str] = {}

    def submit(self, name: str, slices: int, band: PriorityBand) -> None:
        finish = self._directory / name

        def until_told() -> None:
            while not finish.exists():
                time.sleep(0.05)

        handle = self._client.submit(
            until_told,
            name,
            resources=ResourceSpec(device=tpu_device("v4-16")),
            coscheduling=CoschedulingConfig(num_groups=slices),
            priority=band,
        )
        self._ids[name] = handle.job_id

    def finish(self, name: str) -> None:
        (self._directory / name).touch()

    def preempt(self, slice_name: str) -> None:
        self._cluster.preempt_slice(slice_name)

    def add_slice(self) -> None:
        self._cluster.add_slice("v4-16")

    def places(self) -> Places:
        jobs = {job.job_id: job for job in self._client.list_jobs()}
        found = ((name, jobs[job_id]) for name, job_id in self._ids.items())
        return {name: tuple(job.groups) for name, job in found if job.state is JobState.RUNNING and not job.starting}


class VirtualCluster:
    """The same steps in virtual time."""

    def __init__(self) -> None:
        self.simulation = Simulation(check_every=1)
        self.simulation.hosts.add_slices("v4-16", 3)

    def submit(self, name: str, slices: int, band: PriorityBand) -> None:
        spec = slice_spec(name, "v4-16", slices, owner="driver", user="ann", priority=band)
        self.simulation.submit(SimulatedJob(spec, LONG_S, keep_warm_s=60.0))

    def finish(self, name: str) -> None:
        self.simulation.finish(name)

    def preempt(self, slice_name: str) -> None:
        self.simulation.hosts.preempt(slice_name, away_s=LONG_S)

    def add_slice(self) -> None:
        self.simulation.hosts.add_slices("v4-16")

    def places(self) -> Places:
        self.simulation.run_until(self.simulation.now + STEP_S)
        jobs = self.simulation.state.jobs
        return {name: job.gang.groups for name, job in jobs.items() if job.gang.placed}


INTERACTIVE, PRODUCTION = PriorityBand.INTERACTIVE, PriorityBand.PRODUCTION
Cluster = RealCluster | VirtualCluster
STORY: list[Callable[[Cluster], None]] = [
    lambda on: on.submit("long", 2, INTERACTIVE),
    lambda on: on.submit("two", 2, INTERACTIVE),  # waits
    lambda on: on.submit("one", 1, INTERACTIVE),  # passes it
    lambda on: on.submit("urgent", 1, PRODUCTION),  # waits, but goes first
    lambda on: on.finish("long"),
    lambda on: on.submit("small", 1, INTERACTIVE),  # passes "two" again
    lambda on: on.finish("urgent"),
    lambda on: on.preempt("v4-16-2"),  # "one" goes where "urgent" was
    lambda on: on.finish("small"),
    lambda on: on.add_slice(),  # room for "two", at last
    lambda on: on.finish("one"),
    lambda on: on.finish("two"),
]


@pytest.mark.usefixtures("no_shared_cluster")
@pytest.mark.long
def test_short_story_has_same_decisions_in_virtual_time(tmp_path: Path) -> None:
    virtual = VirtualCluster()
    expected = []
    for step in STORY:
        step(virtual)
        expected.append(virtual.places())
    assert len({tuple(sorted(places.items())) for places in expected}) > 8, "the story tells something"
    with SimulatedCluster({"v4-16": 3}, quiet=True) as cluster:
        real = RealCluster(cluster, tmp_path)
        for number, (step, places) in enumerate(zip(STORY, expected, strict=True)):
            step(real)
            try:
                wait_until(lambda places=places: real.places() == places, 60)  # type: ignore[misc]
            except AssertionError:
                raise AssertionError(f"after step {number}: {real.places()}, in virtual time {places}") from None
