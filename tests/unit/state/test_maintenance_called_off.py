"""A maintenance that was announced and is called off: the host is as good as new, unless it is to go anyway."""

import pytest

from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import NoticeKind
from iris_ray.state.events import Event, MaintenanceCalledOffEvent, WorkerDrainedEvent
from iris_ray.state.instructions import DropSpare, Instructions
from tests.support.worlds import World, host

MAINTENANCE, PREEMPTION = NoticeKind.MAINTENANCE, NoticeKind.PREEMPTION
START = 700.0


@pytest.fixture
def slices() -> str:
    return "abc"


def announce(world: World, node_id: str = "a-1", start: float | None = START) -> Instructions:
    return world.do(WorkerDrainedEvent(node_id, "maintenance", MAINTENANCE, start))


def call_off(world: World, node_id: str = "a-1") -> Instructions:
    return world.do(MaintenanceCalledOffEvent(node_id))


def told(instructions: Instructions) -> list[tuple[str, NoticeKind, float]]:
    return [(notice.attempt.job_id, notice.notice.kind, notice.notice.deadline) for notice in instructions.notices]


@pytest.mark.parametrize("start", [START, None])
def test_host_takes_jobs_after_cancelled_maintenance(world: World, start: float | None) -> None:
    for number in range(2):
        announce(world, f"a-{number}", start)
    job = world.submit(slices=(3,))
    assert not world.schedule()
    call_off(world, "a-0")
    assert not world.schedule(), "the other one is to go still"
    call_off(world)
    assert world.state.workers["a-1"].draining is None
    assert world.state.workers["a-1"].notice is None
    world.schedule()
    assert set(job.gang.groups) == {"a", "b", "c"}


@pytest.mark.parametrize("placed", [True, False])
def test_replacement_is_dropped_when_nothing_is_doomed(world: World, placed: bool) -> None:
    job = world.start(slices=(2,), max_retries_preemption=5)
    announce(world)
    assert list(world.state.jobs) == ["job", "job/replacement-1"]
    if placed:
        world.schedule()
        assert world.busy() == {f"{name}-{number}" for name in "abc" for number in range(2)}
    instructions = call_off(world)
    assert instructions.dropped == ([DropSpare("job/replacement-1", "pool-a")] if placed else [])
    assert instructions.notices == []
    assert (list(world.state.jobs), job.state, job.gang.attempt) == (["job"], JobState.RUNNING, 1)
    assert world.busy() == {"a-0", "a-1", "b-0", "b-1"}


def test_later_notice_is_told_again(world: World) -> None:
    job = world.start(max_retries_preemption=5)
    assert told(announce(world)) == [("job", MAINTENANCE, START)]
    world.state.unrecorded.clear()
    call_off(world)
    assert job.gang.notice is None
    assert "job" in world.state.unrecorded, "its successor must not tell it"
    for start in (START + 3600.0, START):
        assert told(announce(world, start=start)) == [("job", MAINTENANCE, start)]


@pytest.mark.parametrize("by_ray", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("end", [130.0, START, 9000.0, None])
def test_drain_or_preemption_outlasts_cancelled_maintenance(
    world: World, by_ray: bool, first: bool, end: float | None
) -> None:
    job = world.start(max_retries_preemption=5)
    final: Event = WorkerDrainedEvent("a-1", "goes for good", PREEMPTION, end)
    if by_ray:
        final = host("a", 1, draining="goes for good", deadline=end)
    for said in [True, False] if first else [False, True]:
        world.do(final) if said else announce(world)
    assert world.state.knows(host("a", 1, draining="Ray drains it", deadline=end)), "it need not be said again"
    world.do(host("a", 1, foreign="a stranger"))  # it reports something else, and is still to go
    for _ in range(2):
        call_off(world)
        worker = world.state.workers["a-1"]
        assert worker.draining == "goes for good"
        assert worker.notice == job.gang.notice
        assert worker.notice is not None
        assert (worker.notice.kind, worker.notice.reason) == (PREEMPTION, "a host 1: goes for good")
        assert end is None or worker.notice.deadline == end
        assert list(world.state.jobs) == ["job", "job/replacement-1"]


def test_drain_hidden_by_cancelled_maintenance_is_told(world: World) -> None:
    world.start(max_retries_preemption=5)
    announce(world)
    assert not world.state.knows(host("a", 1, draining="Ray drains it", deadline=9000.0))
    assert told(world.do(host("a", 1, draining="Ray drains it", deadline=9000.0))) == []
    assert told(world.do(WorkerDrainedEvent("a-1", "preempted", PREEMPTION, 800.0))) == []
    assert told(call_off(world)) == [("job", PREEMPTION, 800.0)], "the nearer one of what is left"


def test_gang_hears_of_other_hosts_maintenance_instead(world: World) -> None:
    job = world.start(slices=(2,), max_retries_preemption=5)
    announce(world, "a-0", START)
    announce(world, "b-0", START + 100.0)
    announce(world, "b-1", START + 50.0)
    assert told(call_off(world, "a-0")) == [("job", MAINTENANCE, START + 50.0)]
    assert told(call_off(world, "b-0")) == [], "it has heard of a nearer one"
    assert job.gang.notice is not None
    assert job.gang.notice.deadline == START + 50.0
