"""The rows of events, made after the state has applied these."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from iris_ray.history.event_rows import EventRows
from iris_ray.history.rows import EventRow
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
from iris_ray.model.outcomes import Fault
from iris_ray.state.events import (
    Event,
    LimitsSetEvent,
    SettingSetEvent,
    TaintedEvent,
    TaintLiftedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
    WorkerSuspectedEvent,
)
from iris_ray.state.fleet import SUSPICION_S
from tests.support.histories import NOON
from tests.support.worlds import World, cpu_host, host

EVENTS: list[tuple[Event, tuple[str, str, str | None, str]]] = [
    (host("c", 1), ("host joined", "c/1", None, "it has joined")),
    (cpu_host("cpu-7"), ("host joined", "10.0.0.9", None, "it has joined")),
    (WorkerFailedEvent("a-1", "Ray declared it dead"), ("host lost", "a/1", None, "Ray declared it dead")),
    (WorkerDrainedEvent("a-1", "maintenance"), ("notice", "a/1", None, "maintenance")),
    (WorkerSuspectedEvent("a-0", "no answer", 100.0), ("host silent", "a/0", None, "no answer")),
    (WorkerBlamedEvent("b-0", "job", "exit 139", Fault.CRASH), ("host blamed", "b/0", "job", "crash: exit 139")),
    (TaintedEvent("a", "drained", "a fan"), ("tainted", "a", None, "drained: a fan")),
    (TaintLiftedEvent("a", "drained"), ("taint lifted", "a", None, "drained")),
    (LimitsSetEvent("ann", PriorityBand.BATCH, Limits(chips=8)), ("limits set", "ann", None, "batch: chips=8")),
    (SettingSetEvent("evictions", WasSet("off", "olga", 0.0)), ("setting", "evictions", None, "off (by olga)")),
]


class Reader:
    """Applies events to a world, and reads their rows afterwards, as the Controller's part does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._rows = EventRows(world.state)

    def of(self, *batch: Event) -> list[EventRow]:
        for event in batch:
            self.world.do(event)
        return self._rows.of(batch, NOON, self.world.now)


@pytest.fixture
def reader(world: World) -> Reader:
    return Reader(world)


@pytest.mark.parametrize(("event", "expected"), EVENTS, ids=lambda one: type(one).__name__)
def test_notable_events_have_rows(reader: Reader, event: Event, expected: tuple[str, str, str | None, str]) -> None:
    assert reader.of(event) == [EventRow(NOON, *expected)]


BEFORE = (
    WorkerDrainedEvent("b-0", "maintenance"),
    WorkerSuspectedEvent("b-1", "no answer", 100.0),
    TaintedEvent("b", "drained", "a fan"),
)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "event",
    [
        host("a", 1),
        replace(host("a", 1), draining="soon"),
        WorkerFailedEvent("gone", "Ray declared it dead"),
        WorkerDrainedEvent("b-0", "again"),
        WorkerSuspectedEvent("b-1", "again", 100.0),
        TaintedEvent("b", "drained", "again"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_repeated_events_have_no_rows(reader: Reader, event: WorkerRegisteredEvent, at_once: bool) -> None:
    if at_once:
        assert len(reader.of(*BEFORE, event)) == len(BEFORE)
    else:
        assert len(reader.of(*BEFORE)) == len(BEFORE)
        assert reader.of(event) == []


@pytest.mark.parametrize("at_once", [True, False])
def test_host_that_came_and_went_has_both_rows(reader: Reader, at_once: bool) -> None:
    both = host("c", 1), WorkerFailedEvent("c-1", "Ray declared it dead")
    batches: Iterable[tuple[Event, ...]] = [both] if at_once else [(one,) for one in both]
    found = [row for batch in batches for row in reader.of(*batch)]
    assert [(row.kind, row.subject) for row in found] == [("host joined", "c/1"), ("host lost", "c/1")]


def test_taint_and_silence_that_ended_have_rows_again(reader: Reader) -> None:
    world = reader.world
    tainted = TaintedEvent("b", "drained", "a fan", until=world.now + 5.0)
    reader.of(tainted, WorkerSuspectedEvent("b-1", "no answer", world.now))
    world.now += SUSPICION_S + 1.0
    again = reader.of(
        replace(tainted, until=world.now + 5.0),
        WorkerSuspectedEvent("b-1", "no answer", world.now),
    )
    assert [row.kind for row in again] == ["tainted", "host silent"]
