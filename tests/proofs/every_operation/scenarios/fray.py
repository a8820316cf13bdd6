"""An actor of Fray's in a task: it is called one by one and twice at a time, ended by its group, and called again."""

import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from iris_ray.endpoints import task as endpoints
from iris_ray.errors import ControllerUnavailableError
from iris_ray.fray import actor_handle, actor_server
from iris_ray.fray.actor_handle import ActorAddress, ActorFuture, ActorGroup, ActorHandle, InTaskOf
from iris_ray.fray.actor_server import ActorServer, serve_actor
from iris_ray.model.lifecycle import TaskState
from tests.proofs.every_operation.operations import KILLED, Operations, StoreIsAwayError
from tests.proofs.every_operation.runs import Said, Scenario

LOOPBACK = "127.0.0.1"
ERRORS = RuntimeError, ControllerUnavailableError
JOB, GROUP, ENDPOINT = "job-1a2b", "ledger", "ledger-0"
CALLS = [[0], [1, 2], [3], [4, 5]]
"""The calls, by number; those of one list are sent together."""
MOST_LOST = 3
"""Calls that one fault may cost: all that are sent together, and the next one, if it was the connection's end."""
ANSWER_S, ENDED_S = 15.0, 5.0
"""The time in which a call to a healthy actor has its answer, and one to an ended actor its error; seconds."""
open_, write, pipe, exit_now, start = os.open, os.write, os.pipe, os._exit, threading.Thread.start


def fray() -> Scenario:
    for module in ("fray.actor", "fray.types"):  # in each process it would take long
        import_module(module)
    return Scenario(
        "fray",
        lambda place: None,
        _act,
        _judge,
        ERRORS,
        {"a lost call is sent again": _send_again, "an ended actor goes on listening": _keep_serving},
    )


class Ledger:
    """Writes down each call that runs, in a file that outlives it.

    Args:
        file: takes a line for each call.
    """

    def __init__(self, file: str) -> None:
        self._file = open_(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, number: int) -> int:
        write(self._file, f"{number}\n".encode())
        return number

    def close(self) -> None:
        os.close(self._file)


class Between:
    """Passes the bytes between an actor and its callers on. Each connect, recv and send counts as an operation.

    Attributes:
        port: where it listens.
        target: of the actor; None: there is none.
    """

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self._listener = socket.create_server((LOOPBACK, 0))
        self._stop, self._stopped = pipe()
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="between")
        start(self._thread)

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        self._listener.close()
        os.close(self._stop)

    def _run(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stop, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == self._stop:
                        for one in others:
                            one.close()
                        return
                    if key.fileobj is self._listener:
                        for one, other in self._accepted():
                            others[one] = other
                            selector.register(one, selectors.EVENT_READ)
                    elif key.fileobj in others and not self._passes(one := key.fileobj, others[one]):
                        for lost in (one, others[one]):
                            selector.unregister(lost)
                            del others[lost]
                            lost.close()

    def _accepted(self) -> list[tuple[socket.socket, socket.socket]]:
        caller = self._listener.accept()[0]
        try:
            if self.target is None:
                raise ConnectionRefusedError
            actor = socket.create_connection(self.target)
        except OSError:
            caller.close()
            return []
        for one in (caller, actor):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets it
        return [(caller, actor), (actor, caller)]

    def _passes(self, source: socket.socket, sink: socket.socket) -> bool:
        with suppress(OSError):
            if data := source.recv(1 << 16):
                sink.sendall(data)
                return True
        return False


class Task:
    """The actor's task: it serves the actor in a thread of this process. It stands for the job of one task, too."""

    def __init__(self, ledger: Ledger, servers: list[ActorServer]) -> None:
        self.job_id = JOB
        self.servers = servers
        self.error = ""
        self._ledger = ledger
        self._thread = threading.Thread(target=self._run, name="task")
        start(self._thread)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            serve_actor(lambda: self._ledger, (), {}, GROUP, 2)  # type: ignore[arg-type]
        except ERRORS:
            pass  # the task has failed, and says why
        except BaseException as error:
            self.error = repr(error)

    # -- the job, as its handle shows it --

    def look(self) -> Any:
        return SimpleNamespace(state=SimpleNamespace(finished=not self.runs))

    def tasks(self) -> list[Any]:
        return [SimpleNamespace(state=TaskState.RUNNING if self.runs else TaskState.SUCCEEDED)]

    def wait(self, timeout: float, *, raise_on_failure: bool) -> None:
        self._thread.join(timeout)

    def terminate(self) -> None:
        """A host ends the process; here, the actor."""
        for server in self.servers:
            server.end.set()
        self._thread.join(ENDED_S)


def _act(place: Path, said: Said, operations: Operations) -> None:
    ray.util.get_node_ip_address = lambda: LOOPBACK
    actor_handle.KEEPALIVE_MS = 1000  # gRPC keeps its own descriptors until its last timer has ended
    actor_server.LIMITS[0] = ("grpc.server_handshake_timeout_ms", 1000)
    between, registered = Between(), dict[str, str]()

    def register(name: str, address: str) -> None:
        try:
            operations.do("kv write", registered.__setitem__, name, address)
        except StoreIsAwayError as error:
            raise ControllerUnavailableError(str(error)) from None
        host, _, port = ActorAddress.parse(address).target.rpartition(":")
        between.target = host, int(port)

    def found(job_id: str, prefix: str) -> dict[str, str]:
        try:
            addresses = dict(operations.do("kv read", registered.items))
        except StoreIsAwayError as error:
            raise ControllerUnavailableError(str(error)) from None
        at = f"{LOOPBACK}:{between.port}"
        return {name: str(ActorAddress(at, ActorAddress.parse(address).token)) for name, address in addresses.items()}

    setattr(endpoints, "register_endpoint", register)  # noqa: B010
    setattr(actor_server, "get_job_info", lambda: SimpleNamespace(job_id=JOB, task_index=0))  # noqa: B010
    make, servers = ActorServer.__init__, list[ActorServer]()
    ledger = Ledger(str(place / "ran"))
    task: Task | None = None

    def made(server: ActorServer, *args: Any) -> None:
        make(server, *args)
        servers.append(server)

    setattr(ActorServer, "__init__", made)  # noqa: B010

    def running(job_id: str, prefix: str) -> dict[str, str]:
        return found(job_id, prefix) if task is not None and task.runs else {}

    setattr(endpoints, "endpoints_of", running)  # noqa: B010
    try:
        task = Task(ledger, servers)
        while not registered and task.runs:
            time.sleep(0.001)
        handle = ActorHandle(InTaskOf(JOB, ENDPOINT))
        if task.runs:
            _call_all(task, handle, said)
            _end(task, handle)
    finally:
        if task is not None:
            task.terminate()
        assert task is None or not task.runs, "the actor has not ended"
        assert task is None or not task.error, task.error
        between.close()
        ledger.close()
        if not all(server._runs for server in servers):
            exit_now(KILLED)  # gRPC has no thread that takes this server apart; a task's process ends with its error
        servers.clear()  # as long as Python has one, gRPC keeps its own descriptors


def _call_all(task: Task, handle: ActorHandle, said: Said) -> None:
    lost = 0
    for numbers in CALLS:
        futures = []
        for number in numbers:
            said("called", number)
            futures.append(handle.add.remote(number))
        for number, future in zip(numbers, futures, strict=True):
            try:
                said("answered", number, future.result(ANSWER_S))
            except TimeoutError:
                raise AssertionError(f"call {number} has no answer, and no error") from None
            except RuntimeError:
                lost += 1
    assert lost <= MOST_LOST or not task.runs, f"{lost} calls are lost by one fault"


def _end(task: Task, handle: ActorHandle) -> None:
    group = ActorGroup(JOB, GROUP, 1)
    group._job = task  # type: ignore[assignment]
    with suppress(ControllerUnavailableError):
        group.shutdown()
    if task.runs:
        task.terminate()
    began = time.monotonic()
    try:
        handle.add.remote(99).result(ANSWER_S)
        raise AssertionError("an ended actor answers")
    except TimeoutError:
        raise AssertionError("a call to an ended actor waits for ever") from None
    except RuntimeError:
        assert time.monotonic() - began < ENDED_S


def _judge(place: Path, said: list[list[Any]]) -> None:
    file = place / "ran"
    ran = Counter(map(int, file.read_text().split())) if file.exists() else Counter()
    called = {number for word, number, *_ in said if word == "called"}
    answered = {number: value for word, number, *(value,) in (one for one in said if one[0] == "answered")}
    assert all(times == 1 for times in ran.values()), f"done twice: {ran}"
    assert answered.keys() <= ran.keys() <= called, (answered, ran, called)
    assert all(number == value for number, value in answered.items()), answered


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _send_again() -> None:
    take = ActorFuture.result

    def result(future: ActorFuture, timeout: float | None = None) -> Any:
        try:
            return take(future, timeout)
        except TimeoutError:
            raise
        except RuntimeError:
            request = requests[future]
            return take(ActorFuture(future._handle, future._method, *future._handle._call(request)), timeout)

    requests: dict[ActorFuture, bytes] = {}
    call = actor_handle.ActorMethod.remote

    def remote(method: actor_handle.ActorMethod, *args: Any, **kwargs: Any) -> ActorFuture:
        future = call(method, *args, **kwargs)
        requests[future] = actor_handle.pack_call(method._name, args, kwargs)
        return future

    setattr(actor_handle.ActorMethod, "remote", remote)  # noqa: B010
    setattr(ActorFuture, "result", result)  # noqa: B010


def _keep_serving() -> None:
    setattr(ActorServer, "stop", lambda server, grace_s=0.0: None)  # noqa: B010
