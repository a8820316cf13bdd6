"""The pieces of streams arrive once, in their order, however they are taken, and wait for a slow reader."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from iris_ray.errors import RequestLostError
from iris_ray.slots.actors import streams
from iris_ray.slots.actors.messages import packed
from iris_ray.slots.actors.streams import Outbox, Pieces, Stream, StreamEnd
from iris_ray.slots.actors.waiting import ClientStreams, WaitingCaller
from tests.support.slot_processes import ask

A, B, C = map(packed, "abc")


def ended(taken: int, *pieces: object) -> "Future[StreamEnd]":
    future: Future[StreamEnd] = Future()
    future.set_result(StreamEnd(taken, tuple(pieces)))  # type: ignore[arg-type]
    return future


def test_end_that_overtakes_pieces_waits_for_them() -> None:
    stream = Stream()
    assert stream.read(ended(2, C)) == ()
    assert not stream.is_over
    assert stream.read((A, B)) == (A, B, C)
    assert stream.is_over


def test_error_ends_a_stream() -> None:
    with pytest.raises(RequestLostError):
        Stream().read(RequestLostError("lost"))


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> Outbox:
    monkeypatch.setattr(streams, "MOST_PIECES", 2)
    return Outbox()


def test_pieces_of_all_streams_are_taken_together(outbox: Outbox) -> None:
    for request_id, piece in (("r", A), ("s", B), ("r", C)):
        if piece is not C:
            outbox.begin(request_id)
        outbox.put(request_id, piece)
    assert outbox.take() == {"r": (A, C), "s": (B,)}
    outbox.put("s", C)
    assert outbox.end("s") == StreamEnd(1, (C,))
    assert outbox.end("r") == StreamEnd(2, ())


@pytest.mark.parametrize("released_by", ["reader", "drop"])
def test_model_waits_until_its_pieces_are_read_or_unwanted(outbox: Outbox, released_by: str) -> None:
    outbox.begin("r")
    outbox.put("r", A)
    outbox.put("r", B)
    assert outbox.take() == {"r": (A, B)}
    with ThreadPoolExecutor() as threads:
        put = threads.submit(outbox.put, "r", C)
        with pytest.raises(TimeoutError):
            put.result(0.05)
        if released_by == "reader":
            outbox.note_read("r", 1)
        else:
            outbox.drop("r")
        put.result(10)
    outbox.put("r", C, is_last=True)  # the error of a model does not wait
    assert len(outbox.end("r").pieces) == (2 if released_by == "reader" else 0)


async def test_newer_call_of_a_client_gets_the_pieces() -> None:
    """The first call's answer is lost, or its client would not have called again."""
    of_client = ClientStreams()
    first = asyncio.ensure_future(of_client.take(10.0))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(of_client.take(10.0))
    await asyncio.sleep(0.01)
    waiting = WaitingCaller(ask("r"), of_client)
    waiting.give((A,))
    taken: Pieces = (await second)["r"]
    assert (await first, taken) == ({}, (A,))
    waiting.give((B,))
    waiting.end()
    assert await waiting.answer() == StreamEnd(1, (B,))


async def test_client_without_pieces_is_answered_in_time() -> None:
    assert await ClientStreams().take(0.01) == {}
