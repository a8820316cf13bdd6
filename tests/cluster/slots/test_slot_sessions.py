"""Sessions on real Ray nodes: calls go to the slot itself, and every end of a session is said in words."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from iris_ray import Session, SlotClient, SlotHosts
from iris_ray.errors import InvalidSlotError, RequestExpiredError, RequestLostError, SessionEndedError
from iris_ray.slots.core.policy import IdleFor, PlacementPolicy, ServingPolicy
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import iris_json
from tests.support.waiting import wait_until

MB = 2**20
EAGER = ServingPolicy(
    placement=PlacementPolicy(stale_at=IdleFor(0.0), min_residency_s=0.0), ageing_s=5.0, silence_s=10.0
)
LARGE = {1: 600 * MB}


class Echo:
    """Answers with the payload and its process, after a while if it is told so."""

    def __call__(self, payload: Any) -> tuple[Any, int]:
        if isinstance(payload, Exception):
            raise payload
        if isinstance(payload, float):
            time.sleep(payload)
        return payload, os.getpid()


class Counter:
    """Counts, slowly, in pieces, and notes when it is stopped."""

    def __init__(self) -> None:
        self.stopped = 0

    async def __call__(self, pieces: int):
        if pieces < 0:
            yield self.stopped
        try:
            for number in range(pieces):
                await asyncio.sleep(0.02)
                yield number
        except (asyncio.CancelledError, GeneratorExit):
            self.stopped += 1
            raise


@pytest.fixture(scope="module")
def client(cluster: SimulatedCluster) -> Iterator[SlotClient]:
    """One host with room for one large model."""
    with SlotClient([SlotHosts(memory=1000 * MB)], name="slots", policy=EAGER) as client:
        client.register(Echo, memory=LARGE)
        client.register(Counter, memory=LARGE, concurrency=4)
        yield client


def test_session_answers_streams_raises_and_keeps_slot(cluster: SimulatedCluster, client: SlotClient) -> None:
    with client.session("Echo") as session:
        with ThreadPoolExecutor(8) as threads:
            assert [answer for answer, _ in threads.map(session.call, range(20))] == list(range(20))
        with pytest.raises(ZeroDivisionError, match="mine"):
            session.call(ZeroDivisionError("mine"))
        (row,) = client.status().slots
        assert (row.slot_id, row.active, row.sessions) == (session.slot_id, 1, 1)
        assert [each["sessions"] for each in iris_json(cluster, "slots", "ls")] == [1]
        with pytest.raises(RequestExpiredError):
            client.submit("Counter", 1, timeout_s=1.0).result(60)
        with pytest.raises(InvalidSlotError, match="is open"):
            session.open()
        assert list(session.stream(1)) == [(1, row.pid)]
    assert session.over == "it was closed"
    with pytest.raises(SessionEndedError, match="it was closed"):
        session.call(1)
    assert client.submit("Counter", 2).result(60) == [0, 1]


@pytest.mark.proof
def test_async_sessions_work_and_abandoned_calls_stop(client: SlotClient) -> None:
    async def use() -> None:
        async with client.session("Counter") as session:
            assert await session.generate(3) == [0, 1, 2]
            assert [piece async for piece in session.astream(3)] == [0, 1, 2]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.generate(500), 3.0)
            async for piece in (pieces := session.astream(500)):
                if piece == 3:
                    break
            await pieces.aclose()
            assert await asyncio.wait_for(session.generate(-1), 5.0) == [2]

    asyncio.run(use())
    with client.session("Counter") as session:
        pieces = session.stream(500)
        assert next(pieces) == 0
        pieces.close()
        assert session.call(-1) == [3]


@pytest.mark.proof
def test_unstoppable_call_delays_only_its_own_session(client: SlotClient) -> None:
    client.register(Echo, name="Pair", memory=LARGE, concurrency=2)
    with client.session("Pair") as one, client.session("Pair") as other:
        assert one.slot_id == other.slot_id

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.generate(5.0), 0.5)

        started = time.monotonic()
        asyncio.run(give_up())
        with ThreadPoolExecutor(1) as thread:
            following = thread.submit(one.call, 1)
            assert other.call(2)[0] == 2
            assert not following.done()
            assert following.result(60)[0] == 1
        assert time.monotonic() - started >= 5.0


@pytest.mark.long
def test_killed_slot_cuts_calls_off_and_session_reopens(client: SlotClient) -> None:
    session = client.session("Echo").open()
    pid = session.call(0)[1]
    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(session.call, 30.0)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RequestLostError, match="may have run in part"):
            long.result(60)
    with pytest.raises(SessionEndedError, match=r"is gone.*open the session again"):
        session.call(0)
    with session:
        assert session.call(0)[1] != pid


@pytest.mark.long
def test_sessions_end_when_idle_or_others_wait_or_their_slot_ends(client: SlotClient) -> None:
    idle = client.session("Echo", idle_s=1.0).open()
    wait_until(lambda: idle.over == "it was not used for 1 s", 20)
    with client.session("Echo") as session:
        waiting = client.submit("Echo", 1)
        wait_until(lambda: used(session, "others have waited for Echo for 5 s"), 30)
        assert waiting.result(60)[0] == 1
    with client.session("Counter") as session:
        pieces = session.stream(100)
        assert next(pieces) == 0
        client.evict(session.slot_id)
        assert list(pieces) == list(range(1, 100)), "what runs is not cut off"
        with pytest.raises((SessionEndedError, RequestLostError)):  # the slot may be gone before it can say why
            session.call(1)


@pytest.mark.long
def test_dead_client_loses_its_session(client: SlotClient) -> None:
    class Owner:
        def open(self) -> int:
            self.session = SlotClient.connect("slots").session("Echo").open()
            return int(self.session.call(0)[1])

    owner = ray.remote(num_cpus=0)(Owner).remote()
    assert ray.get(owner.open.remote())
    ray.kill(owner)
    assert client.submit("Counter", 1).result(60) == [0]


@pytest.mark.long
def test_dead_client_loses_its_requests(client: SlotClient) -> None:
    class Owner:
        def ask(self) -> int:
            self.pieces = SlotClient.connect("slots").stream("Counter", 10**6)
            return next(self.pieces)

    owner = ray.remote(num_cpus=0)(Owner).remote()
    assert ray.get(owner.ask.remote()) == 0
    time.sleep(22.0)  # longer than its silence would be borne
    assert any(slot.active for slot in client.status().slots)
    ray.kill(owner)
    wait_until(lambda: not any(slot.active for slot in client.status().slots), 30)


def used(session: Session, reason: str) -> bool:
    """Use a session until it is over; return whether it is for this reason."""
    return reason in refusal(session)


def refusal(session: Session) -> str:
    try:
        session.call(1)
    except SessionEndedError as error:
        return str(error)
    return ""
