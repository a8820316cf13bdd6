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


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A connection to an actor's address."""

    channel: grpc.Channel
    address: ActorAddress


class ActorHandle:
    """An actor: ``handle.method(...)`` waits for the result, ``handle.method.remote(...)`` returns a future."""

    def __init__(self, place: InTaskOf | InProcess) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._way: Way | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (self._place,)

    def __getattr__(self, method: str) -> "ActorMethod":
        if method.startswith("_"):
            raise AttributeError(method)
        return ActorMethod(self, method)

    def __repr__(self) -> str:
        return f"<ActorHandle {self._place}>"

    def _call(self, request: bytes) -> tuple[grpc.Future, Way]:
        """Send a call, and return by which way. Blocks while the actor is looked up: at first, and after its loss."""
        with self._lock:
            if self._way is None:
                address = self._place.find()
                self._way = Way(grpc.insecure_channel(address.target, options=OPTIONS), address)
            way = self._way  # nobody closes it before the call is on its way
            return way.channel.unary_unary(PATH).future(request, metadata=((TOKEN, way.address.token),)), way

    def _forget(self, way: Way) -> None:
        """Look for the actor again at the next call, unless that has been done since a call went this way."""
        with self._lock:
            if self._way is not way:
                return  # calls of the actor's next attempt may run on the new one
            self._way = None
        way.channel.close()


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
            return ActorFuture(self._handle, self._name, *self._handle._call(request))
        except RuntimeError as error:
            return ActorFuture(self._handle, self._name, error)

    def submit(self, *args: Any, **kwargs: Any) -> "ActorFuture":
        """The same as `remote`: a call may take as long as it takes."""
        return self.remote(*args, **kwargs)


class ActorFuture:
    """The result of a call that may still run."""

    def __init__(
        self, handle: ActorHandle, method: str, call: grpc.Future | RuntimeError, way: Way | None = None
    ) -> None:
        self._handle, self._method, self._running, self._way = handle, method, call, way

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
            if self._way is not None:
                self._handle._forget(self._way)
            why = error.details() if isinstance(error, grpc.Call) else "the connection was closed"
            raise unavailable(f"{self._method} of {self._handle!r} has no answer: {why}") from None
        return unpack_answer(answer)
