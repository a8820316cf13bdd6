"""Which functions a job can run, what they are called, and how others are refused."""

import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle

from iris_ray.errors import InvalidFunctionError
from tests.support.requests import hello, pod_request


def needs_one(x: int) -> int:
    return x


def with_defaults(x: int = 1, *args: int, y: int = 2, **kwargs: int) -> int:
    return x + y


class Greeter:
    def __call__(self) -> str:
        return "hello"

    def method(self) -> str:
        return "method"

    def needs_one(self, x: int) -> int:
        return x


class NeedsOne:
    def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("function", "name", "result"),
    [
        (hello, "hello", "hello"),
        (lambda: 3, "lambda", 3),
        (with_defaults, "with_defaults", 3),
        (functools.partial(needs_one, 4), "needs_one", 4),
        (functools.partial(with_defaults, 1, z=2), "with_defaults", 3),
        (functools.partial(functools.partial(needs_one), x=5), "needs_one", 5),
        (Greeter(), "Greeter", "hello"),
        (Greeter().method, "method", "method"),
    ],
    ids=[
        "function",
        "lambda",
        "defaults",
        "partial",
        "partial of a function with defaults",
        "partial of partial",
        "instance",
        "method",
    ],
)
def test_any_kind_of_callable_is_named_and_accepted(function: Any, name: str, result: Any) -> None:
    made = pod_request(function)
    assert made.spec.name == name
    assert cloudpickle.loads(made.pickled_function)() == result


@pytest.mark.parametrize(
    "function",
    [needs_one, Greeter().needs_one, NeedsOne(), lambda x: x, ray.remote(needs_one)],
    ids=["function", "method", "instance", "lambda", "remote function"],
)
def test_function_requiring_arguments_is_refused_with_advice(function: Any) -> None:
    with pytest.raises(InvalidFunctionError, match=r"functools\.partial"):
        pod_request(function)


class AsyncGreeter:
    async def __call__(self) -> str:
        return "hello"

    async def method(self) -> str:
        return "method"


class Pieces:
    def __call__(self) -> Iterator[int]:
        yield 1


class AsyncPieces:
    async def __call__(self) -> AsyncIterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (AsyncGreeter().method, r"^method is an async function.*lambda: asyncio\.run\(method\(\)\)"),
        (AsyncGreeter(), r"__call__ of this AsyncGreeter is an async function.*lambda: asyncio\.run\(it\(\)\)"),
        (functools.partial(AsyncGreeter()), "__call__ of this AsyncGreeter is an async function"),
        (AsyncPieces(), "__call__ of this AsyncPieces is an async function"),
        (Pieces(), r"__call__ of this Pieces is a generator.*lambda: list\(it\(\)\)"),
    ],
    ids=["method", "instance", "partial of an instance", "instance with an async generator", "with a generator"],
)
def test_callable_that_would_not_run_is_refused(function: Any, advice: str) -> None:
    with pytest.raises(InvalidFunctionError, match=advice):
        pod_request(function)


def test_bound_dag_node_is_refused_by_name() -> None:
    with pytest.raises(InvalidFunctionError, match="bound DAG node"):
        pod_request(ray.remote(hello).bind())


@pytest.mark.parametrize("function", [None, 3, "hello", [hello], object()], ids=lambda it: type(it).__name__)
def test_value_that_is_no_function_is_refused_by_type(function: Any) -> None:
    with pytest.raises(InvalidFunctionError, match=f" {type(function).__name__}[; ]"):
        pod_request(function)


@pytest.mark.parametrize(
    "function", [Greeter, dict, ray.remote(Greeter)], ids=["class", "builtin class", "actor class"]
)
def test_class_is_refused(function: Any) -> None:
    with pytest.raises(InvalidFunctionError, match="class"):
        pod_request(function)


def test_remote_function_with_call_options_is_refused_with_advice() -> None:
    """``function.options(...)`` is neither a function nor a remote function."""
    with pytest.raises(InvalidFunctionError, match="options"):
        pod_request(ray.remote(hello).options(num_cpus=2))


def test_unpicklable_function_is_refused_with_cause() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidFunctionError, match="can't be pickled") as refused:
        pod_request(lambda: lock)
    assert isinstance(refused.value.__cause__, TypeError)
