"""When a gang moves to more slices: the price of the move against what it wins, and no move to and fro."""

from typing import Any

import pytest

from iris_ray.model.goodput import Marks
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import NoticeKind
from iris_ray.state.events import (
    AttemptMarkedEvent,
    GangMovedEvent,
    PromiseEvent,
    TimePassedEvent,
    WorkerFailedEvent,
)
from iris_ray.state.growth import LEAST_S, LEAST_TO_RETURN_S, MOST_S, UNKNOWN_S, patience_s
from tests.support.worlds import S, World, attempt_id, hosts_of


@pytest.fixture
def slices() -> str:
    return "abc"


def passes(world: World, seconds: float) -> list[NoticeKind]:
    """Let time pass; return what gangs are told then."""
    world.now += seconds
    return [told.notice.kind for told in world.state.handle_event(TimePassedEvent(world.now)).notices]


def room(world: World) -> Job | None:
    return next((job for job_id, job in world.state.jobs.items() if job_id.startswith("job/growth")), None)


def runs(world: World, job: Job, steps: tuple[int, int] | None = None, start_s: float = 1.0) -> None:
    """The job's gang is placed and runs. It names two steps, a second each, the first after a start."""
    world.schedule()
    world.report_all(job, S.RUNNING)
    if steps is not None:
        first, second = steps
        marks = Marks(((first, start_s), (second, start_s + float(second - first))))
        world.do(AttemptMarkedEvent(attempt_id(job), marks))
    world.schedule()
    if (held := room(world)) is not None and held.gang.placed:
        world.report_all(held, S.RUNNING)


def small(world: World, **changes: Any) -> Job:
    """A gang on slice c, where it would have two; slices a and b are another job's."""
    world.submit("other", slices=(2,), user="bob")
    world.schedule()
    job = world.submit(slices=(1, 2), max_retries_preemption=9, **changes)
    runs(world, job)
    assert job.gang.groups == ("c",)
    return job


def frees(world: World, name: str = "d") -> None:
    """A slice appears, and the room to grow is made ready there."""
    world.add_slice(name)
    world.schedule()
    held = room(world)
    assert held is not None
    world.report_all(held, S.RUNNING)


def moves(world: World, job: Job, steps: tuple[int, int] | None = None, start_s: float = 1.0) -> None:
    """The gang saves its state at once, and runs on more slices."""
    assert job.gang.is_to_grow
    number = job.attempt
    world.do(GangMovedEvent(AttemptId("job", number), "to more slices"))
    world.confirm(job, number)
    runs(world, job, steps, start_s)


def loses(world: World, job: Job, name: str) -> None:
    """The gang loses a slice without notice, and runs on what is left."""
    number = job.attempt
    for host in range(2):
        world.do(WorkerFailedEvent(f"{name}-{host}", "gone"))
    world.confirm(job, number)
    runs(world, job)


def test_unmeasured_gang_waits_for_cautious_price(world: World) -> None:
    job = small(world)
    passes(world, 5000.0)
    frees(world)
    assert passes(world, UNKNOWN_S - 1.0) == []
    assert passes(world, 2.0) == [NoticeKind.GROWTH]
    moves(world, job)
    assert sorted(job.gang.groups) == ["c", "d"]


def test_measured_gang_moves_once_wait_equals_moves_cost(world: World) -> None:
    """A crash cost it a step of 1 s that broke off, and 399 s until the next step: no move costs more."""
    job = small(world, max_retries_failure=3)
    world.do(AttemptMarkedEvent(attempt_id(job), Marks(((0, 1.0), (1, 2.0), (9, 10.0)))))
    world.now += 11.0
    world.report(job, S.FAILED)
    world.confirm(job, 1)
    runs(world, job, steps=(9, 10), start_s=399.0)
    world.now += 400.0
    assert patience_s(job, 1, 1, world.now) == pytest.approx(400.0)
    frees(world)
    assert passes(world, 399.0) == []
    assert passes(world, 2.0) == [NoticeKind.GROWTH]


def test_gang_moves_to_its_slices_while_another_type_is_waited_for(world: World) -> None:
    """A job that can't use the slices does not keep the gang from them; a move in vain would cost it an attempt."""
    job = small(world)
    world.submit("stuck", tpu_type="v4-64", user="carol")
    passes(world, 5000.0)
    frees(world)
    assert passes(world, UNKNOWN_S + 1.0) == [NoticeKind.GROWTH]
    moves(world, job)
    assert sorted(job.gang.groups) == ["c", "d"]


@pytest.mark.parametrize(("have", "gained", "share"), [(1, 1, 1.0), (3, 1, 3.0), (2, 3, 2 / 3), (2, 2, 1.0)])
def test_patience_is_price_over_gain(world: World, have: int, gained: int, share: float) -> None:
    job = world.start()
    assert patience_s(job, have, gained, world.now) == pytest.approx(UNKNOWN_S * share)


def test_patience_has_floor_and_limit(world: World) -> None:
    job = world.start()
    assert patience_s(job, 1, 1000, world.now) == LEAST_S
    job.gang.groups_wanted = 1001
    assert patience_s(job, 1, 1000, world.now) == LEAST_TO_RETURN_S, "it goes back to what it had"
    job.gang.growths_undone = 1_000_000
    assert patience_s(job, 1, 1, world.now) == MOST_S


def test_gang_that_grew_and_shrank_waits_twice_as_long(world: World) -> None:
    job = small(world)
    waited = []
    for name in "defg":
        frees(world, name)
        waited.append(patience_s(job, 1, 1, world.now))
        assert passes(world, waited[-1] - 1.0) == []
        assert passes(world, 2.0) == [NoticeKind.GROWTH]
        moves(world, job)
        passes(world, 30.0)
        loses(world, job, name)
        assert job.gang.groups == ("c",)
    assert waited == [UNKNOWN_S, 2 * UNKNOWN_S, 4 * UNKNOWN_S, 8 * UNKNOWN_S]


def test_growth_that_has_paid_is_forgotten(world: World) -> None:
    job = small(world)
    job.gang.growths_undone = 3
    frees(world)
    passes(world, patience_s(job, 1, 1, world.now))
    moves(world, job)
    passes(world, 8 * UNKNOWN_S + 1.0)
    loses(world, job, "d")
    assert job.gang.growths_undone == 0


def test_move_that_wins_no_slice_counts_as_undone(world: World) -> None:
    job = small(world)
    frees(world)
    passes(world, UNKNOWN_S)
    world.do(WorkerFailedEvent("d-0", "gone"))
    world.do(GangMovedEvent(attempt_id(job), "it has saved already"))
    world.confirm(job, 1)
    runs(world, job)
    assert (job.gang.groups, job.gang.growths_undone) == (("c",), 1)


def test_gang_asks_again_for_room_after_pause(world: World) -> None:
    """A job that waits has taken it. Otherwise the slices would be reserved for the gang again and again."""
    small(world)
    frees(world)
    held = room(world)
    assert held is not None
    world.submit("waits", user="carl")
    world.do(PromiseEvent("waits", hosts_of(held), (held.current_attempt(held.gang),)))
    assert room(world) is None
    passes(world, UNKNOWN_S - 1.0)
    assert room(world) is None
    passes(world, 2.0)
    assert room(world) is not None
