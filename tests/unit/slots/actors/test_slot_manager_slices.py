"""What a SlotManager does with slots of several hosts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from iris_ray.slots.actors import slot_processes
from iris_ray.slots.actors.messages import ModelOrder
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from tests.support.slot_processes import (
    HANGS,
    MAKER,
    NO_PORT,
    RAISES,
    Method,
    Slot,
    Slots,
    all_of,
    ask,
    forever,
    true,
    until,
)
from tests.support.slots import host_here


async def manager_of_a_slice() -> SlotManager:
    manager = SlotManager(ServingPolicy(), MAKER)
    for host in range(2):
        agent = SimpleNamespace(
            watch=Method(forever), wait_gone=Method(lambda *_: true()), alive=Method(lambda known: all_of(known))
        )
        manager._background.start(manager.hold_host(host_here("t", agent, host=host, hosts=2)), "holding a host")
    await manager.register(ModelOrder(ModelSpec("m", {8: 10**9}, kind=DeviceKind.TPU), b"", 0))
    return manager


async def test_slice_slot_has_process_per_host_and_ends_whole(slots: Slots) -> None:
    manager = await manager_of_a_slice()
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: len(slots.made) == 2 and any(made.requests for made in slots.made))
    assert [slot.meets_at for slot in slots.made] == ["10.0.0.1:1", "10.0.0.1:1"]
    assert slots.made[0].leads == [slots.made[1]]
    slots.made[1].killed.set()
    await until(lambda: len(slots.made) == 4)
    assert slots.made[0].killed.is_set()
    slots.made[2].may_answer.set()
    assert (await answer).open() == 2


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ((HANGS, "no weights"), "no weights"),
        ((NO_PORT, None), f"its hosts can't meet: {NO_PORT}"),
        ((RAISES, None), f"ValueError: {RAISES}"),
        (("x" * 10_000, None), "x" * slot_processes.LONGEST_REASON),
    ],
    ids=["no weights", "no port", "raises", "at length"],
)
async def test_host_failing_to_load_fails_the_slice_slot(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, loads: tuple[str | None, ...], said: str
) -> None:
    monkeypatch.setattr(slot_processes, "UNLOAD_S", 0.01)
    slots.loads = [*loads]
    manager = await manager_of_a_slice()
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: slots.made and slots.made[0].killed.is_set())
    assert manager._core.models["m"].last_failure == said
    answer.cancel()


async def test_process_that_could_not_start_says_why(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    class NotStarted(RayError):
        actor_init_failed = True

    async def watch(slot: Slot) -> None:
        raise NotStarted("The actor died because of an error in its creation task\nOSError: the disk is full")

    monkeypatch.setattr(Slot, "_watch", watch)
    manager = await manager_of_a_slice()
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: "ended by itself (OSError: the disk is full)" in manager._core.models["m"].last_failure)
    answer.cancel()


async def test_unload_failing_on_one_host_cuts_off_no_other(slots: Slots) -> None:
    manager = await manager_of_a_slice()
    answer = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: len(slots.made) == 2 and any(made.requests for made in slots.made))
    slots.made[0].may_answer.set()
    await answer
    unloaded: list[str] = []

    async def fails() -> None:
        raise RayTaskError("unload", "", OSError("the disk is full"))

    async def unloads() -> None:
        await asyncio.sleep(0.02)
        unloaded.append("second")

    slots.made[0].__dict__["unload"], slots.made[1].__dict__["unload"] = Method(fails), Method(unloads)
    await manager.evict(*manager._core.fleet.slots)
    await until(lambda: slots.made[1].killed.is_set())
    assert unloaded == ["second"]


async def test_slice_is_free_once_processes_on_all_hosts_are_gone(slots: Slots) -> None:
    gone = {0: False, 1: False}

    def agent_of(host: int) -> SimpleNamespace:
        async def alive(known: Any) -> set[str]:
            return set() if gone[host] else set(known)

        async def wait_gone(*_: Any) -> bool:
            await until(lambda: gone[host])
            return True

        return SimpleNamespace(watch=Method(forever), wait_gone=Method(wait_gone), alive=Method(alive))

    manager = SlotManager(ServingPolicy(), MAKER)
    for host in range(2):
        here = host_here("t", agent_of(host), host=host, hosts=2)
        manager._background.start(manager.hold_host(here), "holding a host")
    await manager.register(ModelOrder(ModelSpec("m", {8: 10**9}, kind=DeviceKind.TPU), b"", 0))
    waits = asyncio.ensure_future(manager.submit(ask("r")))
    await until(lambda: len(slots.made) == 2 and any(made.requests for made in slots.made))
    gone[1] = True  # that on host 0 still holds its chips
    slots.made[1].killed.set()
    await manager._report("t")
    await asyncio.sleep(0.2)
    assert len(slots.made) == 2
    gone[0] = True
    await until(lambda: len(slots.made) == 4)
    waits.cancel()
