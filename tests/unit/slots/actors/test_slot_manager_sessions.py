"""What a SlotManager does with sessions whose calls go on."""

import asyncio

import pytest

from iris_ray.slots.actors import slot_processes
from iris_ray.slots.actors.messages import Ask, Grant
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.core import reconciler, slot_planner
from iris_ray.slots.core.models import WorkloadKind
from tests.support.slot_processes import Slots, ask, manager_of, order, until


async def open_session(manager: SlotManager, session_id: str) -> Grant:
    asked = Ask(session_id, "m", b"", kind=WorkloadKind.SESSION, idle_s=60.0)
    granted: Grant = (await manager.submit(asked)).open()
    return granted


def test_a_session_that_is_closed_has_its_seat_until_its_call_has_ended(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        granted = await open_session(manager, "s")
        assert granted.slot_id in manager._core.fleet.slots
        await manager.cancel("s")
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made[0].stopped == ["s"])
        await asyncio.sleep(0.05)
        assert not slots.made[0].requests
        slots.made[0].may_answer.set()
        assert (await answer).open() == 0
        assert await manager.renew("", {"s": 0.0}) == {"s": "it was closed"}

    asyncio.run(story())


def test_a_slot_whose_only_call_never_ends_is_killed_for_those_who_wait(
    slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_processes, "UNLOAD_S", 0.01)
    for module in (slot_planner, reconciler):
        monkeypatch.setattr(module, "RECHECK_S", 0.02)

    async def story() -> None:
        manager = await manager_of("a", ageing_s=0.05, drain_s=0.1)
        await manager.register(order())
        await open_session(manager, "s")
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: len(slots.made) == 2)
        assert slots.made[0].killed.is_set()
        assert slots.made[0].stopped == ["s"]
        slots.made[1].may_answer.set()
        assert (await answer).open() == 1
        assert await manager.renew("", {"s": 0.0}) == {"s": "others have waited for m for 0.05 s"}

    asyncio.run(story())
