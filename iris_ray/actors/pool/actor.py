"""The SlicePoolManager as a class for Ray. Processes that only have a handle of it do not import the pool.

Ray loads the class of an actor in each process that gets a handle of it, to know its methods. Otherwise every host
would import the whole pool before it starts its first task.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from iris_ray.actors.protocol.pool_interface import PoolInterface


def _begin(self: Any, *args: Any, **kwargs: Any) -> None:
    from iris_ray.actors.pool import slice_pool_manager  # in the actor's own process

    self._own = slice_pool_manager.SlicePoolManager(*args, **kwargs)


def _passed_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def passed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._own, name)(*args, **kwargs)

    return passed_on


_METHODS = inspect.getmembers(PoolInterface, inspect.iscoroutinefunction)
SlicePoolManager = type(
    "SlicePoolManager",
    (),
    {
        "__module__": __name__,
        "__init__": _begin,
        "__repr__": lambda self: repr(self._own),
        **{name: _passed_on(name, method) for name, method in _METHODS},
    },
)
