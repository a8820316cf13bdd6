"""The Controller's clock: whoever sets the wall clock, no job's time gets longer or shorter."""

import asyncio
import logging
import time
from collections.abc import Iterator

import pytest

from iris_ray.actors.controller.clock import JUMPS_KEPT, MOST_AWAY_S, Clock
from iris_ray.model.lifecycle import JobState
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.state.events import WorkerDrainedEvent
from tests.support.virtual_cluster import VirtualCluster, played

BEGAN = 1_700_000_000.0
HOUR_S = 3600.0


class Watches:
    """The wall clock and the monotonic clock of a machine."""

    def __init__(self) -> None:
        self.wall, self.steady = BEGAN, 50.0

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watches]:
    found = Watches()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: found.wall)
        patch.setattr(time, "monotonic", lambda: found.steady)
        yield found


def test_clock_equals_wall_clock_until_it_jumps(watches: Watches) -> None:
    clock = Clock()
    watches.pass_by(7.0)
    clock.look()
    assert clock.now() == clock.wall(clock.now()) == watches.wall == BEGAN + 7.0
    assert clock.jumps == []


@pytest.mark.parametrize("jump", [HOUR_S, -HOUR_S])
def test_clock_is_steady_and_names_wall_clock_jumps(
    watches: Watches, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    watches.pass_by(10.0)
    with caplog.at_level(logging.WARNING):
        watches.wall += jump
        for _ in range(2):
            clock.look()
    assert f"jumped by {jump:+.0f} s" in caplog.text
    assert len(caplog.records) == 1
    watches.pass_by(5.0)
    assert clock.now() == BEGAN + 15.0
    assert clock.jumps == [(BEGAN + 10.0 + jump, jump)]


@pytest.mark.parametrize("jump", [HOUR_S, -HOUR_S])
def test_past_times_are_shown_by_wall_clock_of_then(watches: Watches, jump: float) -> None:
    clock = Clock()
    watches.pass_by(10.0)
    watches.wall += jump
    clock.look()
    watches.pass_by(1.0)
    assert (clock.wall(BEGAN + 3.0), clock.wall(clock.now())) == (BEGAN + 3.0, watches.wall)
    assert clock.wall_or_none(None) is None


@pytest.mark.parametrize("jump", [HOUR_S, -HOUR_S])
def test_foreign_deadlines_are_read_by_wall_clock(watches: Watches, jump: float) -> None:
    clock = Clock()
    watches.wall += jump
    heard = clock.heard(WorkerDrainedEvent("a", "spot", deadline=watches.wall + 30.0)).deadline
    assert heard == clock.now() + 30.0
    assert clock.told(Notice(NoticeKind.PREEMPTION, "spot", heard)).deadline == watches.wall + 30.0
    assert clock.heard(WorkerDrainedEvent("a", "spot")).deadline is None


@pytest.mark.parametrize(
    ("away", "passed"),
    [(0.0, 0.0), (20.0, 20.0), (MOST_AWAY_S + HOUR_S, MOST_AWAY_S), (-HOUR_S, 0.0)],
    ids=["at once", "soon", "long after, or set forward", "set back"],
)
def test_successors_clock_continues_where_predecessor_stopped(watches: Watches, away: float, passed: float) -> None:
    first = Clock()
    watches.wall -= HOUR_S
    first.look()
    recorded, then = first.record(), first.now()
    watches.wall, watches.steady = watches.wall + away, 1.0  # on another machine
    clock = Clock()
    clock.go_on_from(recorded)
    assert clock.now() == pytest.approx(then + passed)
    assert clock.wall(clock.now()) == pytest.approx(watches.wall)
    assert len(clock.jumps) == (1 if away == passed else 2)


def test_only_latest_clock_jumps_are_kept(watches: Watches) -> None:
    clock = Clock()
    for _ in range(3 * JUMPS_KEPT):
        watches.pass_by(100.0)
        watches.wall += HOUR_S
        clock.look()
    assert len(clock.jumps) == JUMPS_KEPT
    assert clock.wall(clock.now()) == watches.wall


# -- whole jobs --------------------------------------------------------------------------------------------------------


def set_wall_clock(patch: pytest.MonkeyPatch, by: float) -> None:
    before = time.time
    patch.setattr(time, "time", lambda: before() + by)


@played(slices=1)
@pytest.mark.parametrize("restart", [False, True])
async def test_job_timeout_ignores_wall_clock_set_forward(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    with monkeypatch.context() as patch:
        cluster.run("busy")
        await cluster.started("busy", 2)
        cluster.run("waits", scheduling_timeout=1800.0)
        await asyncio.sleep(20.0)
        submitted_at = (await cluster.status("waits")).submitted_at
        set_wall_clock(patch, HOUR_S)
        if restart:
            cluster.restart_controller()
        await asyncio.sleep(20.0)
        status = await cluster.status("waits")
        assert (status.state, status.submitted_at) == (JobState.PENDING, submitted_at)
        assert ((await cluster.ask("about"))["clock_jumps"][-1][1]) == pytest.approx(HOUR_S, abs=MOST_AWAY_S + 20)


@played(slices=1)
@pytest.mark.parametrize("restart", [False, True])
async def test_pause_length_ignores_wall_clock_set_back(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    with monkeypatch.context() as patch:
        cluster.run("job", max_retries_failure=20)
        for attempt in range(1, 5):  # quick ends: the next attempts pause
            for task in await cluster.started("job", 2, attempt):
                task.end.set_exception(ValueError("at once"))
        set_wall_clock(patch, -HOUR_S)
        if restart:
            await asyncio.sleep(1.0)
            cluster.restart_controller()
        began = time.monotonic()
        await cluster.started("job", 2, attempt=5)
        assert time.monotonic() - began < 60.0
