"""Calls on pools that may be gone by the time of the call."""

import asyncio
import math
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.controller import dispatcher as module
from iris_ray.actors.controller import recovery
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.pool_registry import Pool
from iris_ray.actors.protocol.answers import Gone, Unreachable
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace
from iris_ray.model.lifecycle import AttemptId
from iris_ray.scheduler.planner import PlacedGang
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TasksAssignedEvent,
)
from iris_ray.state.instructions import Instructions, ReclaimSlice, StopAttempt
from tests.support.worlds import World, cpu_host

ATTEMPT = AttemptId("job", 1)
ORDER = AttemptOrder(ATTEMPT, ((HostPlace("node", "10.0.0.1", "slice", 0),),), {"TPU": 4.0}, 1, 1)


class LostPool:
    """A pool whose process has just ended."""

    async def assign(self, order: AttemptOrder) -> Gone:
        return Gone("the job's pool is gone (ActorDiedError)")


async def test_dispatch_fails_if_pool_is_forgotten_before_order() -> None:
    errors: list[BaseException] = []
    applied: list[Event] = []
    pools = {"owner": Pool.here(cast(Any, LostPool()), "the job's pool")}
    background = BackgroundTasks(errors.append)

    def apply(events: Iterable[Event]) -> None:
        applied.extend(events)

    dispatcher = Dispatcher(
        SimpleNamespace(holds_capacity=lambda attempt: False, jobs={}),  # type: ignore[arg-type]
        SimpleNamespace(epoch=1, clock=Clock()),  # type: ignore[arg-type]
        pools,  # type: ignore[arg-type]
        lambda order: None,
        apply,
        background,
    )
    job = SimpleNamespace(spec=SimpleNamespace(owner="owner"))
    dispatcher.dispatch(ORDER, PlacedGang(job, SimpleNamespace(), []))  # type: ignore[arg-type]
    del pools["owner"]
    await background.all_ended()
    (failed,), errors = applied, errors
    assert isinstance(failed, TaskDispatchFailedEvent)
    assert (failed.attempt, failed.error) == (ATTEMPT, "the job's pool is gone (ActorDiedError)")
    assert not errors


async def test_warm_slice_holders_are_asked_in_parallel() -> None:
    """One that hangs takes half a minute."""
    answered, applied = asyncio.Event(), list[Event]()

    class Holder:
        def __init__(self, answer: bool | Unreachable) -> None:
            self.answer = answer

        async def give_up_slice(self, name: str, epoch: int) -> bool | Unreachable:
            if self.answer is True:
                answered.set()
            else:
                await answered.wait()
            return self.answer

    class Owner:
        async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> None:
            pass

    background = BackgroundTasks()
    held = iter([True, False])
    silent, busy, idle = Holder(Unreachable("no answer")), Holder(False), Holder(True)
    pools: dict[str, Any] = {"owner": Owner(), "a": silent, "b": busy, "c": idle}
    gang = SimpleNamespace(attempt=1, running_since=math.inf)
    job = SimpleNamespace(spec=SimpleNamespace(owner="owner"), gangs=[gang])
    dispatcher = Dispatcher(
        SimpleNamespace(holds_capacity=lambda attempt: next(held, False), jobs={"job": job}),  # type: ignore[arg-type]
        SimpleNamespace(epoch=1, clock=Clock()),  # type: ignore[arg-type]
        {name: Pool.here(pool, name) for name, pool in pools.items()},  # type: ignore[arg-type]
        lambda order: None,
        applied.extend,
        background,
    )
    reclaim = [ReclaimSlice(f"slice-{holder}", holder, f"slice-{holder}") for holder in ("a", "b", "gone", "c")]
    dispatcher.dispatch(ORDER, PlacedGang(job, gang, reclaim))  # type: ignore[arg-type]
    await asyncio.wait_for(background.all_ended(), 30.0)
    released, failed, ended = applied
    assert released == SliceReleasedEvent("slice-c", "c")
    assert isinstance(failed, TaskDispatchFailedEvent)
    assert failed.error == "slice-b was in use after all"
    assert ended == AttemptEndConfirmedEvent(ATTEMPT)


async def test_many_attempts_are_stopped_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with a call, and nobody else is answered while calls are made."""
    monkeypatch.setattr(module, "CALLS_IN_A_TURN", 3)
    stopped: list[int] = []
    turns: list[int] = []

    class Stopping:
        async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> None:
            stopped.append(attempt.gang)

    background = BackgroundTasks()
    job = SimpleNamespace(spec=SimpleNamespace(owner="owner"))
    dispatcher = Dispatcher(
        SimpleNamespace(holds_capacity=lambda attempt: attempt.gang not in stopped, jobs={"job": job}),  # type: ignore[arg-type]
        SimpleNamespace(epoch=1, clock=Clock()),  # type: ignore[arg-type]
        {"owner": Pool.here(cast(Any, Stopping()), "the job's pool")},  # type: ignore[arg-type]
        lambda order: None,
        lambda events: None,
        background,
    )
    dispatcher.carry_out(Instructions(stop=[StopAttempt(AttemptId("job", 1, i), "enough") for i in range(10)]))
    while len(background):
        turns.append(len(stopped))
        await asyncio.sleep(0)
    assert stopped == list(range(10))
    assert max(after - before for before, after in pairwise(turns)) <= 3


async def test_many_orders_are_repeated_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with a call that is to be answered within seconds, and no answer is read while calls are made."""
    monkeypatch.setattr(recovery, "CALLS_IN_A_TURN", 3)
    world, given, turns = World(), list[int](), list[int]()
    world.do(cpu_host("c", cpus=10.0))
    job = world.submit_tasks("job", 10, resources={"CPU": 1.0})
    for index in range(10):
        world.do(TasksAssignedEvent("job", (index,), "c"))
    dispatcher: Any = SimpleNamespace(
        order=lambda job, gang: gang.position, dispatch=lambda order, _: given.append(order)
    )
    record = world.state.record("job")
    assert record is not None
    repeating = recovery.repeat_orders([record], world.state, {job.spec.owner}, dispatcher, [])
    repeated = asyncio.ensure_future(repeating)
    while not repeated.done():
        turns.append(len(given))
        await asyncio.sleep(0)
    assert given == list(range(10))
    assert max(after - before for before, after in pairwise(turns)) <= 3
