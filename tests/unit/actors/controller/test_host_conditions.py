"""The condition of a host."""

import pytest

from iris_ray.actors.controller.views import worker_status
from iris_ray.actors.protocol.status import HostCondition
from iris_ray.state.events import Event, TaintedEvent, WorkerDrainedEvent, WorkerSuspectedEvent
from iris_ray.state.quarantine import QUARANTINE
from tests.support.worlds import World

DRAINED, SUSPECTED = WorkerDrainedEvent("a-0", "maintenance"), WorkerSuspectedEvent("a-0", "no answer", 100.0)
CLOSED, QUARANTINED = TaintedEvent("a-0", "hot", "88 °C"), TaintedEvent("a-0", QUARANTINE, "it failed often")


@pytest.mark.parametrize(
    ("busy", "events", "condition"),
    [
        (False, [], HostCondition.FREE),
        (True, [], HostCondition.BUSY),
        (True, [DRAINED], HostCondition.DRAINING),
        (False, [DRAINED], HostCondition.DRAINING),
        (False, [DRAINED, QUARANTINED], HostCondition.DRAINING),
        (False, [CLOSED], HostCondition.CLOSED),
        (False, [CLOSED, QUARANTINED], HostCondition.QUARANTINED),
        (False, [SUSPECTED], HostCondition.SUSPECTED),
    ],
)
def test_first_condition_names_host(busy: bool, events: list[Event], condition: HostCondition) -> None:
    world = World()
    world.add_slice("a")
    if busy:
        world.start()
    for event in events:
        world.do(event)
    assert worker_status(world.state.workers["a-0"], world.state, world.now).condition is condition
    world.check()
