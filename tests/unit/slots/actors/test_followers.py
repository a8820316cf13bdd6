"""The hosts of a slot that has several: they make each call together, and the slot ends if they are out of step."""

import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayTaskError

from iris_ray.errors import RemoteUserError
from iris_ray.model.job_info import JobInfo, job_info_of
from iris_ray.slots.actors import followers as module
from iris_ray.slots.actors import slot_actor, streams
from iris_ray.slots.actors.followers import Followers, opened
from iris_ray.slots.actors.messages import packed
from iris_ray.slots.actors.model_call import SlotRequest
from iris_ray.slots.actors.slot_actor import SlotActor

REQUEST = SlotRequest("r")


class Hosts:
    """Other hosts, whose calls run in threads of this process."""

    def __init__(self, *calls: Callable[[Any], str | None]) -> None:
        self._pool = ThreadPoolExecutor()
        self.followed: list[SlotRequest] = []
        self.follow: list[Any] = [self._in_thread(call) for call in calls]
        self.actors: list[Any] = [SimpleNamespace(follow=SimpleNamespace(remote=each)) for each in self.follow]

    def _in_thread(self, call: Callable[[Any], str | None]) -> Callable[..., "Future[str | None]"]:
        def follow(payload: Any, request: SlotRequest) -> "Future[str | None]":
            self.followed.append(request)
            return self._pool.submit(call, payload)

        return follow


class Exited(BaseException):
    pass


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set once the process would have exited."""
    exited = threading.Event()

    def leave(code: int) -> None:
        exited.set()
        raise Exited if threading.current_thread() is threading.main_thread() else SystemExit

    hook = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda args: None if args.exc_type is SystemExit else hook(args))
    monkeypatch.setattr(ray, "wait", _wait)
    monkeypatch.setattr(ray, "get", lambda call: call.result())
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(module, "OUT_OF_STEP_S", 20.0)
    place = JobInfo("j", "j/task-0", 0, 2, 1, 0, 1, "s", 0, "127.0.0.1:1234")
    for name, value in place.to_env().items():
        monkeypatch.setenv(name, value)
    yield exited
    for thread in threading.enumerate():
        if thread.name == "followers":
            thread.join(20)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may be out of step for a moment only."""
    monkeypatch.setattr(module, "OUT_OF_STEP_S", 0.05)


def _wait(calls: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    ended = wait(calls, timeout, FIRST_COMPLETED if num_returns == 1 else ALL_COMPLETED).done
    return [call for call in calls if call in ended], [call for call in calls if call not in ended]


def leading(*calls: Callable[[Any], str | None]) -> Followers:
    followers = Followers()
    followers.lead(Hosts(*calls).follow)
    return followers


def test_all_hosts_make_each_call_one_after_another() -> None:
    heard: list[Any] = []

    def follow(payload: Any) -> None:
        time.sleep(0.01)
        heard.append(opened(payload))

    followers = leading(follow, follow)

    def call(payload: int) -> None:
        with followers.calling((payload,), REQUEST):
            heard.append(payload)

    with ThreadPoolExecutor() as pool:
        list(pool.map(call, range(5)))
    by_call = [heard[n : n + 3] for n in range(0, 15, 3)]
    assert sorted(by_call) == [[n] * 3 for n in range(5)]


def test_failure_on_other_host_only_is_an_error_of_the_call() -> None:
    followers = leading(lambda _: None, lambda _: "ValueError: no such token")
    with (
        pytest.raises(RemoteUserError, match="another host of its slot: ValueError: no such token"),
        followers.calling((1,), REQUEST),
    ):
        pass


def test_failure_on_all_hosts_is_the_models_own_error() -> None:
    followers = leading(lambda _: "ZeroDivisionError")
    with pytest.raises(ZeroDivisionError), followers.calling((1,), REQUEST):
        raise ZeroDivisionError


@pytest.mark.usefixtures("soon")
def test_slot_ends_if_host_continues_call_leader_ended(exits: threading.Event) -> None:
    may_end = threading.Event()
    followers = leading(lambda _: None if may_end.wait(20) else "")
    with pytest.raises(Exited), followers.calling((1,), REQUEST):
        pass
    assert exits.is_set()
    may_end.set()


@pytest.mark.usefixtures("soon")
def test_slot_ends_if_leader_continues_call_failed_elsewhere(exits: threading.Event) -> None:
    followers = leading(lambda _: "OSError: the disk is full", lambda _: None)
    with pytest.raises((RemoteUserError, Exited)), followers.calling((1,), REQUEST):
        assert exits.wait(20)


def test_no_call_begins_while_a_host_is_in_the_last(exits: threading.Event) -> None:
    ended: list[str] = []

    def slow(_: Any) -> None:
        time.sleep(0.05)
        ended.append("slow")

    followers = leading(lambda _: "ValueError: bad input", slow)
    with pytest.raises(RemoteUserError, match="bad input"), followers.calling((1,), REQUEST):
        pass
    assert ended == ["slow"]
    assert not exits.is_set()


@pytest.mark.parametrize("first", ["OSError: the disk is full", None])
@pytest.mark.usefixtures("soon")
def test_slot_ends_if_two_hosts_continue_call_third_ended(exits: threading.Event, first: str | None) -> None:
    """The leader and another host wait for what the third one does not take part in."""
    may_end = threading.Event()
    followers = leading(lambda _: first, lambda _: None if may_end.wait(20) else "")
    with pytest.raises(Exited), followers.calling((1,), REQUEST):
        assert exits.wait(20)
    may_end.set()


@pytest.mark.usefixtures("soon")
def test_call_of_lost_host_runs_again_with_the_slot(exits: threading.Event) -> None:
    """It would be the model's fault otherwise, and the caller would not have it repeated."""

    def lost(_: Any) -> None:
        raise ActorDiedError

    with pytest.raises(Exited), leading(lost).calling((1,), REQUEST):
        pass
    assert exits.is_set()


def test_payload_other_host_cannot_open_is_error_of_call(exits: threading.Event) -> None:
    def unreadable(_: Any) -> None:
        raise RayTaskError("follow", "", ModuleNotFoundError("no module named 'tables'"))

    with pytest.raises(RemoteUserError, match="no module named 'tables'"), leading(unreadable).calling((1,), REQUEST):
        pass
    assert not exits.is_set()


class Reference:
    """Stands for an `ObjectRef`: Ray puts the object in its place if it is an argument of a call by itself."""


class Doubles:
    def __call__(self, payload: Any) -> Any:
        if isinstance(payload, Reference):
            return "a reference"
        payload[0] = 2 * payload[0]
        return payload


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> SlotActor:
    monkeypatch.setattr("iris_ray.slots.actors.slot_actor.join_task", lambda: None)
    found = SlotActor({})
    assert found.load(cloudpickle.dumps((Doubles, {}))) is None
    return found


@pytest.mark.parametrize("payload", [Reference(), [1]])
def test_every_host_gets_the_same_payload(actor: SlotActor, payload: Any) -> None:
    sent: list[Any] = []
    hosts = Hosts(lambda each: sent.append(each))
    actor.lead(hosts.actors)
    data = packed(payload).data
    requests = [SlotRequest("r", 2), SlotRequest("s"), SlotRequest("c"), SlotRequest("p")]
    for answer in (actor.serve(requests[0], data), *actor.stream(requests[1], data).pieces):
        assert answer is not None
        answer.open()
    actor.open_session("session")
    actor.call("session", "c", payload)
    list(actor.call_in_pieces("session", "p", payload))
    assert not any(isinstance(each, Reference) for each in sent), "Ray would open it on the way"
    assert [type(opened(each)) for each in sent] == [type(payload)] * 4
    assert [opened(each) for each in sent[:2]] == [[1], [1]] or isinstance(payload, Reference)
    assert hosts.followed == requests
    assert [actor.follow(each, requests[0]) for each in sent] == [None] * 4


def test_unwanted_pieces_are_made_if_others_make_them() -> None:
    made: list[int] = []

    def pieces() -> Iterator[int]:
        for number in range(4):
            made.append(number)
            yield number

    for followers, expected in ((Followers(), [0]), (leading(lambda _: None), [0, 1, 2, 3])):
        made.clear()
        read = followers.in_full(pieces())
        next(read)
        read.close()
        assert made == expected
    assert list(leading(lambda _: None).in_full(pieces())) == [0, 1, 2, 3]


def test_hosts_meet_at_free_port_of_leader() -> None:
    address = Followers().lead(Hosts(lambda _: None).follow)
    assert address.startswith("127.0.0.1:")
    assert address != "127.0.0.1:1234"
    module.meet_at(address)
    me = job_info_of(os.environ)
    assert me is not None
    assert me.coordinator_address == address


class Words:
    def __call__(self, count: int) -> Iterator[int]:
        yield from range(count)


class AsyncWords:
    async def __call__(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number


def read_stream(leader: SlotActor, pieces: int) -> Iterator[None]:
    """Have a slot answer in pieces, and read each one when it is wanted."""
    with ThreadPoolExecutor() as threads:
        ended = threads.submit(leader.stream, REQUEST, packed(pieces).data)
        for _ in range(pieces - 1):
            assert len(leader.take()["r"]) == 1
            yield
            leader.note_read("r", 1)
        ended.result(10)


@pytest.mark.parametrize("model", [Words, AsyncWords])
@pytest.mark.parametrize("is_session", [False, True])
@pytest.mark.usefixtures("soon")
def test_slow_reader_ends_no_slot(
    exits: threading.Event, monkeypatch: pytest.MonkeyPatch, model: type, is_session: bool
) -> None:
    """The other hosts have made their pieces at once: nobody reads these. The leader waits for its reader."""
    monkeypatch.setattr(slot_actor, "join_task", lambda: None)
    leader = SlotActor({})
    assert leader.load(cloudpickle.dumps((model, {}))) is None
    leader.lead(Hosts(lambda _: None).actors)
    if is_session:
        leader.open_session("s")
        pieces = leader.call_in_pieces("s", "c", 20)
    else:
        monkeypatch.setattr(streams, "MOST_PIECES", 1)
        pieces = read_stream(leader, 20)
    for _ in pieces:
        time.sleep(0.01)  # in all, four times as long as hosts may be out of step
        assert not exits.is_set()
