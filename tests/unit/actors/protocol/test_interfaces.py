"""Each actor has the methods of its interface, with the same parameters, defaults and results."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest

from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.pool import actor as pool_actor
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.controller_interface import ControllerInterface, ForPeople
from iris_ray.actors.protocol.host_interface import HostInterface, TaskInterface
from iris_ray.actors.protocol.marks import PAGES
from iris_ray.actors.protocol.pool_interface import PoolInterface


@pytest.mark.parametrize(
    ("interface", "actor"),
    [
        (ControllerInterface, Controller),
        (PoolInterface, SlicePoolManager),
        (PoolInterface, pool_actor.SlicePoolManager),
        (HostInterface, TPUHostActor),
        (TaskInterface, TaskProcess),
    ],
)
def test_actor_has_the_methods_of_its_interface_and_no_others(interface: type, actor: type) -> None:
    assert dict(signatures(actor)) == dict(signatures(interface))


def types(controller: Controller, pool: SlicePoolManager, host: TPUHostActor, task: TaskProcess) -> tuple[object, ...]:
    """The types of arguments and results. This is never called: mypy checks it."""
    asked: ControllerInterface = controller
    runs: PoolInterface = pool
    watches: HostInterface = host
    works: TaskInterface = task
    return asked, runs, watches, works


@pytest.mark.parametrize("name", ["list_jobs", "list_tasks", "list_workers"])
def test_page_of_list_begins_after_attribute_of_items(name: str) -> None:
    method = getattr(ForPeople, name)
    (item,) = get_args(get_type_hints(method)["return"])
    assert hasattr(item, getattr(method, PAGES))
    assert list(inspect.signature(method).parameters)[-1] == "after"


def test_every_list_that_has_pages_says_by_what() -> None:
    paged = {name for name, parameters in signatures(ForPeople) if "after" in dict(parameters)}
    assert paged == {name for name, _ in signatures(ForPeople) if hasattr(getattr(ForPeople, name), PAGES)}


def signatures(of: type) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the public methods, each with its parameters and their defaults."""
    for name, method in inspect.getmembers(of, inspect.isfunction):
        if not name.startswith("_"):
            yield name, list(parameters(method))


def parameters(method: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and defaults, without those that Ray adds to a class that it makes actors of."""
    for each in inspect.signature(method).parameters.values():
        if each.name not in ("self", "_ray_trace_ctx"):
            yield each.name, each.default
