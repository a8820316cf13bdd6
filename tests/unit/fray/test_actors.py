"""Calls of an actor's methods, over a real connection in one process: results, errors, threads, strangers."""

import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import ray

from iris_ray.errors import ActorUnavailableError, RemoteUserError, ResultNotPicklableError, UnsupportedOptionError
from iris_ray.fray import actor_handle
from iris_ray.fray.actor_handle import ActorAddress, ActorHandle, InProcess, require_no_tls
from iris_ray.fray.actor_server import ActorServer
from tests.support.waiting import wait_until


class CanNotTravel(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.inside = 0
        self.most = 0
        self.go = threading.Event()

    def add(self, amount: int, *, twice: bool = False) -> int:
        self.count += amount * (2 if twice else 1)
        return self.count

    def fail(self) -> None:
        raise ValueError("no such thing")

    def fail_oddly(self) -> None:
        raise CanNotTravel(1, 2)

    def lock(self) -> Any:
        return threading.Lock()

    def leave(self) -> None:
        raise SystemExit(3)

    def together(self) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.go.wait(5)
        self.inside -= 1
        return self.most

    def give(self, size: int) -> bytes:
        return bytes(size)

    def _secret(self) -> str:
        return "secret"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorServer]:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    server = ActorServer(2)
    yield server
    server.stop()


@pytest.fixture
def handle(server: ActorServer) -> ActorHandle:
    server.serve(Counter())
    return ActorHandle(InProcess("counter", server.address))


def test_methods_are_called_with_their_arguments_and_answer_with_results(handle: ActorHandle) -> None:
    assert handle.add(2) == 2
    assert handle.add.remote(3, twice=True).result() == 8
    assert handle.add.submit(1).result(timeout=10) == 9
    assert len(handle.give(20_000_000)) == 20_000_000, "gRPC's own limit is 4 MB"


def test_handle_can_be_sent_and_shows_no_token(handle: ActorHandle, server: ActorServer) -> None:
    copy = pickle.loads(pickle.dumps(handle))
    assert copy.add(1) == 1
    assert server.address.token not in f"{copy!r} {copy._place!r} {copy.add!r}"


def test_error_is_the_methods_own_with_its_traceback_as_a_note(handle: ActorHandle) -> None:
    with pytest.raises(ValueError, match="no such thing") as raised:
        handle.fail()
    assert 'raise ValueError("no such thing")' in "".join(raised.value.__notes__)
    with pytest.raises(AttributeError, match="no_such_method"):
        handle.no_such_method()


def test_what_can_not_travel_is_said(handle: ActorHandle) -> None:
    with pytest.raises(RemoteUserError, match="CanNotTravel: 1 and 2"):
        handle.fail_oddly()
    with pytest.raises(ResultNotPicklableError, match="pickle"):
        handle.lock()
    with pytest.raises(TypeError, match="pickle"):
        handle.add(threading.Lock())


def test_exit_in_a_method_ends_the_call_and_not_the_actor(handle: ActorHandle) -> None:
    with pytest.raises(SystemExit):
        handle.leave()
    assert handle.add(1) == 1


def test_as_many_methods_run_at_a_time_as_is_said(server: ActorServer) -> None:
    counter = Counter()
    server.serve(counter)
    handle = ActorHandle(InProcess("counter", server.address))
    calls = [handle.together.remote() for _ in range(4)]
    while counter.inside < 2:
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s"):
        calls[0].result(0.1)
    counter.go.set()
    assert max(call.result(10) for call in calls) == 2


def test_private_methods_are_not_served(handle: ActorHandle) -> None:
    with pytest.raises(AttributeError):
        handle._secret()
    from iris_ray.fray.actor_handle import pack_call, unpack_answer

    with pytest.raises(AttributeError, match="underscore"):
        unpack_answer(handle._call(pack_call("_secret", (), {}))[0].result())


def test_stranger_without_the_token_is_refused_before_anything_is_unpickled(
    handle: ActorHandle, server: ActorServer
) -> None:
    bomb = b"cos\nsystem\n(S'false'\ntR."
    stranger = ActorHandle(InProcess("counter", ActorAddress(server.address.target, "guess")))
    with pytest.raises(grpc.RpcError) as refused:
        stranger._call(bomb)[0].result(10)
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_methods_run_in_the_context_in_which_the_actor_was_made(server: ActorServer) -> None:
    current = pytest.importorskip("fray.current_client", reason="needs Fray: make marin")

    class Asks:
        def client(self) -> bool:
            return current.current_client() is client

    client: Any = object()
    with current.set_current_client(client):
        server.serve(Asks())
    assert ActorHandle(InProcess("asks", server.address)).client()


def test_actor_that_is_gone_is_unavailable(handle: ActorHandle, server: ActorServer) -> None:
    pytest.importorskip("fray.actor", reason="needs Fray: make marin")
    assert handle.add(1) == 1
    server.stop()
    with pytest.raises(RuntimeError, match="add of <ActorHandle counter> has no answer"):
        handle.add(1)


@dataclass
class Moves:
    """An actor whose attempts have different addresses."""

    address: ActorAddress

    def find(self) -> ActorAddress:
        return self.address


def test_late_look_at_a_call_of_a_lost_attempt_leaves_calls_of_the_next_attempt_alone(
    server: ActorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_handle, "unavailable", ActorUnavailableError)  # Fray's own word needs Fray
    lost, counter = ActorServer(2), Counter()
    lost.serve(Counter())
    server.serve(counter)
    place: Any = Moves(lost.address)
    handle = ActorHandle(place)
    first, second = handle.together.remote(), handle.together.remote()
    lost.stop()
    place.address = server.address
    with pytest.raises(ActorUnavailableError):
        first.result(10)
    again = handle.together.remote()
    wait_until(lambda: counter.inside)
    with pytest.raises(ActorUnavailableError):
        second.result(10)
    counter.go.set()
    assert again.result(10) == 1


def test_actors_are_refused_where_ray_encrypts() -> None:
    with pytest.raises(UnsupportedOptionError, match="not encrypted"):
        require_no_tls({"RAY_USE_TLS": "1"})
    require_no_tls({"RAY_USE_TLS": "0"})


def test_endpoints_that_the_actors_of_a_group_have_besides_are_no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"eval-1": "a", "eval-0": "b", "eval-metrics": "c"}
    monkeypatch.setattr(actor_handle, "endpoints_of", lambda job_id, prefix: found)
    group = actor_handle.ActorGroup("eval-1a2b", "eval", 2)
    assert [repr(actor) for actor in group.discover_new()] == [
        "<ActorHandle eval-0 of eval-1a2b>",
        "<ActorHandle eval-1 of eval-1a2b>",
    ]
    assert group.ready_count == 2
