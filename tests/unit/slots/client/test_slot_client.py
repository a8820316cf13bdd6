"""What a `SlotClient` does for a caller who gives up. Its manager stands aside."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from iris_ray import SlotClient, SlotHosts
from iris_ray.actors.calls.asking import Actor
from iris_ray.errors import InvalidSlotError, JobCancelledError, NoClusterError
from iris_ray.slots.actors.messages import AnswerPiece, Ask, Grant, packed
from iris_ray.slots.actors.streams import READ_AT_ONCE, StreamEnd
from iris_ray.slots.client import lease as client_keeper
from iris_ray.slots.client.lease import ClientKeeper, Lease
from iris_ray.slots.client.streams import StreamFetcher
from iris_ray.slots.core.devices import DeviceKind
from tests.support.waiting import wait_until


class Reference:
    """Stands for an `ObjectRef` of an answer, which comes once it is given."""

    def __init__(self, given: "Future[Any]") -> None:
        self._given = given

    def future(self) -> "Future[Any]":
        return self._given

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._given).__await__()


def done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Manager:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.cancelled: list[str] = []
        self.streams: dict[str, Future[StreamEnd]] = {}
        self.read = 0
        self.renewed: list[str] = []
        self.answer: Future[AnswerPiece] = Future()
        self.submit = SimpleNamespace(remote=self._submit)
        self.stream = SimpleNamespace(remote=self._stream)
        self.take = SimpleNamespace(remote=self._take)
        self.cancel = SimpleNamespace(remote=self.cancelled.append)
        self.note_read = SimpleNamespace(remote=self._note_read)
        self.close: Any = None
        self.renew = SimpleNamespace(remote=self._renew)

    def _submit(self, ask: Ask) -> Reference:
        self.asked.append(ask)
        return Reference(self.answer)

    def _stream(self, ask: Ask) -> Reference:
        self.asked.append(ask)
        return Reference(self.streams.setdefault(ask.request_id, Future()))

    def _take(self, client_id: str) -> Reference:
        """Answer soon with a piece of each stream, which has no end."""
        time.sleep(0.001)
        return Reference(done({request_id: (packed(0),) for request_id in self.streams}))

    def _note_read(self, request_id: str, pieces: int) -> None:
        self.read += pieces

    def _renew(self, client_id: str, idle: Any) -> Reference:
        self.renewed.append(client_id)
        return Reference(done({}))


@pytest.fixture
def manager() -> Manager:
    return Manager()


@pytest.fixture
def client(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> SlotClient:
    monkeypatch.setattr("ray.get", lambda reference: reference.future().result())
    made = SlotClient.__new__(SlotClient)
    handle: Any = manager
    made._manager = Actor(handle)
    made._keeper = ClientKeeper(made._manager)
    made._streams = StreamFetcher(made._manager, made._keeper)
    return made


async def test_cancelled_coroutine_cancels_its_request(client: SlotClient, manager: Manager) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.generate("m", 1, request_id="r"), 0.02)
    assert manager.cancelled == ["r"]


def test_abandoned_stream_cancels_its_request(client: SlotClient, manager: Manager) -> None:
    pieces = client.stream("m", 1, request_id="r")
    for _ in range(50):
        assert next(pieces) == 0
    assert manager.read == READ_AT_ONCE
    assert manager.cancelled == []
    pieces.close()
    assert manager.cancelled == ["r"]


async def test_abandoned_async_stream_cancels_its_request(client: SlotClient, manager: Manager) -> None:
    pieces = client.astream("m", 1, request_id="r")
    for _ in range(50):
        assert await anext(pieces) == 0
    assert manager.read == READ_AT_ONCE
    await pieces.aclose()
    assert manager.cancelled == ["r"]
    wait_until(lambda: not client._streams._runs)


def test_all_streams_end_with_error_when_an_answer_is_lost(client: SlotClient, manager: Manager) -> None:
    """Pieces were in the answer: nobody knows of which streams."""
    streams = [client.stream("m", 1, request_id=name) for name in "rs"]
    for pieces in streams:
        assert next(pieces) == 0
    lost: Future[Any] = Future()
    lost.set_exception(ActorDiedError())
    manager.take = SimpleNamespace(remote=lambda _: Reference(lost))
    for pieces in streams:
        with pytest.raises(ActorDiedError):
            list(pieces)
    wait_until(lambda: not client._streams._runs)


def test_stream_with_id_of_a_running_one_is_refused(client: SlotClient) -> None:
    pieces = client.stream("m", 1, request_id="r")
    assert next(pieces) == 0
    with pytest.raises(InvalidSlotError, match="request r runs already"):
        next(client.stream("m", 1, request_id="r"))
    assert next(pieces) == 0


def test_cancelled_future_cancels_its_request(client: SlotClient, manager: Manager) -> None:
    future = client.submit("m", 1, request_id="r")
    assert future.cancel()
    assert manager.cancelled == ["r"]
    manager.answer.set_exception(JobCancelledError("request r was cancelled"))
    assert wait([future], timeout=5).done == {future}
    with pytest.raises(CancelledError):
        future.result()


def test_answered_request_is_not_cancelled(client: SlotClient, manager: Manager) -> None:
    manager.answer.set_result(packed("answer"))
    assert client.submit("m", 1).result(5) == "answer"
    assert asyncio.run(client.generate("m", 1)) == "answer"
    assert manager.cancelled == []


def test_client_is_renewed_while_it_has_requests(
    client: SlotClient, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_keeper, "RENEW_S", 0.01)
    client.submit("m", 1)
    (ask,) = manager.asked
    wait_until(lambda: len(manager.renewed) >= 2)
    assert set(manager.renewed) == {ask.client_id}
    manager.answer.set_result(packed("answer"))
    wait_until(lambda: not client._keeper._runs)
    renewed = len(manager.renewed)
    time.sleep(0.05)
    assert len(manager.renewed) == renewed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("timeout_s", value) for value in ("5", math.nan, True)),
        *(("idle_s", value) for value in (None, 0, -1.0, math.nan, math.inf, "60")),
        ("priority", "no"),
        ("retriable", 1),
        ("request_id", 5),
        ("request_id", ""),
    ],
)
def test_invalid_value_is_refused_before_asking(client: SlotClient, manager: Manager, name: str, value: Any) -> None:
    def ask_in_session() -> None:
        client.session("Echo", **{name: value}).open()

    asks = [] if name == "idle_s" else [lambda: client.submit("Echo", 1, **{name: value})]
    for ask in [*asks, *([] if name in ("retriable", "request_id") else [ask_in_session])]:
        with pytest.raises(InvalidSlotError, match=f"{name} is"):
            ask()
    assert manager.asked == []


def test_closing_twice_does_nothing(client: SlotClient, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: Future[Any] = Future()
    gone.set_exception(ActorDiedError())
    asked = iter([Reference(gone)])
    manager.close = SimpleNamespace(remote=lambda: next(asked))
    client._is_ours = True
    client.close()
    assert not list(asked)


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have this process leave its cluster, when it is called."""
    there = ["its cluster"]
    monkeypatch.setattr(client_keeper, "this_connection", lambda: there[0] if there else None)
    return there.clear


def test_nobody_is_asked_after_leaving_cluster(leave: Callable[[], None], client: SlotClient, manager: Manager) -> None:
    """A call of an actor would have Ray start a cluster on this machine."""
    client._is_ours = True
    future, pieces, session = client.submit("m", 1), client.stream("m", 1), client.session("m")
    next(pieces)
    leave()
    for ask in (lambda: client.submit("m", 1), lambda: next(client.stream("m", 1)), client.status, session.open):
        with pytest.raises(NoClusterError, match="has left the cluster"):
            ask()
    future.cancel()
    pieces.close()
    client.close()
    assert len(manager.asked) == 2
    assert manager.cancelled == []


def test_client_is_not_renewed_after_leaving_cluster(
    leave: Callable[[], None], client: SlotClient, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_keeper, "RENEW_S", 0.01)
    handle: Any = SimpleNamespace()
    lease = Lease("s", "m", Grant("m-0", handle))
    client._keeper.add(lease)
    wait_until(lambda: bool(manager.renewed))
    leave()
    wait_until(lambda: lease.over != "")
    renewed = len(manager.renewed)
    time.sleep(0.05)
    assert len(manager.renewed) <= renewed + 1
    assert lease.over == "this process has left the cluster"


@pytest.mark.parametrize(
    "hosts", [SlotHosts(), (SlotHosts() for _ in range(2)), ["v4-8"], None], ids=["one", "generator", "str", "none"]
)
def test_hosts_that_are_no_list_are_refused(hosts: Any) -> None:
    """A generator would be used up before the hosts are asked for."""
    with pytest.raises(InvalidSlotError, match=r"hosts is .*; give a list, such as \[SlotHosts"):
        SlotClient(hosts)


def test_invalid_policy_is_refused() -> None:
    policy: Any = {"idle_s": 60}
    with pytest.raises(InvalidSlotError, match=r"policy is .*; give a ServingPolicy"):
        SlotClient(policy=policy)


class Echo:
    def __init__(self, lock: Any = None) -> None:
        """It needs none."""

    def __call__(self, payload: Any) -> Any:
        return payload


@pytest.mark.parametrize(
    ("found", "given", "kind"),
    [
        (DeviceKind.TPU, {}, DeviceKind.TPU),
        (DeviceKind.TPU, {"kind": DeviceKind.CPU}, DeviceKind.CPU),
        (None, {}, DeviceKind.GPU),
    ],
    ids=["asked", "given", "several"],
)
def test_client_without_hosts_of_its_own_asks_for_their_kind(
    client: SlotClient, manager: Manager, found: DeviceKind | None, given: dict[str, Any], kind: DeviceKind
) -> None:
    handle: Any = manager
    handle.kind = SimpleNamespace(remote=lambda: Reference(done(found)))
    handle.change = SimpleNamespace(remote=lambda orders, gone: Reference(done(None)))
    client._kind = None  # as `SlotClient.connect` leaves it
    assert client.register(Echo, memory={1: 1}, **given).kind is kind


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": 2**30}, "memory is 1073741824; give bytes by number of devices"),
        ({"memory": {1: 1}, "arguments": 5}, "arguments is 5; give values by name"),
        ({"memory": {1: 1}, "arguments": {"lock": threading.Lock()}}, "one of its arguments, can't be pickled"),
    ],
    ids=["memory", "arguments", "lock"],
)
def test_unservable_model_is_refused_with_reason(client: SlotClient, given: dict[str, Any], words: str) -> None:
    client._kind = DeviceKind.CPU
    with pytest.raises(InvalidSlotError, match=words):
        client.register(Echo, **given)
