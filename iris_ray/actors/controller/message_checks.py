"""The door of the Controller: every message from outside is rebuilt of plain values before anything is done with it.

A message is unpickled in the Controller's process, with whatever classes its sender has put into it. What does not have
the type that the method says is refused, and only its sender gets to know.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from iris_ray.model.plain import plain
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    AttemptMarkedEvent,
    GangMovedEvent,
    GangReturnedEvent,
    JobCancelledEvent,
    MaintenanceCalledOffEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)

ReportedEvent = (
    TaskStateChangedEvent
    | AttemptEndConfirmedEvent
    | AttemptMarkedEvent
    | TaskDispatchFailedEvent
    | SliceReleasedEvent
    | WorkerSuspectedEvent
    | WorkerBlamedEvent
    | WorkerDrainedEvent
    | MaintenanceCalledOffEvent
    | GangMovedEvent
    | GangReturnedEvent
    | JobCancelledEvent
)
"""What pools report. Everything else that happens, the Controller sees or decides itself."""

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Answer]]


def checked(method: Method[Owner, Arguments, Answer]) -> Method[Owner, Arguments, Answer]:
    """Return the method with its arguments made plain, as their annotations say; raises what `plain` raises."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def through_the_door(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        given = signature.bind(self, *args, **kwargs)
        kinds = _kinds(method)
        for name, value in given.arguments.items():
            if name in kinds:
                given.arguments[name] = plain(kinds[name], value, name)
        return await method(*given.args, **given.kwargs)

    return through_the_door


@functools.cache
def _kinds(method: Callable[..., Any]) -> dict[str, Any]:
    kinds = get_type_hints(method, include_extras=True)
    kinds.pop("return", None)
    return kinds
