"""A TPUHostActor as services see it; see docs/design/services.md. `actors/calls/service_parts.py` runs the parts."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.service_parts import RunningPart, RunningParts, ServicePart
from iris_ray.actors.host.chips import Devices
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.actors.protocol.messages import HostPlace, TaskLaunch
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.actors.protocol.services import Service
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.model.notices import HostNotice

P = ParamSpec("P")
T = TypeVar("T")

FILES_S = 2.0
"""The first task of a host waits this long for the address of its file service."""
DIED_S = 3.0
"""The report of a crash waits this long for what services know of it."""


@dataclass(frozen=True, slots=True)
class TaskOver:
    """All that belongs to a task has ended on this host."""

    attempt: TaskAttemptId


HostEvent = TaskOver


@dataclass(frozen=True, slots=True)
class DeadTask:
    """A task whose process has ended without a word, on a host that it had to itself.

    Attributes:
        pid: of its process.
        pids: of that and of the known processes that it had started.
        launch: what it was started with.
        began_at: when user code began, in seconds since the epoch.
    """

    pid: int
    pids: frozenset[int]
    launch: TaskLaunch
    began_at: float


@dataclass(frozen=True, slots=True)
class Host:
    """A TPUHostActor as each service sees it.

    Attributes:
        place: the host.
        name: the host's name, for people.
        exclusive: whether this actor's tasks have the host to themselves.
        directory: returns iris_ray's directory on the host.
        devices: its chips; None if its tasks use none.
        ledger: returns the host's record of task processes.
        watches: the watch of each task process, by pid.
        pool: the SlicePoolManager.
        goes: tells the pool and the tasks here that the host is about to be lost.
        stays: tells the pool that an announced maintenance is called off.
    """

    place: HostPlace
    name: str
    exclusive: bool
    directory: Callable[[], Path]
    devices: Devices | None
    ledger: Callable[[], ProcessLedger]
    watches: Mapping[int, TaskWatch]
    pool: Actor[PoolInterface]
    goes: Callable[[HostNotice], None]
    stays: Callable[[], None]


class HostPart(ServicePart[HostEvent]):
    """The base of a service's part on a host.

    Args:
        host: the host.
        running: this part's supervision.
    """

    def __init__(self, host: Host, running: RunningPart[Any]) -> None:
        self.host = host
        self._running = running

    async def files_address(self) -> str:
        """Return the ``host:port`` where this service serves files of jobs to other hosts; "": nowhere."""
        return ""

    async def died(self, task: DeadTask) -> str:
        """Return what people are to be told of a task that has crashed, beside the reason; "": nothing."""
        return ""

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks, in a thread of this service."""
        return await self._running.in_thread(function, *args, **kwargs)


class HostParts(RunningParts[HostEvent]):
    """The services' parts on a host."""

    async def files_address(self) -> str:
        """Return the address of the file service; "" if no service has one, or none answers within `FILES_S`."""
        calls = (running.call(lambda part: part.files_address(), FILES_S) for running in self)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return next((address for address in answers if isinstance(address, str) and address), "")

    async def died(self, task: DeadTask) -> list[str]:
        """Return what services tell of a task that has crashed, within `DIED_S`."""
        calls = (running.call(lambda part: part.died(task), DIED_S) for running in self)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, str) and answer]


def host_parts(services: Iterable[Service], host: Host) -> HostParts:
    """Return the services' parts on a host."""
    places = [(service, service.host) for service in services if service.host is not None]
    return HostParts(places, lambda kind, running: kind(host, running))
