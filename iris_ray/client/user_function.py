"""The user's function, checked and pickled, and the error that its caller sees."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayTaskError

from iris_ray.errors import InvalidFunctionError, IrisError, RemoteUserError


def name_of(function: Callable[..., Any]) -> str:
    """Return the function's own name; for a partial the name of its function, for an instance the name of its class."""
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__)


def require_no_arguments(function: Callable[..., Any], name: str) -> None:
    """Refuse a function that can't be called without arguments, or that would not run when called.

    Raises:
        InvalidFunctionError: the message says how to wrap the function.
    """
    inner = function.func if isinstance(function, functools.partial) else function
    routine = inspect.isroutine(inner)
    run: Any = inner if routine else type(inner).__call__
    what, call = (name, f"{name}()") if routine else (f"the __call__ of this {name}", "it()")
    if inspect.iscoroutinefunction(run) or inspect.isasyncgenfunction(run):
        raise InvalidFunctionError(f"{what} is an async function; give one that runs it: lambda: asyncio.run({call})")
    if inspect.isgeneratorfunction(run):
        raise InvalidFunctionError(f"{what} is a generator; give a function that returns: lambda: list({call})")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature; the call will tell
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidFunctionError(
            f"{name}{signature} can't be called without arguments ({error}); bind them first, for example with"
            f" functools.partial({name}, ...)"
        ) from None


def pickle_function(function: Callable[..., Any], name: str) -> bytes:
    """Return the pickled function. Objects that the hosts can't import travel by value.

    Raises:
        InvalidFunctionError: the function can't be pickled; the message has the cause.
    """
    try:
        pickled: bytes = cloudpickle.dumps(function)
        return pickled
    except Exception as error:
        raise InvalidFunctionError(
            f"{name} can't be pickled: {error}. It, or something that it refers to, does not travel between hosts"
            " (a lock, an open file, a connection, …); create such things inside the function"
        ) from error


def callers_error(error: BaseException) -> BaseException:
    """Return the `IrisError` that an error of Ray carries, whose message suffices; any other error unchanged."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, IrisError) and not isinstance(cause, RemoteUserError) else error
