"""From a class to the request of a job whose tasks are actors, or to an actor of this process."""

import functools
from typing import TYPE_CHECKING, Any

from iris_ray.actors.wire.messages import RunRequest
from iris_ray.fray.actor_call import require_no_tls
from iris_ray.fray.actor_handle import ActorHandle, InProcess
from iris_ray.fray.actor_server import ActorServer, make_instance, serve_actor
from iris_ray.fray.entrypoint import function_in_task
from iris_ray.fray.job_request import band_of, task_request
from iris_ray.fray.placement import fray_placement
from iris_ray.model.checks import require_int

if TYPE_CHECKING:
    from fray.actor import HostedActor
    from fray.types import ActorConfig, EnvironmentConfig, ResourceConfig

MAX_RESTARTS = 100
"""After preemptions, if an `ActorConfig` does not say."""


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
    require_int("count", count, 1)
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
        max_retries_preemption=MAX_RESTARTS if config.max_restarts is None else config.max_restarts,
        max_retries_failure=config.max_task_retries or 0,
    )


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
