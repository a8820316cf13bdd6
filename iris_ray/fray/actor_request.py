"""From a class to the request of a job whose tasks are actors, or to an actor of this process."""

import functools
from typing import TYPE_CHECKING, Any

from iris_ray.actors.wire.messages import RunRequest
from iris_ray.errors import InvalidRequestError
from iris_ray.fray.actor_call import require_no_tls
from iris_ray.fray.actor_handle import ActorHandle, InProcess
from iris_ray.fray.actor_server import ActorServer, make_instance, serve_actor
from iris_ray.fray.entrypoint import function_in_task
from iris_ray.fray.job_request import band_of, task_request
from iris_ray.fray.placement import fray_placement
from iris_ray.model.options import default_of

if TYPE_CHECKING:
    from fray.actor import HostedActor
    from fray.types import ActorConfig, EnvironmentConfig, ResourceConfig


def actor_request(
    actor_class: type,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    count: int,
    resources: "ResourceConfig | None",
    actor_config: "ActorConfig | None",
    environment: "EnvironmentConfig | None",
) -> RunRequest:
    """Return the request of a job with an actor in each task; arguments as for `Client.create_actor_group`.

    Actors on slices of one VM are placed, lost and restarted one by one, on larger slices as one gang.

    Raises:
        InvalidRequestError: something can't work as written; nothing was acquired.
    """
    from fray.types import ActorConfig, ResourceConfig

    require_no_tls()
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidRequestError(f"count is {count!r}; give an int of 1 or more")
    resources = ResourceConfig() if resources is None else resources
    config = ActorConfig() if actor_config is None else actor_config
    serve = functools.partial(serve_actor, actor_class, args, kwargs, name, config.max_concurrency)
    return task_request(
        function_in_task(serve),
        name,
        resources,
        fray_placement(resources, count, tpu_gang=False),
        environment,
        priority=band_of(config.priority),
        max_retries_preemption=_given(config.max_restarts, "max_retries_preemption"),
        max_retries_failure=_given(config.max_task_retries, "max_retries_failure"),
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
