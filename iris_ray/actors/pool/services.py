"""What services get in a pool; see docs/design/services.md. `actors/calls/service_parts.py` runs the parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.service_parts import RunningPart, RunningParts, ServicePart
from iris_ray.actors.protocol.services import Service


@dataclass(frozen=True, slots=True)
class Pool:
    """A SlicePoolManager as services see it, all of them alike.

    Attributes:
        controller: asks the Controller, its services too.
        background: runs coroutines that may outlive a call.
    """

    controller: ControllerClient
    background: BackgroundTasks


class PoolPart(ServicePart[Any]):
    """The base of a service's part in a pool.

    Args:
        pool: the pool.
        running: this part's supervision.
    """

    def __init__(self, pool: Pool, running: RunningPart[Any]) -> None:
        self.pool = pool
        self._running = running


class PoolParts(RunningParts[Any]):
    """The services' parts in a pool."""


def pool_parts(services: Iterable[Service], pool: Pool) -> PoolParts:
    """Return the services' parts in a pool."""
    places = [(service, service.pool) for service in services if service.pool is not None]
    return PoolParts(places, lambda kind, running: kind(pool, running))
