"""The condition of a host, and the state of its chips, which follows from it."""

import pytest

from iris_ray.actors.controller.views import chips_by_state, worker_status
from iris_ray.actors.protocol.status import HostCondition
from iris_ray.goodput.sums import ChipState
from iris_ray.state.events import Event, TaintedEvent, WorkerDrainedEvent, WorkerSuspectedEvent
from iris_ray.state.quarantine import QUARANTINE
from tests.support.worlds import World

DRAINED, SUSPECTED = WorkerDrainedEvent("a-0", "maintenance"), WorkerSuspectedEvent("a-0", "no answer", 100.0)
CLOSED, QUARANTINED = TaintedEvent("a-0", "hot", "88 °C"), TaintedEvent("a-0", QUARANTINE, "it failed often")


@pytest.mark.parametrize(
    ("busy", "events", "condition", "chips"),
    [
        (False, [], HostCondition.FREE, ChipState.FREE),
        (True, [], HostCondition.BUSY, ChipState.BUSY),
        (True, [DRAINED], HostCondition.DRAINING, ChipState.BUSY),
        (False, [DRAINED], HostCondition.DRAINING, ChipState.UNAVAILABLE),
        (False, [DRAINED, QUARANTINED], HostCondition.DRAINING, ChipState.QUARANTINED),
        (False, [CLOSED], HostCondition.CLOSED, ChipState.UNAVAILABLE),
        (False, [CLOSED, QUARANTINED], HostCondition.QUARANTINED, ChipState.QUARANTINED),
        (False, [SUSPECTED], HostCondition.SUSPECTED, ChipState.FREE),
    ],
)
def test_first_condition_names_host_and_chips_of_a_job_stay_its_own(
    busy: bool, events: list[Event], condition: HostCondition, chips: ChipState
) -> None:
    world = World()
    world.add_slice("a")
    if busy:
        world.start()
    for event in events:
        world.do(event)
    assert worker_status(world.state.workers["a-0"], world.state, world.now).condition is condition
    found = chips_by_state(world.state, world.now)
    assert sum(found.values()) == 8.0
    assert found[chips] >= 4.0
    world.check()
