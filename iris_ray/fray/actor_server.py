"""The actor's side of an actor: a server of one object's methods, in a task of a job or in this process."""

import contextvars
import functools
import hmac
import importlib
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import ray
from ray import cloudpickle

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.fray.actor_handle import (
    CALL,
    END,
    SERVICE,
    TOKEN,
    ActorAddress,
    ActorHandle,
    InProcess,
    InTaskOf,
    pack_error,
    pack_result,
    require_no_tls,
    server_options,
)
from iris_ray.fray.job_request import InTask, MakesClient, band_options, fray_placement, task_request
from iris_ray.model.checks import Whole, require
from iris_ray.model.options import default_of
from iris_ray.task.job_info import get_job_info

if TYPE_CHECKING:
    from fray.actor import ActorContext, HostedActor
    from fray.types import ActorConfig, EnvironmentConfig, ResourceConfig


GRACE_S = 10.0
"""How long running calls may take when an actor ends itself."""
LIMITS = [("grpc.server_handshake_timeout_ms", 10_000), ("grpc.max_concurrent_streams", 1000)]
"""The limits of a connection: the milliseconds until it speaks HTTP/2, and its calls at a time."""
MOST_CONNECTIONS = "grpc.max_allowed_incoming_connections"
"""The limit for connections, which is half of the descriptors that this process may have: the actor needs some, too."""
IDLE_MS = 120_000
"""How long a connection may have no call that runs, with a token or without. The next call opens another one."""


class ActorServer:
    """Takes calls of an object's methods, at the address by which other hosts of the cluster reach this host.

    Args:
        max_concurrency: the number of methods that may run at a time; further calls wait.

    Attributes:
        address: where it listens.
        end: set when the actor is to end, by the actor itself or by its group.

    Raises:
        RuntimeError: this process can't start all threads.
    """

    def __init__(self, max_concurrency: int) -> None:
        asks_token = TokenInterceptor(lambda told: hmac.compare_digest(told.encode(), self.address.token.encode()))
        options = [*server_options(), *LIMITS, ("grpc.max_connection_idle_ms", IDLE_MS)]
        options.append((MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._threads = started_threads(max(1, max_concurrency))
        self._server = grpc.server(self._threads, interceptors=[asks_token], options=options)
        self._has_begun = self._runs = False
        self.end = threading.Event()
        messages = {CALL: self._call, END: self._end}
        handlers = {name: grpc.unary_unary_rpc_method_handler(take) for name, take in messages.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        host = ray.util.get_node_ip_address()
        port = self._server.add_insecure_port(str(ActorAddress.of_port(host, 0).target))
        self.address = ActorAddress.of_port(host, port)

    def serve(self, instance: Any) -> None:
        """Begin to take calls of methods whose names do not begin with an underscore.

        They run in threads, in copies of the present context, so that Fray's current client is the same there.

        Raises:
            RuntimeError: this process can't start a thread. The port is closed.
        """
        self._instance = instance
        self._context = contextvars.copy_context()
        self._begin()

    def stop(self, grace_s: float = 0.0) -> None:
        """Take no more calls, wait at most ``grace_s`` for those that run, and close the port. May be repeated."""
        if not self._has_begun:  # gRPC closes no port of a server that has never started
            with suppress(RuntimeError):
                self._begin()
        self._close_port(grace_s)
        if self._runs:
            self._server.wait_for_termination(grace_s)
            self._server.stop(None)
        self._threads.shutdown(wait=False)

    def _begin(self) -> None:
        self._has_begun = True
        try:
            self._server.start()
            self._runs = True
        except RuntimeError:
            self._close_port(0.0)
            raise

    def _close_port(self, grace_s: float) -> None:
        """Take no more calls, and have a thread end those that run after ``grace_s``, if this process can start one."""
        with suppress(RuntimeError):
            self._server.stop(grace_s)

    def _call(self, request: bytes, about: grpc.ServicerContext) -> bytes:
        try:
            return self._context.copy().run(self._answer, request)
        except BaseException as error:  # the method may even raise SystemExit
            return pack_error(error)

    def _end(self, request: bytes, about: grpc.ServicerContext) -> bytes:
        self.end.set()
        return b""

    def _answer(self, request: bytes) -> bytes:
        method, args, kwargs = cloudpickle.loads(request)
        if method.startswith("_"):
            raise AttributeError(f"{method} is not served: it begins with an underscore")
        return pack_result(getattr(self._instance, method)(*args, **kwargs))


def started_threads(count: int) -> ThreadPoolExecutor:
    """Return an executor whose threads have all started.

    If gRPC's server had to start one for a call and could not, it would never answer a call again.

    Raises:
        RuntimeError: this process can't start so many.
    """
    threads = ThreadPoolExecutor(count, thread_name_prefix="actor")
    all_run = threading.Barrier(count)
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    return threads


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]  # gRPC has no types
    """Refuses calls without the token at once: before gRPC reads their arguments, and even if all threads are busy.

    To callers the service seems not to be there, which is the one such refusal that gRPC has.
    """

    def __init__(self, is_right: Callable[[str], bool]) -> None:
        self._is_right = is_right

    def intercept_service(self, continuation: Any, about: grpc.HandlerCallDetails) -> Any:
        told = dict(about.invocation_metadata).get(TOKEN, "")
        return continuation(about) if isinstance(told, str) and self._is_right(told) else None


def make_instance(context: "ActorContext", actor_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the object while Fray's ``current_actor()`` is set."""
    actor: Any = importlib.import_module("fray.actor")
    token = actor._set_current_actor(context)  # Fray has it for its backends
    try:
        return actor_class(*args, **kwargs)
    finally:
        actor._reset_current_actor(token)


def serve_actor(
    actor_class: type, args: tuple[Any, ...], kwargs: dict[str, Any], group: str, max_concurrency: int
) -> None:
    """Serve one actor of a group, in a task, until the actor ends itself or its group ends it.

    Raises:
        BaseException: the exception of the class's constructor, or the error with which the actor ended itself.
    """
    from fray.actor import ActorContext

    me = get_job_info()
    assert me is not None
    endpoint = f"{group}-{me.task_index}"
    server = ActorServer(max_concurrency)
    context = ActorContext(ActorHandle(InTaskOf(me.job_id, endpoint)), me.task_index, group, server.end)
    try:
        server.serve(make_instance(context, actor_class, args, kwargs))
        from iris_ray.endpoints.task import register_endpoint  # another service

        register_endpoint(endpoint, str(server.address))
        server.end.wait()
    except BaseException:
        server.stop()
        raise
    server.stop(GRACE_S)
    if context._errors:
        raise context._errors[0]


def actor_request(
    client: MakesClient,
    actor_class: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    count: int,
    resources: "ResourceConfig | None",
    actor_config: "ActorConfig | None",
    environment: "EnvironmentConfig | None",
    region: str | None = None,
    children: str | None = None,
) -> RunRequest:
    """Return the request of a job with an actor in each task; arguments as for `Client.create_actor_group`.

    Actors on slices of one VM are placed, lost and restarted one by one, on larger slices as one gang. Of the former,
    one that fails for good does not end the others.

    Args:
        region: the region of the host of the task that makes the actors.
        children: as for `iris_ray.fray.Client`.

    Raises:
        InvalidRequestError: an option can't work; nothing was acquired.
    """
    from fray.types import ActorConfig, ResourceConfig

    require_no_tls()
    require("count", count, Whole(1))
    resources = ResourceConfig() if resources is None else resources
    config = ActorConfig() if actor_config is None else actor_config
    serve = functools.partial(serve_actor, actor_class, args, kwargs, name, config.max_concurrency)
    placed = fray_placement(resources, count, gang=False, region=region)
    retries = _given(config.max_task_retries, "max_retries_failure")
    require("max_task_retries", retries, Whole())
    return task_request(
        InTask.of(serve, client),
        name,
        resources,
        placed,
        environment,
        **band_options(config.priority),
        max_retries_preemption=_given(config.max_restarts, "max_retries_preemption"),
        max_retries_failure=retries,
        max_task_failures=None if placed.coscheduling else count * (retries + 1),  # as many as there can be
        children=children,
    )


def _given(number: int | None, option: str) -> Any:
    return default_of(option, "an actor of Fray") if number is None else number


def host_here(
    actor_class: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    actor_config: "ActorConfig | None",
) -> "HostedActor":
    """Make an object in this process and serve its methods; arguments and errors as for `Client.host_actor`."""
    from fray.actor import ActorContext, HostedActor
    from fray.types import ActorConfig

    require_no_tls()
    config = ActorConfig() if actor_config is None else actor_config
    server = ActorServer(config.max_concurrency)
    handle = ActorHandle(InProcess(name, server.address))
    try:
        server.serve(make_instance(ActorContext(handle, 0, name), actor_class, args, kwargs))
    except BaseException:
        server.stop()
        raise
    return HostedActor(handle, stop=server.stop)
