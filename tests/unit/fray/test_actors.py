"""Calls of an actor's methods, over a real connection in one process: results, errors, threads, strangers."""

import asyncio
import inspect
import itertools
import pickle
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
import ray

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.endpoints import task as endpoints
from iris_ray.errors import (
    ActorUnavailableError,
    ControllerUnavailableError,
    RemoteUserError,
    ResultNotPicklableError,
    UnknownNameError,
    UnsupportedOptionError,
)
from iris_ray.fray import actor_handle, actor_server
from iris_ray.fray.actor_handle import (
    END,
    ActorAddress,
    ActorGroup,
    ActorHandle,
    Connection,
    InProcess,
    InTaskOf,
    require_no_tls,
)
from iris_ray.fray.actor_server import ActorServer, actor_request
from iris_ray.fray.client import Client
from iris_ray.testing.servers import ServerThread
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

    def measure(self, data: bytes) -> int:
        return len(data)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def _secret(self) -> str:
        return "secret"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorServer]:
    """Callers ping it every second during a call, as they do every ten otherwise."""
    monkeypatch.setattr(actor_handle, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    server = ActorServer(2)
    yield server
    server.stop()


@pytest.fixture
def handle(server: ActorServer) -> ActorHandle:
    server.serve(Counter())
    return ActorHandle(InProcess("counter", server.address))


def test_methods_get_arguments_and_return_results(handle: ActorHandle) -> None:
    assert handle.add(2) == 2
    assert handle.add.remote(3, twice=True).result() == 8
    assert handle.add.submit(1).result(timeout=10) == 9
    assert len(handle.give(20_000_000)) == 20_000_000, "gRPC's own limit is 4 MB"


def test_handle_is_picklable_and_shows_no_token(handle: ActorHandle, server: ActorServer) -> None:
    copy = pickle.loads(pickle.dumps(handle))
    assert copy.add(1) == 1
    assert server.address.token not in f"{copy!r} {copy._place!r} {copy.add!r}"


def test_error_is_methods_own_with_traceback_note(handle: ActorHandle) -> None:
    with pytest.raises(ValueError, match="no such thing") as raised:
        handle.fail()
    assert 'raise ValueError("no such thing")' in "".join(raised.value.__notes__)
    with pytest.raises(AttributeError, match="no_such_method"):
        handle.no_such_method()


def test_value_that_cannot_travel_is_reported(handle: ActorHandle) -> None:
    with pytest.raises(RemoteUserError, match="CanNotTravel: 1 and 2"):
        handle.fail_oddly()
    with pytest.raises(ResultNotPicklableError, match="pickle"):
        handle.lock()
    with pytest.raises(TypeError, match="pickle"):
        handle.add(threading.Lock())


def test_exit_in_method_ends_call_not_actor(handle: ActorHandle) -> None:
    with pytest.raises(SystemExit):
        handle.leave()
    assert handle.add(1) == 1


def test_concurrent_methods_are_limited_as_configured(server: ActorServer) -> None:
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


def test_pings_of_long_call_do_not_end_it(handle: ActorHandle) -> None:
    """By default, gRPC's server ends a connection with the third ping."""
    assert handle.sleep(6.0) == "slept"


def test_attempt_to_connect_that_fails_costs_one_call(
    handle: ActorHandle, server: ActorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_handle, "unavailable", ActorUnavailableError)
    host, _, port = server.address.target.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset_once_and_pass_on() -> None:
            first = listener.accept()[0]
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            first.close()
            with (
                listener.accept()[0] as caller,
                socket.create_connection((host, int(port))) as actor,
                selectors.DefaultSelector() as ready,
            ):
                ready.register(caller, selectors.EVENT_READ, actor)
                ready.register(actor, selectors.EVENT_READ, caller)
                while found := ready.select(20.0):
                    for key, _ in found:
                        assert isinstance(key.fileobj, socket.socket)
                        if not (data := key.fileobj.recv(1 << 16)):
                            return
                        key.data.sendall(data)

        between = threading.Thread(target=reset_once_and_pass_on, daemon=True)
        between.start()
        address = ActorAddress(f"127.0.0.1:{listener.getsockname()[1]}", server.address.token)
        lost, other = (ActorHandle(InProcess("counter", address)) for _ in range(2))
        with pytest.raises(ActorUnavailableError):
            lost.add(1)
        assert other.add(1) == 1
        server.stop()
        between.join(10)


@contextmanager
def no_thread(number: int) -> Iterator[None]:
    """Within, the process can't start the thread of this number, counted from 0."""
    numbers, start = itertools.count(), threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if next(numbers) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        yield


def test_handle_whose_caller_had_no_thread_is_answered_later(
    handle: ActorHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_handle, "unavailable", ActorUnavailableError)  # Fray's own error needs Fray
    with no_thread(0), pytest.raises(ActorUnavailableError, match="which may run, has no answer: can't start new"):
        handle.add(1)
    assert handle.add.remote(2).result(10) in (2, 3)


def test_actor_that_cannot_start_thread_still_answers(handle: ActorHandle) -> None:
    with no_thread(1):  # after the thread of the caller
        calls = [handle.sleep.remote(0.2), handle.add.remote(1)]
        assert [call.result(10) for call in calls] == ["slept", 1]
    assert handle.add.remote(1).result(10) == 2


def test_server_that_cannot_start_all_its_threads_leaves_none() -> None:
    before = set(threading.enumerate())
    with no_thread(2), pytest.raises(RuntimeError, match="can't start new thread"):
        ActorServer(3)
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_stop_without_thread_ends_running_calls_and_closes_port(
    handle: ActorHandle, server: ActorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_handle, "unavailable", ActorUnavailableError)
    call = handle.sleep.remote(3.0)
    with pytest.raises(TimeoutError):
        call.result(0.2)
    with no_thread(0):
        server.stop()
    with pytest.raises(ActorUnavailableError):
        call.result(10)
    assert closes(server.address)


def test_server_that_never_served_closes_its_port(server: ActorServer) -> None:
    assert listens(server.address)
    server.stop()
    assert closes(server.address)


def test_server_that_could_not_start_closes_its_port(server: ActorServer) -> None:
    with no_thread(0), pytest.raises(RuntimeError, match="can't start new thread"):
        server.serve(Counter())
    assert closes(server.address)
    server.stop()


def test_actor_that_cannot_register_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fray.actor", reason="needs Fray: make marin")
    addresses: list[str] = []

    def refuse(name: str, address: str) -> None:
        addresses.append(address)
        raise ControllerUnavailableError("no store")

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(actor_server, "get_job_info", lambda: SimpleNamespace(job_id="eval-1a2b", task_index=0))
    monkeypatch.setattr(endpoints, "register_endpoint", refuse)
    with pytest.raises(ControllerUnavailableError):
        actor_server.serve_actor(Counter, (), {}, "eval", 1)
    assert closes(ActorAddress.parse(addresses[0]))


def closes(address: ActorAddress) -> bool:
    """Whether nothing listens there soon. gRPC closes ports in threads of its own."""
    return bool(wait_until(lambda: not listens(address), 10))


def listens(address: ActorAddress) -> bool:
    host, _, port = address.target.rpartition(":")
    with socket.socket() as caller:
        return caller.connect_ex((host, int(port))) == 0


SERVER = """
import signal, sys, time
import ray
from iris_ray.fray.actor_server import ActorServer
class Slow:
    def sleep(self, seconds):
        time.sleep(seconds)
ray.util.get_node_ip_address = lambda: "127.0.0.1"
server = ActorServer(2)
server.serve(Slow())
print(server.address, flush=True)
signal.pause()
"""


def test_call_to_stopped_process_raises_within_two_keepalives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_handle, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(actor_handle, "unavailable", ActorUnavailableError)  # Fray's own error needs Fray
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = ActorAddress.parse(process.stdout.readline())
            call = ActorHandle(InProcess("slow", address)).sleep.remote(600.0)
            time.sleep(3.5)  # after the first pings, gRPC waits for a minute unless it is told otherwise
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(ActorUnavailableError, match="has no answer"):
                call.result(50)
            assert time.monotonic() - began < 20
        finally:
            process.kill()


def test_actor_of_forgotten_job_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(job_id: str, prefix: str) -> dict[str, str]:
        raise UnknownNameError("there is no such job")

    monkeypatch.setattr(actor_handle, "unavailable", ActorUnavailableError)
    monkeypatch.setattr(endpoints, "endpoints_of", forgotten)
    with pytest.raises(ActorUnavailableError, match="does not run now"):
        ActorHandle(InTaskOf("eval-1a2b", "eval-0")).add(1)


def test_calls_run_although_their_futures_are_dropped(server: ActorServer) -> None:
    counter = Counter()
    server.serve(counter)
    for _ in range(50):
        ActorHandle(InProcess("counter", server.address)).add.remote(1)
    wait_until(lambda: counter.count == 50)


def test_last_call_of_process_that_ends_arrives(server: ActorServer) -> None:
    counter = Counter()
    server.serve(counter)
    script = (
        "from iris_ray.fray.actor_handle import ActorAddress, ActorHandle, InProcess\n"
        f"ActorHandle(InProcess('counter', ActorAddress.parse({str(server.address)!r}))).add.remote(1)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert counter.count == 1


def test_submit_that_times_out_does_not_begin(server: ActorServer) -> None:
    counter = Counter()
    server.serve(counter)
    handle = ActorHandle(InProcess("counter", server.address))
    busy = [handle.together.remote() for _ in range(2)]
    wait_until(lambda: counter.inside == 2)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s, and is cancelled"):
        handle.add.submit(1).result(0.1)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s$"):
        handle.add.remote(10).result(0.1)
    counter.go.set()
    assert [call.result(10) for call in busy] == [2, 2]
    assert handle.add(100) in (100, 110)
    wait_until(lambda: counter.count == 110)


def test_only_who_has_the_token_ends_an_actor(server: ActorServer) -> None:
    server.serve(Counter())
    with pytest.raises(grpc.RpcError):
        Connection.to(ActorAddress(server.address.target, "guess")).send(END, b"").result(10)
    assert not server.end.is_set()
    Connection.to(server.address).send(END, b"").result(10)
    assert server.end.is_set()


def test_private_methods_are_not_served(handle: ActorHandle) -> None:
    with pytest.raises(AttributeError):
        handle._secret()
    from iris_ray.fray.actor_handle import pack_call, unpack_answer

    with pytest.raises(AttributeError, match="underscore"):
        unpack_answer(handle._call(pack_call("_secret", (), {}))[0].result())


def test_caller_without_token_is_refused_before_unpickling(handle: ActorHandle, server: ActorServer) -> None:
    bomb = b"cos\nsystem\n(S'false'\ntR."
    stranger = ActorHandle(InProcess("counter", ActorAddress(server.address.target, "guess")))
    with pytest.raises(grpc.RpcError) as refused:
        stranger._call(bomb)[0].result(10)
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_arguments_of_strangers_are_not_even_read(handle: ActorHandle, server: ActorServer) -> None:
    with closing(Counting(server.address.target)) as between:
        target = f"127.0.0.1:{between.port}"
        assert (
            ActorHandle(InProcess("counter", ActorAddress(target, server.address.token))).measure(bytes(10**7)) == 10**7
        )
        assert between.passed > 10**7
        before = between.passed
        stranger = ActorHandle(InProcess("counter", ActorAddress(target, "guess")))
        with pytest.raises(grpc.RpcError):
            stranger._call(bytes(10**8))[0].result(60)
        assert between.passed - before < 10**7


class Counting:
    """Passes the bytes of connections on to a server, and counts them."""

    def __init__(self, target: str) -> None:
        self.passed = 0
        self._target = target.split(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._thread = ServerThread("counting")
        self._server = self._thread.run(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._thread.run(self._close())
        self._thread.close()

    async def _close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, from_caller: asyncio.StreamReader, to_caller: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*self._target)
        self._writers += to_caller, to_server
        await asyncio.gather(self._pass(from_caller, to_server), self._pass(from_server, to_caller))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                self.passed += len(data)
                sink.write(data)
                await sink.drain()
            sink.close()


def test_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_server, "IDLE_MS", 1000)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    server = ActorServer(2)
    server.serve(Counter())
    handle = ActorHandle(InProcess("counter", server.address))
    try:
        assert handle.add(1) == 1
        host, _, port = str(server.address.target).rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            while stranger.recv(4096):  # what gRPC says, until it closes
                pass
        assert handle.add(1) == 2  # over another connection
    finally:
        server.stop()


def test_connections_leave_descriptors_to_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's process may have as many again, for its own files."""
    before = psutil.Process().num_fds()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    monkeypatch.setattr(actor_server, "LIMITS", [])  # strangers would be closed anyway after a while
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    server = ActorServer(2)
    server.serve(Counter())
    handle = ActorHandle(InProcess("counter", server.address))
    try:
        host, _, port = str(server.address.target).rpartition(":")
        with ExitStack() as strangers:
            for _ in range(200):
                stranger = strangers.enter_context(socket.create_connection((host, int(port)), timeout=30))
            while stranger.recv(4096):  # what gRPC says, until it closes the last one
                pass
            assert psutil.Process().num_fds() - before < 200 + 100
        wait_until(lambda: psutil.Process().num_fds() - before < 50)  # the server closes its ends soon after
        assert handle.add(1) == 1
    finally:
        server.stop()


def test_methods_run_in_actors_creation_context(server: ActorServer) -> None:
    current = pytest.importorskip("fray.current_client", reason="needs Fray: make marin")

    class Asks:
        def client(self) -> bool:
            return current.current_client() is client

    client: Any = object()
    with current.set_current_client(client):
        server.serve(Asks())
    assert ActorHandle(InProcess("asks", server.address)).client()


def test_gone_actor_is_unavailable(handle: ActorHandle, server: ActorServer) -> None:
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


def test_late_check_of_lost_attempts_call_spares_next_attempt(
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


def test_actors_are_refused_with_encrypted_ray() -> None:
    with pytest.raises(UnsupportedOptionError, match="not encrypted"):
        require_no_tls({"RAY_USE_TLS": "1"})
    require_no_tls({"RAY_USE_TLS": "0"})


def test_group_waits_as_long_as_frays_own() -> None:
    theirs = pytest.importorskip("fray.iris_backend", reason="needs Fray: make marin").IrisActorGroup
    ours, wanted = (inspect.signature(group.wait_ready).parameters["timeout"] for group in (ActorGroup, theirs))
    assert ours.default == wanted.default


def request_of(count: int, resources: Any = None, **config: Any) -> RunRequest:
    types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
    return actor_request(Client, Counter, (), {}, "eval", count, resources, types.ActorConfig(**config), None)


def test_group_survives_as_many_failures_as_there_can_be() -> None:
    assert request_of(3).spec.max_task_failures == 3
    assert request_of(3, max_task_retries=2).spec.max_task_failures == 9


@pytest.mark.parametrize("children", ["adopt", "end", None])
def test_actors_jobs_outlive_its_attempts_if_the_client_says_so(
    children: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fray", reason="needs Fray: make marin")
    submitted: list[RunRequest] = []

    def launch(request: RunRequest, detached: bool) -> SimpleNamespace:
        submitted.append(request)
        return SimpleNamespace(job_id=request.spec.job_id)

    monkeypatch.setattr("iris_ray.fray.client.launch", launch)  # a real one needs a cluster
    client = Client(SimpleNamespace(is_direct=True), children=children)  # type: ignore[arg-type]
    client.create_actor_group(Counter, name="eval", count=2)
    assert [request.spec.children for request in submitted] == [children or "end"]


def test_group_that_is_gang_fails_as_whole() -> None:
    types = pytest.importorskip("fray.types", reason="needs Fray: make marin")
    asked = types.ResourceConfig.with_tpu("v4-16", cpu=1, ram="1g")
    assert request_of(2, asked).spec.max_task_failures is None


def test_other_endpoints_of_actor_group_are_no_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"eval-1": "a", "eval-0": "b", "eval-metrics": "c"}
    monkeypatch.setattr(endpoints, "endpoints_of", lambda job_id, prefix: found)
    group = actor_handle.ActorGroup("eval-1a2b", "eval", 2)
    assert [repr(actor) for actor in group.discover_new()] == [
        "<ActorHandle eval-0 of eval-1a2b>",
        "<ActorHandle eval-1 of eval-1a2b>",
    ]
    assert group.ready_count == 2
