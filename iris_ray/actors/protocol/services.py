"""The description of a service for the kernel, and the addresses of its calls. docs/design/services.md is the guide.

A service is a capability that the kernel does not need: one folder of ``iris_ray``, whose module ``service`` holds its
`SERVICE`. The kernel finds it by the list in `iris_ray.services` and imports its parts when they are needed.
"""

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from iris_ray.errors import ServiceUnavailableError
from iris_ray.services import SERVICES

if TYPE_CHECKING:
    from iris_ray.model.cluster_settings import ClusterSetting

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=type)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line. Its module is imported when it is called.

    Attributes:
        place: ``module:function``; the function is a click command.
        does: a line for the list of commands.
        section: the section of ``iris-ray --help`` that lists it as well; None: only its group lists it.
    """

    place: str
    does: str
    section: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """An answer of the dashboard's server, as JSON.

    Attributes:
        path: a route of aiohttp, such as ``/api/history/jobs/{job}``.
        place: ``module:function``; the function gets a `ControllerConnection`, the route's names and the query, and
            blocks.
        shared_s: how long the server reuses an answer; seconds.
    """

    path: str
    place: str
    shared_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Service:
    """A service as the kernel knows it. Places have the form ``module:name``, and are imported when needed.

    Attributes:
        name: the name in messages and calls, such as ``history``.
        controller, pool, host: the class of its part in the Controller, in a SlicePoolManager and in a TPUHostActor.
        output: a class that keeps the output of a task on its host, an `OutputSink` of `actors/host/output.py`.
        variables: a function that returns environment variables of a task. It gets its `TaskFiles` and `JobInfo`, just
            before user code, which waits for it however long it takes.
        in_process: a function that is called with its `TaskFiles` in each process that iris_ray starts for a task.
        in_task: a function that is called with its `TaskFiles` in each task process, just before user code.
        in_jax: a function that ``iris_ray.jax.initialize`` calls with the task's `JobInfo`, before JAX joins its peers.
        ends_owned: a function that ends what a task has started outside its process tree, such as a container, and
            returns the names of what can't be ended. It takes the task's `TaskFiles`, and is called if the task has
            left a file `TaskFiles.owned` of the service's name. It imports no Ray.
        admits: fields of `JobSpec`. If one is set, its part in the Controller may refuse the job.
        commands: by their words, such as ``job logs`` or ``history``.
        pages: what it answers to the dashboard's pages.
        settings: a tuple of the cluster settings that only this service reads.
    """

    name: str
    controller: str | None = None
    pool: str | None = None
    host: str | None = None
    output: str | None = None
    variables: str | None = None
    in_process: str | None = None
    in_task: str | None = None
    in_jax: str | None = None
    ends_owned: str | None = None
    admits: tuple[str, ...] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)
    pages: tuple[Page, ...] = ()
    settings: str | None = None


@cache
def installed_services() -> tuple[Service, ...]:
    """Return the services of `SERVICES`. One that can't be imported is logged and left out."""
    found = []
    for package in SERVICES:
        try:
            service = import_module(f"{package}.service").SERVICE
            if not isinstance(service, Service):
                raise TypeError(f"SERVICE is {type(service).__name__}, not a Service")
        except BaseException:
            logger.exception("the service %s can't be imported, and is left out", package)
            continue
        found.append(service)
    return tuple(found)


@cache
def all_settings() -> "Mapping[str, ClusterSetting[Any]]":
    """Return all settings of a cluster by name: the kernel's, and then those of the installed services.

    A service whose settings can't be imported is logged, and has none.
    """
    from iris_ray.model.cluster_settings import TABLE, ClusterSetting  # the command line's help needs none

    found = dict(TABLE)
    for service in installed_services():
        try:
            own = imported(service.settings) if service.settings else ()
            if not all(isinstance(setting, ClusterSetting) for setting in own):
                raise TypeError(f"{service.settings} has more than ClusterSettings")
        except BaseException:
            logger.exception("the settings of the service %s can't be imported", service.name)
            continue
        for setting in own:
            found.setdefault(setting.name, setting)
    return found


def setting_named(name: str) -> "ClusterSetting[Any]":
    """Return a setting by its name, or raise UnknownNameError with the most similar names."""
    from iris_ray.model.checks import unknown

    if name not in all_settings():
        raise unknown("setting", name, all_settings())
    return all_settings()[name]


def imported(place: str) -> Any:
    """Return the object at a place such as ``iris_ray.history.cli:history``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def module_of(service: str, module: str) -> Any:
    """Return a module of a service, such as its ``calls``, for a public method of the kernel that needs the service.

    Raises:
        ServiceUnavailableError: the service was taken out of iris_ray.
    """
    if not any(one.name == service for one in installed_services()):
        raise ServiceUnavailableError(f"there is no service {service!r} here: it was taken out of iris_ray")
    return import_module(f"iris_ray.{service}.{module}")


# -- hooks in tasks ----------------------------------------------------------------------------------------------------

HOOK_S = 1.0
"""A process of a task waits this long for a hook."""


def load_hooks(places: Iterable[str | None]) -> None:
    """Import the functions at these places, so that a fork need not. One that can't be imported says so when called."""
    for place in filter(None, places):
        with contextlib.suppress(Exception):
            imported(place)


def variables_of(places: Iterable[str | None], *args: Any) -> dict[str, str]:
    """Return the variables that the functions at these places return. A function that fails is logged, and has none."""
    found: dict[str, str] = {}
    for place in filter(None, places):
        try:
            found |= imported(place)(*args)
        except BaseException:
            logger.exception("%s failed; the task continues without its variables", place)
    return found


def call_hooks(places: Iterable[str | None], *args: Any, patience_s: float | None = HOOK_S) -> None:
    """Call the functions at these places in a process of a task. Raise nothing: the task goes on without a service.

    Args:
        places: of services; None is left out.
        args: of each function.
        patience_s: the time that a function may take; seconds. None: as long as it needs, in this thread.
    """
    for place in filter(None, places):
        if patience_s is None:
            _call_hook(place, args)
            continue
        thread = threading.Thread(target=_call_hook, args=(place, args), name=place, daemon=True)
        thread.start()
        thread.join(patience_s)
        if thread.is_alive():
            logger.warning("%s does not return; the task continues without it", place)


def _call_hook(place: str, args: tuple[Any, ...]) -> None:
    try:
        imported(place)(*args)
    except BaseException:
        logger.exception("%s failed; the task continues without it", place)


# -- calls -------------------------------------------------------------------------------------------------------------

SERVICE = "__iris_service__"
"""The attribute of a method that names its service."""


def calls_of(service: str) -> Callable[[C], C]:
    """Return a decorator for the Protocol of the calls that a service answers.

    The methods can be asked like those of an actor's own interface:
    ``ControllerConnection().ask(HistoryCalls.ask_history, sql, {}, 100, user)``.
    """

    def mark(protocol: C) -> C:
        for name, method in vars(protocol).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(method, SERVICE, service)
        return protocol

    return mark


def addressed(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """Return the name and the arguments of the actor's method that answers a call.

    It is the method itself or, for a service's, the actor's ``serve``.
    """
    service = getattr(method, SERVICE, None)
    if service is None:
        return method.__name__, args, kwargs
    return "serve", (service, method.__name__, args, dict(kwargs)), {}
