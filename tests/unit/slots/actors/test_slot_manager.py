"""What a SlotManager does when something goes wrong."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.errors import InvalidSlotError, JobCancelledError, SlotQueueFullError
from iris_ray.slots.actors import slot_manager
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.core import events as ev
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.models import WorkloadKind
from tests.support.slot_processes import Method, Slots, all_of, ask, forever, manager_of, order, true, until
from tests.support.slots import host_here


def test_a_slot_that_can_not_be_made_stops_no_other_and_not_the_clock(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(order())
        slots.fails = True
        waits = asyncio.ensure_future(manager.submit(ask("r")))
        await asyncio.sleep(0.05)
        assert not waits.done()
        slots.fails = False
        await until(lambda: slots.made)  # after a pause: it is the timer that has it made
        slots.made[0].may_answer.set()
        assert (await waits).open() == 0

    asyncio.run(story())


def test_a_runner_reports_the_slots_that_it_has_until_they_have_ended(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(order())
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: manager._core.active.by_id)
        (slot,) = manager._core.fleet.slots.values()
        home = slot.allocation.runner_id
        alive = {
            name: await manager._processes.alive_on(name, runner) for name, runner in manager._runners.by_id.items()
        }
        assert alive == {"a": {}, "b": {}} | {home: {slot.slot_id: slot.identity}}
        slots.made[0].may_answer.set()
        await answer
        slots.made[0].killed.set()
        await until(lambda: not manager._core.fleet.slots)
        assert await manager._processes.alive_on(home, manager._runners.by_id[home]) == {}

    asyncio.run(story())


def test_a_name_that_is_registered_for_another_adapter_leaves_nothing_of_the_first(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order(lora="v1"))
        await manager.register(order(lora="v2"))
        await manager.remove("m")
        assert manager._core.models == {}
        assert manager._orders == {}

    asyncio.run(story())


def test_a_request_that_is_refused_leaves_nothing_behind(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        for _ in range(2):
            with pytest.raises(InvalidSlotError, match=r"idle_s is 0\.0"):
                (await manager.submit(ask("r", kind=WorkloadKind.SESSION, idle_s=0.0))).open()
        assert manager._waiting == {}

    asyncio.run(story())


def test_a_slot_is_told_which_attempt_of_a_request_it_is(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].requests)
        slots.made[0].killed.set()
        await until(lambda: len(slots.made) == 2)
        slots.made[1].may_answer.set()
        assert (await answer).open() == 1
        assert [slot.requests for slot in slots.made] == [[SlotRequest("r", 1)], [SlotRequest("r", 2)]]

    asyncio.run(story())


def test_the_requests_of_a_client_that_is_gone_are_given_up(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_manager, "CLIENTS_LOOK_S", 0.01)

    async def story() -> None:
        manager = await manager_of("a", silence_s=0.1)
        await manager.start((), ())
        await manager.register(order(concurrency=3))
        gone, stays, nobodys = (
            asyncio.ensure_future(manager.submit(ask(name, client_id=client)))
            for name, client in (("r", "gone"), ("s", "stays"), ("t", ""))
        )
        await until(lambda: len(manager._core.active.by_id) == 3)
        while not gone.done():
            await manager.renew("stays", {})
            await asyncio.sleep(0.02)
        with pytest.raises(JobCancelledError):
            gone.result().open()
        assert slots.made[0].stopped == ["r"]
        slots.made[0].may_answer.set()
        assert ((await stays).open(), (await nobodys).open()) == (0, 0)

    asyncio.run(story())


def test_a_request_that_comes_after_its_cancelling_does_not_run(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        await manager.cancel("large")
        with pytest.raises(JobCancelledError):
            (await manager.submit(ask("large"))).open()
        assert len(manager._core.queue) == 0

    asyncio.run(story())


def test_cancelling_a_request_that_is_over_does_not_cancel_the_next_one_of_its_id(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        for _ in range(2):
            answer = asyncio.ensure_future(manager.submit(ask("r")))
            await until(lambda: slots.made)
            slots.made[0].may_answer.set()
            assert (await answer).open() == 0
            await manager.cancel("r")

    asyncio.run(story())


def test_a_request_is_refused_if_too_many_bytes_wait(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of(most_waiting_bytes=10)
        await manager.register(order())
        waits = asyncio.ensure_future(manager.submit(replace(ask("r"), payload=b"12345678")))
        await until(lambda: len(manager._core.queue) == 1)
        with pytest.raises(SlotQueueFullError, match=r"8 bytes of requests wait already, and this one has 3"):
            (await manager.submit(replace(ask("s"), payload=b"123"))).open()
        waits.cancel()

    asyncio.run(story())


def test_a_slot_that_uses_more_memory_than_its_model_said_raises_an_alarm_once_a_minute(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Sequence[Any]] = []

    async def memory(processes: Sequence[Any]) -> int:
        seen.append(processes)
        return 70 * 10**9

    async def story() -> None:
        manager = await manager_of()
        watches = {"watch": Method(forever), "wait_gone": Method(lambda *_: true()), "alive": Method(all_of)}
        agent = SimpleNamespace(**watches, memory=Method(memory))
        here = host_here("c", agent, kind=DeviceKind.CPU)
        manager._background.start(manager.hold_host(here), "holding a host")
        await until(lambda: seen == [[]])
        await manager.register(order(kind=DeviceKind.CPU))
        answer = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].requests)
        await manager._report("c")
        assert seen == [[]]
        monkeypatch.setattr(slot_manager, "MEMORY_LOOK_S", 0.0)
        caplog.clear()
        await manager._report("c")
        assert seen == [[], [0]]
        slots.made[0].may_answer.set()
        await answer

    asyncio.run(story())
    (alarm,) = [record.message for record in caplog.records if "booked" in record.message]
    assert alarm == "runner c: device 0 uses 70,000,000,000 bytes, but slots have only 60,000,000,000 booked"


def test_adapters_of_one_class_are_served_under_names_of_their_own(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(order("llama+a", lora="/a"))
        await manager.register(order("llama+b", lora="/b"))
        answers = [asyncio.ensure_future(manager.submit(ask(name, name))) for name in ("llama+a", "llama+b")]
        await until(lambda: len(slots.made) == 2)
        for slot in slots.made:
            slot.may_answer.set()
        assert {(await answer).open() for answer in answers} == {0, 1}
        served = {str(slot.identity) for slot in manager._core.fleet.slots.values()}
        assert served == {"llama+a with /a", "llama+b with /b"}

    asyncio.run(story())


def test_a_request_is_not_forgotten_with_an_earlier_one_of_its_id(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", drain_s=0.05)
        await manager.register(order())
        first = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: slots.made and slots.made[0].requests)
        await manager.cancel("r")  # a function goes on all the same
        with pytest.raises(JobCancelledError):
            (await first).open()
        (slot_id,) = manager._core.fleet.slots
        await manager.evict(slot_id)
        await asyncio.sleep(0.1)
        manager._hear(ev.Tick())  # it has had its time: its end is ordered
        second = asyncio.ensure_future(manager.submit(ask("r")))
        await until(lambda: "r" in manager._core.queue)
        slots.made[0].may_answer.set()  # the first one ends while its process unloads
        await asyncio.sleep(0.05)
        slots.made[0].killed.set()
        await until(lambda: len(slots.made) == 2)
        slots.made[1].may_answer.set()
        assert (await second).open() == 1

    asyncio.run(story())
