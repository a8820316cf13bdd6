"""A user's model runs, in pieces or whole, and stops when it is told to."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ray import cloudpickle

from iris_ray.slots.actors import messages
from iris_ray.slots.actors.messages import NotHeld, StopReasons
from iris_ray.slots.actors.model_call import ModelCall, RunningCalls, SlotRequest, StoppedError, slot_request
from iris_ray.slots.actors.slot_actor import HeldSessions, LoadedModel
from iris_ray.slots.actors.streams import MOST_PIECES
from tests.support.waiting import wait_until

# -- calls ------------------------------------------------------------------------------------------------------------


class Plain:
    def __call__(self, payload: int) -> int:
        return payload + 1


class Pieces:
    def __call__(self, payload: int):
        yield from range(payload)


class Coroutine:
    def __init__(self) -> None:
        self.running = threading.Event()

    async def load(self) -> None:
        self.loaded = asyncio.get_running_loop()

    async def __call__(self, payload: float) -> float:
        assert asyncio.get_running_loop() is self.loaded
        self.running.set()
        await asyncio.sleep(payload)
        return payload


class AsyncPieces:
    async def __call__(self, payload: int):
        task = asyncio.current_task()
        for number in range(payload):
            await asyncio.sleep(0.001)
            assert asyncio.current_task() is task, "timeouts around a yield need this"
            yield number


def loaded(model: type, **keywords: Any) -> LoadedModel:
    made = LoadedModel()
    assert made.load(cloudpickle.dumps((model, keywords))) is None
    return made


@pytest.mark.parametrize(
    ("model", "payload", "answer", "pieces"),
    [
        (Plain, 1, 2, [2]),
        (Pieces, 3, [0, 1, 2], [0, 1, 2]),
        (Coroutine, 0.0, 0.0, [0.0]),
        (AsyncPieces, 2, [0, 1], [0, 1]),
    ],
)
def test_all_kinds_of_models_answer_whole_and_in_pieces(model: type, payload: Any, answer: Any, pieces: Any) -> None:
    made = loaded(model)
    assert made.answer(payload, ModelCall(made.loop)) == answer
    assert list(made.pieces(payload, ModelCall(made.loop))) == pieces


def test_models_exception_is_raised_and_failed_load_explained() -> None:
    made = loaded(Plain)
    with pytest.raises(TypeError, match="concatenate"):
        made.answer("text", ModelCall(made.loop))
    assert "takes no arguments" in str(LoadedModel().load(cloudpickle.dumps((Plain, {"size": 1}))))


class Cancels:
    def __call__(self, payload: str) -> Any:
        if payload == "function":
            raise asyncio.CancelledError
        return self._coroutine() if payload == "coroutine" else self._pieces()

    async def _coroutine(self) -> None:
        raise asyncio.CancelledError

    async def _pieces(self):
        yield 1
        raise asyncio.CancelledError


@pytest.mark.parametrize("how", ["function", "coroutine", "pieces"])
def test_model_cancelling_itself_is_at_fault(how: str) -> None:
    made = loaded(Cancels)
    with (
        pytest.raises(RuntimeError, match="the model raised CancelledError"),
        RunningCalls(made.loop).running(SlotRequest("r")) as call,
    ):
        list(made.pieces(how, call))


class FailsToLoad:
    def __init__(self, error: BaseException) -> None:
        raise error


class OddError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), OddError()])
def test_odd_failure_of_a_load_is_a_failed_load(error: BaseException) -> None:
    why = LoadedModel().load(cloudpickle.dumps((FailsToLoad, {"error": error})))
    assert why is not None
    assert type(error).__name__ in why


def test_stopped_coroutine_ends_even_if_stopped_before_start() -> None:
    made = loaded(Coroutine)
    calls = RunningCalls(made.loop)

    def serve() -> Any:
        with calls.running(SlotRequest("r")) as call:
            return made.answer(30.0, call)

    with ThreadPoolExecutor() as threads:
        served = threads.submit(serve)
        assert made._model.running.wait(10)
        calls.stop("r")
        with pytest.raises(StoppedError):
            served.result(10)
    calls.stop("later")
    with pytest.raises(StoppedError), calls.running(SlotRequest("later")) as call:
        made.answer(30.0, call)


def test_late_stop_spares_the_next_call_of_the_same_id() -> None:
    made = loaded(Plain)
    calls = RunningCalls(made.loop)
    for _ in range(2):
        with calls.running(SlotRequest("r")) as call:
            assert list(made.pieces(1, call)) == [2]
            assert not call._stopped
        calls.stop("r")


@pytest.mark.parametrize("model", [Pieces, AsyncPieces])
def test_stopped_stream_ends(model: type) -> None:
    made = loaded(model)
    call = ModelCall(made.loop)
    pieces = made.pieces(10**6, call)
    assert next(pieces) == 0
    call.stop()
    with pytest.raises(StoppedError):
        list(pieces)


class Endless:
    def __init__(self) -> None:
        self.made = 0

    async def __call__(self, payload: Any):
        while True:
            await asyncio.sleep(0)
            self.made += 1
            yield self.made


def test_asynchronous_generator_waits_for_its_reader() -> None:
    made = loaded(Endless)
    call = ModelCall(made.loop)
    pieces = made.pieces(None, call)
    assert next(pieces) == 1
    wait_until(lambda: made._model.made == MOST_PIECES + 1)
    time.sleep(0.02)
    assert made._model.made == MOST_PIECES + 1
    assert next(pieces) == 2
    wait_until(lambda: made._model.made == MOST_PIECES + 2)
    call.stop()
    with pytest.raises(StoppedError):
        list(pieces)


class Knows:
    """Answers with the request that it answers: as a function, a coroutine, or a generator of either kind."""

    def __call__(self, kind: str) -> Any:
        return {"coroutine": self._coroutine, "pieces": self._pieces, "async pieces": self._async_pieces}.get(
            kind, slot_request
        )()

    async def _coroutine(self) -> SlotRequest | None:
        await asyncio.sleep(0)
        return slot_request()

    def _pieces(self):
        yield slot_request()
        yield slot_request()

    async def _async_pieces(self):
        yield slot_request()
        await asyncio.sleep(0)
        yield slot_request()


@pytest.mark.parametrize("kind", ["function", "coroutine", "pieces", "async pieces"])
def test_model_of_any_kind_knows_its_request(kind: str) -> None:
    made = loaded(Knows)
    calls = RunningCalls(made.loop)
    for request in (SlotRequest("r", 1), SlotRequest("r", 2)):
        with calls.running(request) as call:
            assert set(made.pieces(kind, call)) == {request}
            answer = made.answer(kind, call)
            assert answer in (request, [request, request])
    assert slot_request() is None


# -- sessions that a slot holds ---------------------------------------------------------------------------------------


def test_stopped_session_ends_after_its_current_call() -> None:
    sessions = HeldSessions()
    sessions.open("a")
    assert sessions.begin_call("a") is None
    with ThreadPoolExecutor() as threads:
        over = threads.submit(sessions.stop, "a", "its runner goes")
        assert sessions.begin_call("a") == NotHeld("its runner goes")
        assert not over.done()
        sessions.end_call("a")
        over.result(10)
    assert sessions.begin_call("a") == NotHeld("its runner goes")


def test_session_stopped_before_opening_stays_closed() -> None:
    sessions = HeldSessions()
    sessions.stop("a", "it was closed")
    sessions.open("a")
    assert sessions.begin_call("a") == NotHeld("it was closed")
    assert sessions.begin_call("nobody") == NotHeld("it has ended")


def test_first_stop_reason_counts_and_oldest_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(messages, "MOST", 2)
    known = StopReasons()
    known.note("a", "closed")
    known.note("a", "idle")
    assert known.of("a") == "closed"
    known.note("b", "idle")
    known.note("c", "idle")
    assert [known.of(name) for name in "abc"] == ["it has ended", "idle", "idle"]


@pytest.mark.parametrize(
    "answer", ["False", "1 / 0", "time.sleep(99)", "(_ for _ in ()).throw(asyncio.CancelledError)"]
)
def test_slot_of_a_model_that_is_not_well_ends(answer: str) -> None:
    code = f"""
from ray import cloudpickle
import asyncio, time
from iris_ray.slots.actors import slot_actor
slot_actor.HEALTH_S = slot_actor.HEALTH_ANSWER_S = 0.05
class Model:
    asked = 0
    def health(self):
        self.asked += 1
        return {answer} if self.asked > 2 else None
    def __call__(self, payload): ...
assert slot_actor.LoadedModel().load(cloudpickle.dumps((Model, {{}}))) is None
time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the model was not well 3 times in a row: health()" in done.stderr
