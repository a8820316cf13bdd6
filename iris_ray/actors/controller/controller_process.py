"""The Controller's parts, its start, the loop that watches the cluster's nodes, and calls of services."""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import iris_ray
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.event_processor import EventProcessor
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.controller.node_table import NODE_POLL_S, NodeDiff, NodeTable
from iris_ray.actors.controller.permissions import Permissions
from iris_ray.actors.controller.pool_registry import PoolRegistry
from iris_ray.actors.controller.progress_board import ProgressBoard, newer_marks
from iris_ray.actors.controller.recovery import come_back
from iris_ray.actors.controller.services import Controller as ControllerOfServices
from iris_ray.actors.controller.services import ServiceBoard, controller_directory, controller_parts
from iris_ray.actors.controller.views import Overview
from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.actors.protocol.services import addressed, installed_services
from iris_ray.actors.protocol.version import versions_here
from iris_ray.errors import (
    ControllerUnavailableError,
    DeposedError,
    UnknownNameError,
    UnknownRecordError,
)
from iris_ray.model.checks import unknown
from iris_ray.model.cluster_settings import (
    EVICTION_GRACE_S,
    EVICTIONS,
    EVICTIONS_PER_JOB,
    EVICTIONS_PER_TEAM,
    EVICTIONS_PER_USER,
)
from iris_ray.model.jobs import Job
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.topology import get_tpu_config
from iris_ray.scheduler import Scheduler
from iris_ray.scheduler.eviction_costs import LEAST_RUN_S, EvictionRules
from iris_ray.scheduler.explanation import held_back
from iris_ray.scheduler.pending_reason import PendingReason
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState
from iris_ray.state.events import AttemptMarkedEvent, Event, PoolRestartedEvent

logger = logging.getLogger(__name__)

ANOTHER_WOULD_MEET = UnknownRecordError, DeposedError
"""Errors at the start that another process of this version would meet as well."""
MOST_PLACED = 200
"""The number of gangs that one plan places at most, so that calls are answered between two plans."""

END_AFTER_S = 5.0
"""A failed Controller answers for this time with the reason. Controllers that all fail follow no faster."""


def end_process_soon() -> None:
    """End this process, so that Ray restarts the Controller, which goes on from its records."""
    asyncio.get_running_loop().call_later(END_AFTER_S, os._exit, 1)


class ControllerProcess:
    """The parts of the Controller, its start, and the loop that watches Ray's node table. Subclasses answer questions.

    Args:
        read_nodes: reads Ray's node table; blocks.
        end: ends this process, when only a new one helps.
        directory: returns the directory for services' files; None: they keep none.
    """

    def __init__(
        self,
        read_nodes: Callable[[], NodeTable] = NodeTable.read,
        end: Callable[[], object] = end_process_soon,
        directory: Callable[[], Path | None] = controller_directory,
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._started_at = time.time()
        self._read_nodes = read_nodes
        self._end = end
        self._state = ControllerState()
        self._journal = Journal()
        self._clock = self._journal.clock
        self._background = BackgroundTasks(self._background_failed)
        self._service_tasks = BackgroundTasks()
        self._scheduler = Scheduler()
        self._planner = Planner(self._state, NODE_POLL_S, self._scheduler, most_placed=MOST_PLACED)
        self._progress = ProgressBoard()
        self._events = EventProcessor(
            self._state,
            self._planner,
            self._journal,
            self._background,
            self._end,
            lambda events: self._services.note(events),
            self._service_tasks.cancel,
        )
        self._pools = PoolRegistry(self._journal, self._state, self._apply_of_pools, self._background)
        self._dispatcher = Dispatcher(
            self._state,
            self._journal,
            self._pools,
            lambda order: self._services.note([order]),
            self._events.apply,
            self._background,
        )
        self._nodes = NodeDiff(self._state, self._clock, self._journal.own_slices)
        self._board = ServiceBoard()
        self._overview = Overview(self._state, self._planner, self._nodes, self._progress, self._board, self._clock)
        self._permissions = Permissions(self._state, self._nodes)
        seen_by_services = ControllerOfServices(
            self._state,
            self._clock,
            self._planner,
            self._progress,
            self._nodes,
            self._permissions,
            self._board,
            self._journal.service_records,
            self._journal.contained,
            directory=directory,
            apply=self._events.apply,
            recorded=self._events.recorded,
            require_pool=self._require_pool,
            settings_changed=self._follow_settings,
            epoch=lambda: self._journal.epoch,
            measurements=self._journal.take_writings,
            health=lambda: self._services.health(),
            job=self._job,
            ask=self._ask_service,
            reclaim=self._dispatcher.reclaim,
        )
        self._services = controller_parts(installed_services(), seen_by_services)
        self._starting = asyncio.ensure_future(self._start())  # Ray makes async actors in their event loop

    async def versions(self) -> dict[str, Any]:
        return versions_here()

    async def ping(self) -> None:
        if self._events.deposed:
            raise DeposedError(self._events.deposed)
        if self._events.failed:
            raise ControllerUnavailableError(self._events.failed)
        try:
            await asyncio.shield(self._starting)
        except ANOTHER_WOULD_MEET:
            raise
        except Exception as error:
            raise ControllerUnavailableError(
                f"the Controller of iris_ray {iris_ray.__version__} can't start: {type(error).__name__}: {error}"
            ) from error

    async def _start(self) -> None:
        gc.disable()  # hardly any object that is made now becomes garbage, and collections would take long
        try:
            await come_back(
                self._state,
                self._journal,
                self._pools,
                self._nodes,
                self._dispatcher,
                self._read_nodes,
            )
        except ANOTHER_WOULD_MEET:
            raise
        except Exception as error:
            self._events.fail(error)
            raise
        finally:
            gc.enable()
        self._follow_settings()
        gc.collect()
        gc.freeze()  # the hosts stay, and each collection that goes through them would stop the process for a while
        self._background.start(self._watch_nodes(), "watching Ray's node table")
        self._events.begin(self._dispatcher)
        for work, what in self._services.works():
            self._service_tasks.start(work, what)

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a service; see `iris_ray.actors.protocol.services.addressed`."""
        await self.ping()
        return await self._services.answer(service, method, args, kwargs)

    async def _ask_service(self, question: Callable[..., Any], *args: Any) -> Any:
        return await self._services.answer(*addressed(question, args, {})[1])

    def _follow_settings(self) -> None:
        """Apply the cluster's settings. Permissions and services read their settings themselves."""
        settings = self._state.settings
        budgets = (settings.value(each) for each in (EVICTIONS_PER_JOB, EVICTIONS_PER_USER, EVICTIONS_PER_TEAM))
        rules = EvictionRules(settings.value(EVICTION_GRACE_S), LEAST_RUN_S, *budgets)
        self._scheduler.evictions = rules if settings.value(EVICTIONS) else None
        self._planner.look_again()

    async def _watch_nodes(self) -> None:
        while not self._events.deposed:
            await asyncio.sleep(NODE_POLL_S)
            self._clock.look()
            try:
                table = await asyncio.to_thread(self._read_nodes)
                self._events.apply(self._nodes.events_of(table))
            except Exception:
                logger.exception("reading Ray's node table failed; trying again")

    def _apply_of_pools(self, events: Iterable[Event]) -> None:
        """Apply the events that follow from the end of a pool. First record the steps that it had reported."""
        events = list(events)
        owners = [event.owner for event in events if isinstance(event, PoolRestartedEvent)]
        jobs = [job for owner in owners for job in self._state.jobs_of(owner)]
        found = ((job, newer_marks(job.times, self._progress.of(job.spec.job_id))) for job in jobs)
        marked = [
            AttemptMarkedEvent(AttemptId(job.spec.job_id, job.times.attempts[-1].number), marks)
            for job, marks in found
            if marks is not None
        ]
        self._events.apply([*marked, *events])

    def _job(self, job_id: str) -> Job:
        job = self._state.jobs.get(job_id)
        if job is None and (lost := self._journal.contained.records.get(job_id)) is not None:
            raise UnknownNameError(str(lost))
        if job is None:
            raise unknown("job", job_id, self._state.jobs)
        return job

    def _require_pool(self, sender: PoolProcess, job_id: str) -> None:
        self._pools.require_latest(sender)
        self._permissions.require_pools_own(sender.owner, job_id)

    def _background_failed(self, error: BaseException) -> None:
        if isinstance(error, DeposedError):
            self._events.step_down(error)

    def _waiting(self, job: Job) -> PendingReason | None:
        """Return why a job waits by the latest plan, if it does, and what services add."""
        waiting = held_back(job) or self._planner.pending_reasons.get(job.spec.job_id)
        if waiting is None or job.spec.device is None:
            return waiting
        return replace(waiting, asked=self._board.reasons(get_tpu_config(job.spec.device).name))
