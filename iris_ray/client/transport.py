"""How an `IrisClient` reaches its cluster: this process is connected to Ray, or a service passes requests on."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import RayTaskError

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import Question
from iris_ray.actors.protocol.marks import PAGES
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.actors.protocol.services import module_of
from iris_ray.client.caller_pool import REPEATED
from iris_ray.client.children import begin
from iris_ray.client.user_function import callers_error
from iris_ray.errors import ServiceUnavailableError

REMOTE: Final = "remote"
"""The service that reaches a cluster through its dashboard. Nothing else in the kernel refers to it."""

P = ParamSpec("P")
T = TypeVar("T")


class Submitted(NamedTuple):
    """A job that the Controller has accepted.

    Attributes:
        job_id: its id: that of the request, unless the task has adopted an earlier job.
        results: the future of its results.
    """

    job_id: str
    results: "Future[list[Any]]"


class Transport(Protocol):
    """A connection to a cluster."""

    @property
    def is_direct(self) -> bool:
        """Whether this process itself is connected to Ray."""

    def ask(self, patience_s: float, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask the Controller, and return its answer: of a list, all pages. Raises like `ControllerConnection.ask`.

        Args:
            patience_s: how long to wait for a Controller if none runs; seconds.
            question: a method of its interface.
        """

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of iris_ray in a process that is connected to Ray; return its result, or raise its error."""

    def show(self, function: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a function like `call`, and print in this process what the function prints."""

    def submit(self, request: RunRequest, detached: bool) -> Submitted:
        """Submit a job; return when the Controller has accepted the job.

        An interruption ends the job, as the caller has no handle.

        Raises:
            IrisError: the job does not reach the Controller, or is refused.
        """

    def close(self) -> None:
        """Leave the cluster. Jobs that are not detached then end."""


class DirectTransport:
    """The transport of a process that is connected to Ray."""

    is_direct = True

    def ask(self, patience_s: float, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        controller = ControllerConnection(patience_s=patience_s)
        ask: Any = controller.ask_all if hasattr(question, PAGES) else controller.ask
        answer: T = ask(question, *args, **kwargs)
        return answer

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    def show(self, function: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        function(*args, **kwargs)

    def submit(self, request: RunRequest, detached: bool) -> Submitted:
        job_id, results, pool, is_new = begin(request, detached)
        submitted = Submitted(job_id, results.future())
        if not is_new:
            return submitted
        try:
            accepted = ray.get(pool.with_options(**REPEATED).call(PoolInterface.accepted, job_id))
        except BaseException:  # Ctrl-C above all
            if detached or request.child_of is not None:
                ray.kill(pool.handle)
            else:
                ray.cancel(results)
            raise
        if not accepted:
            try:
                ray.get(results)  # raises the reason
            except RayTaskError as error:
                raise callers_error(error) from None
        return submitted

    def close(self) -> None: ...


def remote_transport(address: str, workspace: Path | str | None) -> Transport:
    """Connect to the cluster whose dashboard has this URL. Arguments and errors are those of `IrisClient.remote`.

    Raises:
        ServiceUnavailableError: the service for that is not installed.
    """
    transport: Transport = module_of_remote("transport").RemoteTransport(address, workspace)
    return transport


def module_of_remote(module: str) -> Any:
    """Return a module of the service that reaches a cluster through its dashboard.

    Raises:
        ServiceUnavailableError: that service is not installed.
    """
    try:
        return module_of(REMOTE, module)
    except ServiceUnavailableError as error:
        raise ServiceUnavailableError(
            f"{error}. The URL of a dashboard needs it; run this on a node of the cluster"
        ) from None
