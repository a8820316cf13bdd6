"""Worlds in which groups of jobs of several sizes share the chips of a reservation with other jobs.

A group starts all or none of its jobs, so these must not wait for ever for idle slices that later jobs keep. The rules
are those of `test_lower_bands_worlds.py`.
"""

from typing import Any

import pytest

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.options import PriorityBand
from iris_ray.state.events import JobCancelledEvent, JobSubmittedEvent
from tests.support.worlds import MANY, gang_spec, in_group, submit_group
from tests.unit.capacity.test_lower_bands_worlds import TURN_S, World

INTERACTIVE = PriorityBand.INTERACTIVE


class GroupWorld(World):
    """A world of jobs that run for five turns, each name with a user of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, chips: int = 32) -> None:
        self.chips = chips
        super().__init__(1, False, monkeypatch, ())

    def specs(self, name: str, *types: str) -> list[JobSpec]:
        ids = {f"{name}-{number}": tpu_type for number, tpu_type in enumerate(types)}
        self.length |= dict.fromkeys(ids, 5 * TURN_S)
        about: dict[str, Any] = {"user": name, "priority": INTERACTIVE, **MANY}
        return [gang_spec(i, tpu_type, **about) for i, tpu_type in ids.items()]

    def group(self, name: str, *types: str) -> None:
        submit_group(self.cluster, *self.specs(name, *types), name=name)

    def single(self, job_id: str, tpu_type: str, slices: int = 1) -> None:
        self.length[job_id] = 5 * TURN_S
        about: dict[str, Any] = {"user": job_id, "priority": INTERACTIVE, **MANY}
        self.cluster.submit(job_id, tpu_type=tpu_type, slices=(slices,), **about)

    def turns(self, most: int) -> None:
        for _ in range(most):
            if self.is_over:
                return
            self.turn()

    @property
    def waiting(self) -> list[str]:
        return [job_id for job_id, job in self.state.jobs.items() if job.pending]


def test_groups_that_each_find_one_of_their_slices_idle_do_not_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = GroupWorld(monkeypatch)
    world.single("first", "v4-32")
    world.single("second", "v4-32")
    world.turns(8)
    world.group("rl", "v4-32", "v4-16")
    world.group("eval", "v4-32", "v4-16")
    world.single("large", "v4-64")
    world.turns(200)
    assert world.waiting == []


def test_groups_whose_jobs_were_submitted_in_turn_do_not_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = GroupWorld(monkeypatch)
    groups = [in_group(*world.specs(name, "v4-32", "v4-16"), name=name) for name in ("rl", "eval")]
    for pair in zip(*groups, strict=True):
        for spec in pair:
            world.cluster.do(JobSubmittedEvent(spec, world.cluster.now))
    world.turns(200)
    assert world.waiting == []


def test_group_and_a_later_job_that_finds_some_of_its_slices_idle_do_not_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = GroupWorld(monkeypatch, chips=24)
    world.single("first", "v4-8")
    world.turns(8)
    world.group("rl", "v4-32", "v4-16")
    world.single("later", "v4-8", slices=3)
    world.turns(200)
    assert world.waiting == []


def test_group_that_the_reservation_could_never_hold_keeps_no_slice_from_later_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = GroupWorld(monkeypatch)
    world.group("rl", "v4-64", "v4-8")
    world.turns(3)
    world.single("later", "v4-8")
    world.turns(60)
    assert world.waiting == ["rl-0", "rl-1"]
    assert world.google.made == 1, "for the later job"


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_calm_world_of_groups_runs_every_job_and_makes_no_more_slices_than_they_need(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = GroupWorld(monkeypatch)
    world.random.seed(seed)
    needed = 0
    for number in range(120):
        if world.random.random() < 0.2:
            types = world.random.sample(("v4-8", "v4-16", "v4-32"), world.random.choice((1, 2, 2, 3)))
            needed += len(types)
            if len(types) > 1:
                world.group(f"group-{number}", *types)
            else:
                slices = world.random.randint(1, 2)
                needed += slices - 1
                world.single(f"single-{number}", types[0], slices)
        if world.random.random() < 0.02 and (waiting := world.waiting):
            world.cluster.do(JobCancelledEvent(world.random.choice(waiting), "enough"))
        world.turn()
    world.turns(1000)
    assert world.waiting == []
    assert world.google.made <= needed
