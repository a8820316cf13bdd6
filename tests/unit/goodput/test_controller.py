"""Goodput in the Controller: the states of chips, and the sums of forgotten jobs."""

import asyncio

import pytest

from iris_ray.goodput.controller import RECORD_S, chips_by_state
from iris_ray.goodput.sums import DAY_S, ChipState
from iris_ray.state import job_table
from iris_ray.state.events import Event, TaintedEvent, WorkerDrainedEvent, WorkerSuspectedEvent
from iris_ray.state.quarantine import QUARANTINE
from tests.support.virtual_cluster import VirtualCluster, played
from tests.support.worlds import World

DRAINED, SUSPECTED = WorkerDrainedEvent("a-0", "maintenance"), WorkerSuspectedEvent("a-0", "no answer", 100.0)
CLOSED, QUARANTINED = TaintedEvent("a-0", "hot", "88 °C"), TaintedEvent("a-0", QUARANTINE, "it failed often")


@pytest.mark.parametrize(
    ("busy", "events", "chips"),
    [
        (False, [], ChipState.FREE),
        (True, [], ChipState.BUSY),
        (True, [DRAINED], ChipState.BUSY),
        (False, [DRAINED], ChipState.UNAVAILABLE),
        (False, [DRAINED, QUARANTINED], ChipState.QUARANTINED),
        (False, [CLOSED], ChipState.UNAVAILABLE),
        (False, [CLOSED, QUARANTINED], ChipState.QUARANTINED),
        (False, [SUSPECTED], ChipState.FREE),
    ],
)
def test_chips_of_a_job_stay_its_own(busy: bool, events: list[Event], chips: ChipState) -> None:
    world = World()
    world.add_slice("a")
    if busy:
        world.start()
    for event in events:
        world.do(event)
    found = chips_by_state(world.state, world.now)
    assert sum(found.values()) == 8.0
    assert found[chips] >= 4.0
    world.check()


@played()
async def test_forgotten_jobs_are_summed_by_wall_clock_day_and_outlive_the_controller(
    cluster: VirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Controller's own clock stands still while there is none: a cluster's may be days behind."""
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 1)
    clock = cluster.controllers[-1]._clock
    day, wall = clock.wall(clock.now()) // DAY_S, clock.wall
    monkeypatch.setattr(clock, "wall", lambda at: wall(at) + 3 * DAY_S)
    for name in ("first", "second"):
        await cluster.run(name, work=lambda task: asyncio.sleep(1.0))
        await asyncio.sleep(1.0)
    (summed,) = await cluster.part_of_controller("goodput").user_times(0.0)
    assert (summed.day, summed.jobs) == (day + 3, 1)
    await asyncio.sleep(2 * RECORD_S)
    cluster.restart_controller()
    await cluster.ask("ping")
    await asyncio.sleep(1.0)
    successor = cluster.part_of_controller("goodput")
    (known,) = await successor.user_times(0.0)
    assert (known.day, known.user, known.jobs) == (summed.day, summed.user, 1)
    assert known.seconds == pytest.approx(summed.seconds, abs=0.1)
    assert await successor.fleet_times("")
