"""The caller's side of an actor: Fray's handles, methods, futures and groups. Handles can be pickled."""

import atexit
import importlib
import os
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from ray import cloudpickle

from iris_ray.errors import (
    ActorUnavailableError,
    RemoteUserError,
    ResultNotPicklableError,
    UnknownNameError,
    UnsupportedOptionError,
)
from iris_ray.fray.job_handle import JobHandle
from iris_ray.model.lifecycle import ACTIVE, TaskState

if TYPE_CHECKING:
    from fray.actor import ActorHandle as FraysHandle

UNFINISHED = ACTIVE | {TaskState.PENDING}


# -- messages ----------------------------------------------------------------------------------------------------------
# A call of a method, and its result or error, travel as bytes over gRPC.

SERVICE, CALL, END = "iris_ray.fray.Actor", "Call", "End"
TOKEN = "iris-ray-token"
"""The key of the token in the call's metadata."""

KEEPALIVE_MS = 10_000
"""How often a caller pings the actor's process during a call, and how long the process may take to answer."""
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # hosts of a cluster reach each other
    ("grpc.so_reuseport", 0),
]


def caller_options() -> list[tuple[str, int]]:
    """Return the options by which a caller notices a lost host, or a process that stands still, during a call."""
    timeouts = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    # By default, gRPC sends the third ping of a call only after a minute. After a failed attempt to connect, it fails
    # the calls of all channels to that address for a second, unless each has connections of its own.
    others = [("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1)]
    return [*OPTIONS, *((name, KEEPALIVE_MS) for name in timeouts), *others]


def server_options() -> list[tuple[str, int]]:
    """Return the options of an actor's server: it takes the pings. By default it ends a call with the third one."""
    return [*OPTIONS, ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2)]


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """Where an actor listens, and the token without which it takes no call.

    Attributes:
        target: ``host:port``.
        token: random for each server, and as well protected as Ray's key-value store.
    """

    target: str
    token: str

    @classmethod
    def of_port(cls, host: str, port: int) -> "ActorAddress":
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secrets.token_hex(16))

    @classmethod
    def parse(cls, text: str) -> "ActorAddress":
        return cls(*text.split())

    def __str__(self) -> str:
        return f"{self.target} {self.token}"

    def __repr__(self) -> str:
        return f"ActorAddress({self.target})"


def require_no_tls(environ: Mapping[str, str] = os.environ) -> None:
    """Raise UnsupportedOptionError if Ray encrypts its messages: calls of actors would not be encrypted."""
    if environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        raise UnsupportedOptionError("RAY_USE_TLS is set, and calls of Fray's actors are not encrypted")


def pack_call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a call as bytes; raises TypeError or pickle.PicklingError if an argument can't be pickled."""
    packed: bytes = cloudpickle.dumps((method, args, kwargs))
    return packed


def pack_result(result: Any) -> bytes:
    """Return a method's result as bytes, or a ResultNotPicklableError."""
    try:
        return pickle.dumps((True, cloudpickle.dumps(result), ""))
    except Exception as error:
        return pack_error(ResultNotPicklableError(f"an actor's method returned what can't be pickled: {error}"))


def pack_error(error: BaseException) -> bytes:
    """Return a method's error as bytes, with its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps((False, cloudpickle.dumps(error), text))
    except Exception:
        return pickle.dumps((False, b"", text))


def unpack_answer(answer: bytes) -> Any:
    """Return a method's result, or raise its error with the actor's traceback in a note.

    Raises:
        RemoteUserError: the method raised an error that can't be unpickled here.
    """
    fine, payload, text = pickle.loads(answer)
    if fine:
        return cloudpickle.loads(payload)
    raise _rebuilt(payload, text)


def _rebuilt(payload: bytes, text: str) -> BaseException:
    try:
        error = cloudpickle.loads(payload)
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        return RemoteUserError(f"an actor's method raised what can't be rebuilt here:\n{text}")
    error.add_note(f"In the actor:\n{text}")
    return error


# -- actor handle ------------------------------------------------------------------------------------------------------


def unavailable(message: str) -> RuntimeError:
    """Return the error for an actor that does not answer: Fray's own class, in versions that have one."""
    theirs: Any = importlib.import_module("fray.actor")
    error: RuntimeError = getattr(theirs, "ActorUnavailableError", ActorUnavailableError)(message)
    return error


@dataclass(frozen=True, slots=True)
class InTaskOf:
    """An actor in a task of a job. Each attempt of the task has another address, registered under ``endpoint``."""

    job_id: str
    endpoint: str

    def find(self) -> ActorAddress:
        """Return its address now.

        Raises:
            fray.actor.ActorUnavailableError: the actor does not run now; a RuntimeError in all versions of Fray.
        """
        from iris_ray.endpoints import task  # another service

        try:
            address = task.endpoints_of(self.job_id, self.endpoint).get(self.endpoint)
        except UnknownNameError:  # the Controller keeps only the newest ended jobs
            address = None
        if address is None:
            raise unavailable(f"actor {self} does not run now; its job: iris-ray job status {self.job_id}")
        return ActorAddress.parse(address)

    def __str__(self) -> str:
        return f"{self.endpoint} of {self.job_id}"


@dataclass(frozen=True, slots=True)
class InProcess:
    """An actor in a process that lives as long as the actor."""

    name: str
    address: ActorAddress

    def find(self) -> ActorAddress:
        """Return its address."""
        return self.address

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True, eq=False)
class Connection:
    """A connection to an actor's address.

    Attributes:
        channel, address: the connection.
        lost: whether a call on it has failed; the next call needs another one.
    """

    channel: grpc.Channel
    address: ActorAddress
    lost: bool = False

    @classmethod
    def to(cls, address: ActorAddress) -> "Connection":
        return cls(grpc.insecure_channel(address.target, options=caller_options()), address)

    def send(self, method: str, request: bytes) -> grpc.Future:
        """Send a message; the call goes on although the caller drops the future.

        Raises:
            RuntimeError: this process can't start the thread that takes the answers. The call may run all the same.
        """
        send = self.channel.unary_unary(f"/{SERVICE}/{method}").future
        try:
            call = send(request, metadata=((TOKEN, self.address.token),))
        except RuntimeError:
            self.lost = True
            _end_without_thread(self.channel)
            raise
        _unanswered.add(call)
        call.add_done_callback(self._take)
        return call

    def _take(self, call: grpc.Future) -> None:
        _unanswered.discard(call)
        self.lost |= not call.cancelled() and call.exception() is not None


def _end_without_thread(channel: grpc.Channel) -> None:
    """Close a channel whose thread gRPC couldn't start. Its `close`, and its deletion, would wait for that thread."""
    channel._channel.close_on_fork(grpc.StatusCode.CANCELLED.value[0], "no thread")


_unanswered: set[grpc.Future] = set()
"""The calls without an answer. gRPC cancels a call when nothing refers to it any more."""

AT_EXIT_S = 2.0
"""How long a process that ends waits for its calls, so that those sent at last, such as a shutdown, arrive."""


@atexit.register
def _send_the_last_calls() -> None:
    deadline = time.monotonic() + AT_EXIT_S
    for call in tuple(_unanswered):
        with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError, grpc.RpcError):
            call.result(max(0.0, deadline - time.monotonic()))


class ActorHandle:
    """An actor: ``handle.method(...)`` waits for the result, ``handle.method.remote(...)`` returns a future."""

    def __init__(self, place: InTaskOf | InProcess) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self._place,)

    def __getattr__(self, method: str) -> "ActorMethod":
        if method.startswith("_"):
            raise AttributeError(method)
        return ActorMethod(self, method)

    def __repr__(self) -> str:
        return f"<ActorHandle {self._place}>"

    def _call(self, request: bytes) -> tuple[grpc.Future, Connection]:
        """Send a call; return it with its connection. Blocks to look up the actor, at first and after its loss."""
        with self._lock:
            if self._connection is not None and self._connection.lost:
                self._connection.channel.close()
                self._connection = None
            if self._connection is None:
                self._connection = Connection.to(self._place.find())
            try:
                return self._connection.send(CALL, request), self._connection
            except RuntimeError as error:
                raise unavailable(f"a call of {self!r}, which may run, has no answer: {error}") from error


class ActorMethod:
    """One method of an actor."""

    def __init__(self, handle: ActorHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and wait; returns and raises like `ActorFuture.result`."""
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> "ActorFuture":
        """Call the method, and return a future of its result at once."""
        request = pack_call(self._name, args, kwargs)
        try:
            return ActorFuture(self._handle, self._name, *self._handle._call(request))
        except RuntimeError as error:
            return ActorFuture(self._handle, self._name, error)

    def submit(self, *args: Any, **kwargs: Any) -> "ActorFuture":
        """Call the method like `remote`. A `result` that times out cancels the call."""
        future = self.remote(*args, **kwargs)
        future.ends_with_patience = True
        return future


class ActorFuture:
    """The result of a call that may still run, and goes on although the future is dropped.

    Attributes:
        ends_with_patience: whether a `result` that times out cancels the call: it does not run if it has not begun.
    """

    def __init__(
        self, handle: ActorHandle, method: str, call: grpc.Future | RuntimeError, connection: Connection | None = None
    ) -> None:
        self._handle, self._method, self._running, self._connection = handle, method, call, connection
        self.ends_with_patience = False

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's end, and return the method's result or raise its error.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: the call still runs, and goes on; if `submit` returned this future, the call is cancelled.
            fray.actor.ActorUnavailableError: the actor is lost or not there. It may have run the call. The next call
                goes to the actor's next attempt.
        """
        if isinstance(self._running, RuntimeError):
            raise self._running
        try:
            answer = self._running.result(timeout)
        except grpc.FutureTimeoutError:
            late = f"{self._method} of {self._handle!r} still runs after {timeout:g} s"
            if self.ends_with_patience:
                self._running.cancel()
                late += ", and is cancelled"
                self._running = RuntimeError(late)
            raise TimeoutError(late) from None
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if self._connection is not None:
                self._connection.lost = True
            why = error.details() if isinstance(error, grpc.Call) else "the connection was closed"
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                why = "another actor listens there now, or the token is wrong"
            raise unavailable(f"{self._method} of {self._handle!r} has no answer: {why}") from None
        return unpack_answer(answer)


# -- actor group -------------------------------------------------------------------------------------------------------

FIRST_POLL_S, LAST_POLL_S = 0.1, 1.0
READY_S = 900.0
"""Seconds that `ActorGroup.wait_ready` waits unless it is told otherwise, as long as Fray's client for Iris waits."""
CLEAN_END_S = 3.0
"""Seconds that actors have to end by themselves before `ActorGroup.shutdown` ends them."""


class ActorGroup:
    """The actors of one job, numbered, one in each of ``count`` tasks. It can be pickled.

    An actor that is preempted or fails comes back while it has retries: a new object with the old handle. The others go
    on when it has none left, unless they are a gang on slices of several VMs.
    """

    def __init__(self, job_id: str, name: str, count: int) -> None:
        self._job, self._name, self._count = JobHandle(job_id), name, count
        self._handed_out: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorGroup, (self.job_id, self._name, self._count)  # the copy has handed out no handles

    @property
    def job_id(self) -> str:
        """The job's id, for `iris-ray` and `IrisClient`."""
        return self._job.job_id

    @property
    def ready_count(self) -> int:
        """The number of actors that take calls now."""
        return len(self._addresses())

    def wait_ready(self, count: int | None = None, timeout: float = READY_S) -> "list[FraysHandle]":
        """Wait until actors take calls, and return their handles by number.

        Args:
            count: the number of actors; None: all.
            timeout: seconds.

        Raises:
            TimeoutError: some actors are not ready in time; the message says what their job waits for. They go on.
            fray.actor.ActorUnavailableError: fewer than ``count`` actors are left, because the others have ended; a
                RuntimeError in all versions of Fray.
        """
        wanted = self._count if count is None else min(count, self._count)
        deadline, pause = time.monotonic() + timeout, FIRST_POLL_S
        while len(ready := sorted(self._addresses())) < wanted:
            status = self._job.look()
            if status.state.finished:
                raise unavailable(f"the actors of {self.job_id} have ended: {status.state.value}: {status.error}")
            ended = [task for task in self._job.tasks() if task.state not in UNFINISHED]
            if self._count - len(ended) < wanted:
                raise unavailable(
                    f"{len(ended)} of {self._count} actors of {self.job_id} have ended, so {wanted} can't be ready;"
                    f" {ended[0].task_id}: {ended[0].state.value}: {ended[0].error}"
                )
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{len(ready)} of {wanted} actors of {self.job_id} are ready after {timeout:g} s:"
                    f" {status.explanation}"
                )
            time.sleep(pause)
            pause = min(pause * 1.2, LAST_POLL_S)
        return self._hand_out(ready[:wanted])

    def discover_new(self) -> "list[FraysHandle]":
        """Return the handles of actors that take calls now, except those that this object has returned before."""
        return self._hand_out([index for index in sorted(self._addresses()) if index not in self._handed_out])

    def is_done(self) -> bool:
        """Return whether the job has ended: no actor of it comes back."""
        return self._job.look().state.finished

    def shutdown(self) -> None:
        """End all actors. If they end by themselves within 3 s, their job has succeeded; if not, it is stopped.

        It is stopped at once if an actor does not take calls yet. An actor that runs as many methods as it may at a
        time does not hear of the end, and is stopped.
        """
        if not self._ends_cleanly():
            self._job.terminate()

    def _ends_cleanly(self) -> bool:
        addresses = self._addresses()
        ended = sum(task.state not in UNFINISHED for task in self._job.tasks())
        if len(addresses) + ended < self._count:
            return False  # one that does not take calls yet has to be stopped
        connections = [Connection.to(ActorAddress.parse(address)) for address in addresses.values()]
        for connection in connections:
            with suppress(RuntimeError):  # without a thread for the answer: the job is stopped if the actor goes on
                connection.send(END, b"")
        self._job.wait(CLEAN_END_S, raise_on_failure=False)
        for connection in connections:
            connection.channel.close()
        return self._job.look().state.finished

    def _addresses(self) -> dict[int, str]:
        """Return the addresses of the actors that take calls, by number."""
        from iris_ray.endpoints import task

        prefix = f"{self._name}-"
        found = {name.removeprefix(prefix): at for name, at in task.endpoints_of(self.job_id, prefix).items()}
        return {int(number): at for number, at in found.items() if number.isdecimal()}  # others are the user's own

    def _hand_out(self, indexes: list[int]) -> "list[FraysHandle]":
        self._handed_out.update(indexes)
        return [ActorHandle(InTaskOf(self.job_id, f"{self._name}-{index}")) for index in indexes]
