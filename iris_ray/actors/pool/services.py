"""A pool as services see it; see docs/design/services.md. `actors/calls/service_parts.py` runs the parts."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.service_parts import RunningPart, RunningParts, ServicePart
from iris_ray.actors.pool.attempt_place import AttemptContext
from iris_ray.actors.pool.notice_delivery import NoticeDelivery
from iris_ray.actors.protocol.answers import Unfit
from iris_ray.actors.protocol.messages import Progress, RunRequest
from iris_ray.actors.protocol.services import Service, installed_services
from iris_ray.errors import IrisError
from iris_ray.model.outcomes import TaskKey

logger = logging.getLogger(__name__)

PREPARE_S = 30.0
"""The time in which a service prepares an attempt of a job that uses it."""
UNFIT_S = 6.0
"""The time that services have to test suspected hosts, after the hosts are ready."""


# -- attempts ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class RunningAttempt:
    """An attempt whose tasks run, as services see it.

    Attributes:
        context: its hosts, its job, and how it is asked to end.
        notices: know the latest notice of the gang.
        most_pause_s: the longest pause between two looks at its tasks; a service may shorten it; seconds.
        stall_limit: what people are told about a limit for silent gangs; a service may set it.
        stragglers: tasks that are clearly slower than the others, in words, the slowest first; a service may set them.
    """

    context: AttemptContext
    notices: NoticeDelivery
    most_pause_s: float = float("inf")
    stall_limit: str | None = None
    stragglers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """The tasks of an attempt start."""

    attempt: RunningAttempt


@dataclass(frozen=True, slots=True)
class AttemptTold:
    """An attempt has got a notice: its tasks save their state."""

    attempt: RunningAttempt


@dataclass(frozen=True, slots=True)
class ProgressSeen:
    """The pool has looked at the tasks of an attempt.

    Attributes:
        running: the tasks that have not returned.
        progress: of the running tasks whose hosts answer.
    """

    attempt: RunningAttempt
    running: set[TaskKey]
    progress: Mapping[TaskKey, Progress]


@dataclass(frozen=True, slots=True)
class AttemptOver:
    """The tasks of an attempt have ended, or are being stopped."""

    attempt: RunningAttempt


@dataclass(frozen=True, slots=True)
class JobOver:
    """The pool runs a job no longer."""

    job_id: str


PoolEvent = AttemptBegan | AttemptTold | ProgressSeen | AttemptOver | JobOver


# -- parts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """A SlicePoolManager as each service sees it.

    Attributes:
        controller: asks the Controller and its services.
        only_request: returns the request of the only job of a pool without a caller; None for other pools.
        background: runs coroutines that may outlive a call.
    """

    controller: ControllerClient
    only_request: Callable[[], RunRequest | None] = lambda: None
    background: BackgroundTasks = field(default_factory=BackgroundTasks)


class PoolPart(ServicePart[PoolEvent]):
    """The base of a service's part in a pool.

    Args:
        pool: the pool.
        running: this part's supervision.
    """

    def __init__(self, pool: Pool, running: RunningPart[PoolEvent]) -> None:
        self.pool = pool
        self._running = running

    async def prepared(self, request: RunRequest) -> RunRequest:
        """Return a request with what one attempt needs of this service; raise an `IrisError` if it can't have that.

        It is called for jobs with a value in one of the fields that `Service.admits` names.
        """
        return request

    async def unfit(
        self, context: AttemptContext, suspected: Mapping[str, str], ready: asyncio.Event
    ) -> dict[str, Unfit]:
        """Test suspected hosts before an attempt starts there. Return the slices that it must not start on, by name.

        Args:
            context: the attempt, whose slices hold the hosts already.
            suspected: why hosts are suspected, by node id.
            ready: set when all hosts are ready to start a task. Then the answer is due within `UNFIT_S`.
        """
        return {}


class PoolParts(RunningParts[PoolEvent]):
    """The services' parts in a pool."""

    async def prepared(self, request: RunRequest) -> RunRequest:
        """Return a request with what one attempt needs of the services that its job uses.

        Raises:
            IrisError: one can't provide it; the message says why.
        """
        for running in self:
            if any(getattr(request.spec, name) for name in running.service.admits):
                request = await running.call(partial(_prepared, request), PREPARE_S)
        return request

    async def unfit(
        self, context: AttemptContext, suspected: Mapping[str, str], ready: asyncio.Event
    ) -> dict[str, Unfit]:
        """Return the slices that services have found unfit. A service that fails finds nothing."""
        found: dict[str, Unfit] = {}
        if not suspected.keys() & {host.node_id for hosts in context.place.order.slices for host in hosts}:
            return found
        for running in self:
            try:
                answer = await running.call(lambda part: part.unfit(context, suspected, ready), None)
                found |= {name: why for name, why in answer.items() if isinstance(why, Unfit)}
            except (IrisError, AttributeError) as error:
                logger.warning("suspected hosts were not tested: %s", error)
        return found


async def _prepared(request: RunRequest, part: PoolPart) -> RunRequest:
    prepared = await part.prepared(request)
    if not isinstance(prepared, RunRequest):
        raise TypeError(f"prepared returned {type(prepared).__name__}, not a RunRequest")
    return prepared


def pool_parts(pool: Pool, services: Iterable[Service] | None = None) -> PoolParts:
    """Return the services' parts in a pool."""
    chosen = installed_services() if services is None else services
    places = [(service, service.pool) for service in chosen if service.pool is not None]
    return PoolParts(places, lambda kind, running: kind(pool, running))
