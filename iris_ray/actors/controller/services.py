"""The Controller as services see it; see docs/design/services.md. `actors/calls/service_parts.py` runs the parts."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from iris_ray.actors.calls.service_parts import RunningPart, RunningParts, ServiceHealth, ServicePart
from iris_ray.actors.controller.clock import Clock
from iris_ray.actors.controller.containment import Containment
from iris_ray.actors.controller.node_table import NodeDiff
from iris_ray.actors.controller.permissions import Permissions
from iris_ray.actors.controller.progress_board import ProgressBoard
from iris_ray.actors.host.directories import host_directory
from iris_ray.actors.protocol.messages import AttemptOrder, PoolProcess
from iris_ray.actors.protocol.services import Service
from iris_ray.errors import InvalidMessageError
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.outcomes import ProviderWord
from iris_ray.model.plain_values import plain
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState
from iris_ray.state.events import Event
from iris_ray.state.instructions import ReclaimSlice

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Happening = Event | AttemptOrder
"""News for parts in the Controller: each applied event, and the order of each attempt that gets hosts."""


def controller_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory on the head for services' files: beside the state of Ray's GCS, if that is on a disk; else
    the head's directory of iris_ray.

    Raises:
        OSError: another user owns the head's directory.
    """
    if environ.get("RAY_gcs_storage") == "rocksdb" and (path := environ.get("RAY_gcs_storage_path")):
        return Path(path, "iris_ray")
    return host_directory(environ)


PlainValue = str | int | float | bool | None
Gauge = tuple[str, tuple[str, ...], float]
"""The name of a metric, the values of its labels, and its value."""

ADMIT_S = 10.0
"""The time in which a service accepts a job that uses it. After that the job is refused."""
LOST_S = 3.0
"""The time in which a service answers `ControllerPart.slices_lost`."""


@dataclass(frozen=True, slots=True)
class Published:
    """The plain values that a service has published. The kernel shows them and never asks for them.

    Attributes:
        reasons: by TPU type, sentences that ``why`` adds for jobs that wait for slices of the type.
        brings_slices: whether somebody may bring slices that the cluster does not have yet, so that a job that does
            not fit today is not refused.
        about: what ``about``, and with it ``doctor``, shows.
        tables: rows for the dashboard, by table and by the row's key.
        prices: by TPU type, the price of a chip-hour and its currency.
        gauges: values of metrics, for the service ``goodput``.
    """

    reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    brings_slices: bool = False
    about: Mapping[str, PlainValue] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Mapping[str, PlainValue]]] = field(default_factory=dict)
    prices: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    gauges: tuple[Gauge, ...] = ()


class ServiceBoard:
    """The latest `Published` of each service."""

    def __init__(self) -> None:
        self._by_service: dict[str, Published] = {}

    def publish(self, service: str, published: Published) -> None:
        """Replace what a service has published.

        Raises:
            InvalidMessageError: a value is not of its type.
        """
        self._by_service[service] = plain(Published, published, f"the publication of the service {service}")

    def withdraw(self, service: str) -> None:
        """Remove what a service has published, because the service is failing."""
        self._by_service.pop(service, None)

    def reasons(self, tpu_type: str) -> tuple[str, ...]:
        """Return the sentences that services add to the reason of a job that waits for slices of a type."""
        return tuple(words for one in self._by_service.values() for words in one.reasons.get(tpu_type, ()))

    @property
    def brings_slices(self) -> bool:
        """Whether a service may bring slices that the cluster does not have."""
        return any(one.brings_slices for one in self._by_service.values())

    def price(self, tpu_type: str) -> tuple[float, str] | None:
        """Return the price of a chip-hour of a type and its currency; None if no service knows it."""
        return next((one.prices[tpu_type] for one in self._by_service.values() if tpu_type in one.prices), None)

    def gauges(self) -> list[Gauge]:
        """Return the metrics of all services."""
        return [gauge for one in self._by_service.values() for gauge in one.gauges]

    def tables(self) -> dict[str, Mapping[str, Mapping[str, PlainValue]]]:
        """Return the dashboard's tables of all services, by the table's name."""
        return {name: rows for one in self._by_service.values() for name, rows in one.tables.items()}

    def about(self) -> dict[str, dict[str, PlainValue]]:
        """Return the lines of each service about itself, by its name."""
        return {name: dict(one.about) for name, one in self._by_service.items() if one.about}


class ServiceRecords:
    """A record of each service in the Controller's journal: bytes that the service alone reads and writes."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed: set[str] = set()

    def restore(self, values: Mapping[str, bytes]) -> None:
        """Take up the records of the Controller before, which are then recorded again."""
        self._values = dict(values)
        self._changed = set(values)

    def read(self, service: str) -> bytes | None:
        """Return the latest record of a service; None if it has none."""
        return self._values.get(service)

    def write(self, service: str, value: bytes) -> None:
        """Record a value with the journal's next writing."""
        self._values[service] = bytes(value)
        self._changed.add(service)

    def take_changed(self) -> dict[str, bytes]:
        """Return the records that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return {name: self._values[name] for name in changed}


@dataclass(frozen=True, slots=True)
class Controller:
    """The Controller as each service sees it.

    Attributes:
        state: to read only; it changes by events.
        clock: gives the time of all events.
        planner: knows why jobs wait.
        progress: the latest progress of running jobs.
        nodes: hosts that no job gets, and the slices of hosts that are gone.
        permissions: refuses users and pools that may not do something.
        board: holds what services have published.
        records: holds the services' records.
        contained: jobs that the Controller could not handle, and records that it can't read.
        directory: returns the directory on the head for services' files; None if there is none.
        apply: applies events; the future is done when the decisions that follow are recorded.
        recorded: applies events, and waits until the decisions that follow are recorded.
        require_pool: refuses a pool's process that a newer one has replaced, and one that does not own the job.
        settings_changed: applies the cluster's settings after they were set.
        epoch: returns the number of this Controller.
        measurements: takes the durations of the journal's writings since the last call, and for how long the present
            one has waited; seconds.
        health: returns the condition of each service's part.
        job: returns a job, or raises UnknownNameError.
        ask: asks another service's part, as `ControllerConnection.ask` does; raises ServiceUnavailableError.
        reclaim: asks pools to release slices that they keep warm; returns why that failed, or None.
    """

    state: ControllerState
    clock: Clock
    planner: Planner
    progress: ProgressBoard
    nodes: NodeDiff
    permissions: Permissions
    board: ServiceBoard
    records: ServiceRecords
    contained: Containment
    directory: Callable[[], Path | None]
    apply: Callable[[Iterable[Event]], Awaitable[None]]
    recorded: Callable[[Iterable[Event]], Awaitable[None]]
    require_pool: Callable[[PoolProcess, str], None]
    settings_changed: Callable[[], None]
    epoch: Callable[[], int]
    measurements: Callable[[], tuple[list[float], float]]
    health: Callable[[], list[ServiceHealth]]
    job: Callable[[str], Job]
    ask: Callable[..., Awaitable[Any]]
    reclaim: Callable[[Iterable[ReclaimSlice]], Awaitable[str | None]]


class ControllerPart(ServicePart[Happening]):
    """The base of a service's part in the Controller.

    Args:
        controller: the Controller.
        running: this part's supervision.
    """

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        self.controller = controller
        self._running = running
        self._is_closed = False

    async def admit(self, spec: JobSpec) -> None:
        """Refuse a job that uses this service, by an `IrisError`. It is called for jobs with a field of `admits`."""

    async def slices_lost(self, names: frozenset[str]) -> Mapping[str, ProviderWord]:
        """Return the cloud provider's statements about slices whose hosts were just lost, by the slice's name."""
        return {}

    def about_job(self, job: Job) -> str | None:
        """Return a sentence about a job that someone asks for, or None. It must not block, and is not a coroutine."""
        return None

    def publish(self, published: Published) -> None:
        """Publish values for the kernel to show. Raise InvalidMessageError for a value of another type.

        Calls of a part that was dropped are ignored, since nobody would withdraw the values.
        """
        if self._is_closed:
            return
        self.controller.board.publish(self._running.service.name, published)

    def recorded_value(self) -> bytes | None:
        """Return this service's record, also that of an earlier Controller; None if there is none."""
        return self.controller.records.read(self._running.service.name)

    def restored(self, name: str, read: Callable[[bytes], T]) -> T | None:
        """Return this service's record, converted by a function; None without a record.

        A record that can't be read is kept apart, and named by ``about``; None is returned.

        Args:
            name: the record's name, for people.
            read: may raise any error.
        """
        if (value := self.recorded_value()) is None:
            return None
        contained = self.controller.contained
        found = contained.read(name, {f"service/{self._running.service.name}": value}, partial(read, value))
        contained.keep_records()
        return found

    def record(self, value: bytes) -> None:
        """Replace this service's record with the journal's next writing."""
        self.controller.records.write(self._running.service.name, value)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks, in a thread of this service."""
        return await self._running.in_thread(function, *args, **kwargs)

    def close(self) -> None:
        self._is_closed = True
        self.controller.board.withdraw(self._running.service.name)


class ControllerParts(RunningParts[Happening]):
    """The services' parts in the Controller."""

    async def admit(self, spec: JobSpec) -> None:
        """Refuse a job if a service that it uses refuses it. Other services are not asked.

        Raises:
            IrisError: the service's reason.
            ServiceUnavailableError: the service fails, or does not answer within `ADMIT_S`.
        """
        for running in self:
            if any(getattr(spec, name) for name in running.service.admits):
                await running.call(lambda part: part.admit(spec), ADMIT_S)

    def about_job(self, job: Job) -> str | None:
        """Return the sentences of the services about a job; None if there are none. Failing services say nothing."""
        said = (running.call_now(lambda part: part.about_job(job), str) for running in self)
        return "; ".join(filter(None, said)) or None

    async def slices_lost(self, names: frozenset[str]) -> dict[str, ProviderWord]:
        """Return services' statements about slices whose hosts were just lost. Failing and slow ones are left out."""
        asked = [one for one in self if _knows_slices(one.part)]
        calls = (one.call(lambda part: _words_of(part, names), LOST_S) for one in asked)
        found: dict[str, ProviderWord] = {}
        for running, answer in zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                logger.warning("the service %s could not say why slices were lost: %s", running.service.name, answer)
            else:
                found |= answer
        return found


async def _words_of(part: ControllerPart, names: frozenset[str]) -> dict[str, ProviderWord]:
    answer = await part.slices_lost(names)
    try:
        words: dict[str, ProviderWord] = plain(dict[str, ProviderWord], answer, "the answer")
    except InvalidMessageError as error:
        raise TypeError(f"slices_lost: {error}") from error
    return words


def _knows_slices(part: ServicePart[Happening] | None) -> bool:
    return isinstance(part, ControllerPart) and type(part).slices_lost is not ControllerPart.slices_lost


def controller_parts(services: Iterable[Service], controller: Controller) -> ControllerParts:
    """Return the services' parts in the Controller."""
    places = [(service, service.controller) for service in services if service.controller is not None]
    return ControllerParts(places, lambda kind, running: kind(controller, running))
