"""Callers that wait until what they have said is recorded."""

import asyncio
from types import SimpleNamespace
from typing import Any

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.actors.controller.event_processor import EventProcessor
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState


class SlowJournal:
    """Writes until it is told to end."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.contained = Containment(SimpleNamespace(), self.clock)  # type: ignore[arg-type]
        self.may_end = asyncio.Event()

    async def write(self, state: ControllerState) -> None:
        await self.may_end.wait()

    def take_unrecordable(self) -> dict[str, Exception]:
        return {}


async def test_call_that_ray_cancels_ends_no_other_call() -> None:
    """Ray cancels the calls of a task that is cancelled; all calls of a moment share one writing."""
    state, ended, journal = ControllerState(), list[int](), SlowJournal()
    writes: Any = journal
    dispatcher: Any = SimpleNamespace(carry_out=lambda instructions: None)
    events = EventProcessor(state, Planner(state, 0.5), writes, BackgroundTasks(), lambda: ended.append(1))
    events.begin(dispatcher)

    async def call() -> str:
        await events.recorded([])
        return "acknowledged"

    calls = list[asyncio.Task[str]]()
    for _ in range(2):  # what is being recorded, and what comes meanwhile
        calls += [asyncio.ensure_future(call()), asyncio.ensure_future(call())]
        await asyncio.sleep(0.01)
    for cancelled in calls[::2]:
        cancelled.cancel()
    await asyncio.sleep(0.01)
    journal.may_end.set()
    assert [await other for other in calls[1::2]] == ["acknowledged"] * 2
    assert all(cancelled.cancelled() for cancelled in calls[::2])
    assert (events.failed, ended) == (None, [])
