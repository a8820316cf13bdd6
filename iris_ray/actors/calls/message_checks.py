"""Checks messages to the Controller: each argument is rebuilt from plain values before it is used, or refused.

A message is unpickled in the Controller's process, with any class that its sender has put into it. An argument that
does not fit the method's annotation is refused, and only its sender sees the error.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from iris_ray.model.plain_values import plain

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Owner, Arguments], Coroutine[Any, Any, Answer]]


def checked(method: Method[Owner, Arguments, Answer]) -> Method[Owner, Arguments, Answer]:
    """Return the method with its arguments rebuilt by `plain`, as annotated. It raises the errors of `plain`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def check_first(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        given = signature.bind(self, *args, **kwargs)
        kinds = _kinds(method)
        for name, value in given.arguments.items():
            if name in kinds:
                given.arguments[name] = plain(kinds[name], value, name)
        return await method(*given.args, **given.kwargs)

    return check_first


@functools.cache
def _kinds(method: Callable[..., Any]) -> dict[str, Any]:
    kinds = get_type_hints(method, include_extras=True)
    kinds.pop("return", None)
    return kinds
