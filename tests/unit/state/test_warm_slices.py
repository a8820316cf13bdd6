"""Slices that their owners keep warm."""

from iris_ray.model.lifecycle import TaskState
from iris_ray.state.events import (
    SliceReleasedEvent,
)
from iris_ray.state.instructions import ReclaimSlice
from tests.support.worlds import World

S = TaskState


def test_slice_belongs_to_gangs_owner_until_released(world: World) -> None:
    job = world.start()
    world.report_all(job, S.SUCCEEDED)
    world.confirm(job)
    assert world.state.holders == {"a": "pool-a"}
    world.do(SliceReleasedEvent("a", "pool-b"))  # not its to release
    assert world.state.holders == {"a": "pool-a"}
    world.do(SliceReleasedEvent("a", "pool-a"))
    assert world.state.holders == {}


def test_anothers_warm_slice_is_reclaimed_despite_late_release(world: World) -> None:
    world.keep_warm("pool-b")
    world.submit()
    assert world.schedule()["job"].reclaim == [ReclaimSlice("a", "pool-b")]
    world.do(SliceReleasedEvent("a", "pool-b"))
    assert world.state.holders["a"] == "pool-a"


def test_own_warm_slice_is_not_reclaimed(world: World) -> None:
    world.keep_warm("pool-a")
    world.do(SliceReleasedEvent("a", "pool-a"))
    job = world.submit()
    assert world.schedule()["job"].reclaim == []
    assert job.gang.groups == ("b",)


def test_slice_kept_by_its_holder_is_reclaimed_again(world: World) -> None:
    """``holders`` says who keeps actors on a slice; a launch that failed changed nothing about that."""
    world.keep_warm("pool-b")
    job = world.submit()
    reclaimed = []
    for _ in range(3):
        reclaimed += world.schedule()["job"].reclaim
        world.dispatch_fails(job)
        world.confirm(job)
        world.now = job.gang.not_before
    assert reclaimed == [ReclaimSlice(name, "pool-b") for name in "aba"]  # another one first, as long as there is one
