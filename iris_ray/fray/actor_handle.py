"""The caller's side of an actor: handles, methods and futures, as Fray has them. Handles can be sent to anybody."""

import importlib
import threading
from dataclasses import dataclass
from typing import Any

import grpc

from iris_ray.errors import ActorUnavailableError
from iris_ray.fray.actor_call import OPTIONS, PATH, TOKEN, ActorAddress, pack_call, unpack_answer
from iris_ray.task.endpoints import endpoints_of


def unavailable(message: str) -> RuntimeError:
    """Return the error that an actor does not answer: Fray's own if it has one, as newer versions do."""
    theirs: Any = importlib.import_module("fray.actor")
    error: RuntimeError = getattr(theirs, "ActorUnavailableError", ActorUnavailableError)(message)
    return error


@dataclass(frozen=True, slots=True)
class InTaskOf:
    """An actor that a task of a job is. Its attempts have different addresses.

    Attributes:
        job_id: the job.
        endpoint: what the task registers its address as.
    """

    job_id: str
    endpoint: str

    def find(self) -> ActorAddress:
        """Return its address now.

        Raises:
            fray.actor.ActorUnavailableError: it does not run now, or not yet. A RuntimeError, also where Fray has none.
        """
        if (address := endpoints_of(self.job_id, self.endpoint).get(self.endpoint)) is None:
            raise unavailable(f"actor {self} does not run now; its job: iris-ray status {self.job_id}")
        return ActorAddress.parse(address)

    def __str__(self) -> str:
        return f"{self.endpoint} of {self.job_id}"


@dataclass(frozen=True, slots=True)
class InProcess:
    """An actor that a process hosts for as long as it lives."""

    name: str
    address: ActorAddress

    def find(self) -> ActorAddress:
        """Return its address."""
        return self.address

    def __str__(self) -> str:
        return self.name


class ActorHandle:
    """An actor: ``handle.method(...)`` waits for the result, ``handle.method.remote(...)`` returns a future."""

    def __init__(self, place: InTaskOf | InProcess) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._way: tuple[grpc.Channel, ActorAddress] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self._place,)

    def __getattr__(self, method: str) -> "ActorMethod":
        if method.startswith("_"):
            raise AttributeError(method)
        return ActorMethod(self, method)

    def __repr__(self) -> str:
        return f"<ActorHandle {self._place}>"

    def _call(self, request: bytes) -> grpc.Future:
        """Send a call. Blocks while the actor is looked up, that is at first and after its loss."""
        with self._lock:
            if self._way is None:
                address = self._place.find()
                self._way = grpc.insecure_channel(address.target, options=OPTIONS), address
            channel, address = self._way
        return channel.unary_unary(PATH).future(request, metadata=((TOKEN, address.token),))

    def _forget(self) -> None:
        with self._lock:
            way, self._way = self._way, None
        if way is not None:
            way[0].close()


class ActorMethod:
    """One method of an actor."""

    def __init__(self, handle: ActorHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, wait, and return its result or raise its error; raises like `ActorFuture.result`."""
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> "ActorFuture":
        """Call it, and return a future of its result at once."""
        request = pack_call(self._name, args, kwargs)
        try:
            return ActorFuture(self._handle, self._name, self._handle._call(request))
        except RuntimeError as error:
            return ActorFuture(self._handle, self._name, error)

    def submit(self, *args: Any, **kwargs: Any) -> "ActorFuture":
        """The same as `remote`: a call may take as long as it takes."""
        return self.remote(*args, **kwargs)


class ActorFuture:
    """The result of a call that may still run."""

    def __init__(self, handle: ActorHandle, method: str, call: grpc.Future | RuntimeError) -> None:
        self._handle, self._method, self._running = handle, method, call

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's end, and return the method's result or raise its error.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: it still runs, and goes on.
            fray.actor.ActorUnavailableError: the actor is lost or not there. It may have run the call. The next call
                looks for the actor's next attempt.
        """
        if isinstance(self._running, RuntimeError):
            raise self._running
        try:
            answer = self._running.result(timeout)
        except grpc.FutureTimeoutError:
            raise TimeoutError(f"{self._method} of {self._handle!r} still runs after {timeout:g} s") from None
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            self._handle._forget()
            why = error.details() if isinstance(error, grpc.Call) else "the connection was closed"
            raise unavailable(f"{self._method} of {self._handle!r} has no answer: {why}") from None
        return unpack_answer(answer)
