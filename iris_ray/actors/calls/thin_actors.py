"""Classes for Ray actors that import what they run only in the actor's own process.

Ray loads the class of an actor in each process that gets a handle of it, to know its methods. So every host would
import the whole SlicePoolManager before it starts its first task.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from iris_ray.actors.protocol.services import imported


def actor_class(place: str, interface: type, module: str) -> type:
    """Return a class for Ray with the methods of an interface; assign it to its name in its module.

    Args:
        place: the class that runs in the actor's process, such as ``iris_ray.actors.pool.slice_pool_manager:Manager``.
        interface: what it implements, by coroutine functions.
        module: in which the class is found.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._own = imported(place)(*args, **kwargs)

    def __repr__(self: Any) -> str:
        return repr(self._own)

    name = place.partition(":")[2]
    methods = {
        name: _passed_on(name, method) for name, method in inspect.getmembers(interface, inspect.iscoroutinefunction)
    }
    own = {"__module__": module, "__qualname__": name, "__init__": __init__, "__repr__": __repr__}
    return type(name, (), methods | own)


def _passed_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def passed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._own, name)(*args, **kwargs)

    return passed_on
