"""Answers in pieces: what a SlotManager does if slots are lost, or callers take nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayError

from iris_ray.errors import JobCancelledError, RequestLostError
from iris_ray.slots.actors.messages import MOST_PIECES, AnswerPiece
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.core import events as ev
from tests.support.slot_processes import Method, Slot, Slots, ask, manager_of, order, until


def test_pieces_of_two_slots_are_never_mixed(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b", drain_s=0.05)
        await manager.register(order())

        async def read() -> list[Any]:
            return [piece.open() async for piece in manager.stream(ask("r"))]

        reads = asyncio.ensure_future(read())
        await until(lambda: slots.made)
        await asyncio.sleep(0.05)
        (slot_id,) = manager._core.fleet.slots
        await manager.evict(slot_id)
        await asyncio.sleep(0.06)
        manager._hear(ev.Tick())  # it has overrun its time; the request is for another slot, and this one still runs
        await until(lambda: len(slots.made) == 2)
        await asyncio.sleep(0.05)
        for slot in slots.made:
            slot.may_answer.set()
        assert await reads == [(1, 0), (1, 1), (1, 2)]

    asyncio.run(story())


async def stops_at(slot: Slot, pieces: int) -> None:
    await until(lambda: slot.sent == pieces)
    await asyncio.sleep(0.02)
    assert slot.sent == pieces


def test_a_model_waits_for_a_caller_who_takes_no_pieces_and_not_for_one_who_is_gone(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a")
        await manager.register(order())
        pieces = manager.stream(ask("r"))
        first = asyncio.ensure_future(anext(pieces))
        await until(lambda: slots.made)
        slots.made[0].pieces = 300
        slots.made[0].may_answer.set()
        await first
        await stops_at(slots.made[0], MOST_PIECES + 1)
        await manager.taken("r", 10)
        await stops_at(slots.made[0], MOST_PIECES + 11)
        await manager.cancel("r")
        await until(lambda: slots.made[0].sent == 300)
        assert slots.made[0].stopped == ["r"]
        with pytest.raises(JobCancelledError):
            [piece.open() async for piece in pieces]
        await until(lambda: not manager._core.active.by_id)

    asyncio.run(story())


def test_a_stream_of_which_the_caller_has_had_a_part_does_not_run_again(slots: Slots) -> None:
    async def story() -> None:
        manager = await manager_of("a", "b")
        await manager.register(replace(order(), replicas=2))
        await until(lambda: [each.state.value for each in manager._core.fleet.slots.values()] == ["ready"] * 2)
        ran: list[Slot] = []

        def answers_until_killed(slot: Slot) -> None:
            async def stream(request: SlotRequest, payload: bytes) -> AsyncIterator[Awaitable[AnswerPiece]]:
                ran.append(slot)  # as user code runs up to its first piece
                yield slot._piece(0)
                await slot.killed.wait()
                raise RayError("killed")

            vars(slot)["stream"] = Method(stream)

        for slot in slots.made:
            answers_until_killed(slot)
        pieces = manager.stream(ask("r"))
        (await anext(pieces)).open()
        ran[0].killed.set()  # the other slot has a free seat
        with pytest.raises(RequestLostError, match="cut off"):
            (await anext(pieces)).open()
        await asyncio.sleep(0.1)
        assert len(ran) == 1

    asyncio.run(story())
