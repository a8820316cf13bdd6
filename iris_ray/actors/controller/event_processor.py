"""The loop through which every event goes: snapshot → plan → commit → record → carry out."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.controller.containment import BrokenStateError
from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.protocol.messages import AttemptOrder
from iris_ray.errors import ControllerUnavailableError, DeposedError
from iris_ray.scheduler.planner import PlacedGang, Planner
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_safely
from iris_ray.state.events import Event, TaskDispatchFailedEvent, TimePassedEvent
from iris_ray.state.instructions import FailedEvent, Instructions

logger = logging.getLogger(__name__)


class EventProcessor:
    """Applies events to the state, and acts on the decisions that follow once they are recorded.

    Events of one turn of the asyncio loop, and events that come while the journal writes, share one plan and one
    writing. Before `begin`, events only change the state.

    A job that can't be handled, recorded or ordered is set aside, and all others go on. An error that no job has caused
    ends this Controller: it acknowledges no further event and its process ends, so that the next one reads the records.

    Args:
        state: is changed by the events.
        planner: makes the plans.
        journal: records decisions before anyone acts on them.
        background: runs the loop.
        end: called once when this Controller ends.
        applied: called with events after they were applied, and with those by which a plan gives gangs their hosts.
        stepped_down: called once another Controller has taken over.

    Attributes:
        deposed: why this Controller acknowledges no events: another one has taken over; else None.
        failed: why this Controller acknowledges no events: it has failed and is about to be restarted; else None.
    """

    def __init__(
        self,
        state: ControllerState,
        planner: Planner,
        journal: Journal,
        background: BackgroundTasks,
        end: Callable[[], object],
        applied: Callable[[Collection[Event]], object] = lambda _: None,
        stepped_down: Callable[[], object] = lambda: None,
    ) -> None:
        self.deposed: str | None = None
        self.failed: str | None = None
        self._state = state
        self._planner = planner
        self._journal = journal
        self._contained = journal.contained
        self._background = background
        self._end = end
        self._applied = applied
        self._stepped_down = stepped_down
        self._dispatcher: Dispatcher | None = None
        self._instructions = Instructions()  # of the latest events
        self._recorded: asyncio.Future[None] | None = None  # for events since the latest plan
        self._in_writing: asyncio.Future[None] | None = None  # for events that the journal writes now
        self._running = False

    def begin(self, dispatcher: Dispatcher) -> None:
        """Start to plan and to act on events."""
        self._dispatcher = dispatcher
        self.apply([])

    def apply(self, events: Iterable[Event]) -> "asyncio.Future[None]":
        """Change the state.

        Returns:
            A future that is done when the decisions that follow are recorded. Many callers share it: see `recorded`.
        """
        if self._recorded is None:
            self._recorded = asyncio.get_running_loop().create_future()
        recorded = self._recorded
        if self.failed is not None:
            self._refuse(ControllerUnavailableError(self.failed))
            return recorded
        now, known = TimePassedEvent(self._journal.clock.now()), list(self._contained.without(events))
        apply_safely(self._state, [now, *known], self._instructions)
        self._applied(known)
        try:
            self._contained.end_those_of_failed(self._state, self._instructions)
        except BrokenStateError as error:
            self.fail(error)
            return recorded
        if not self._running and self._dispatcher is not None:
            self._running = True
            self._background.start(self._run(self._dispatcher), "planning")
        return recorded

    async def recorded(self, events: Iterable[Event]) -> None:
        """Change the state, and wait until the decisions that follow are recorded. Then the caller may acknowledge.

        Ray may cancel the caller. That must end neither the writing nor other callers that wait for it.
        """
        await asyncio.shield(self.apply(events))

    def step_down(self, error: DeposedError) -> None:
        """Acknowledge no further events. Callers are told to look for another Controller."""
        logger.warning("%s", error)
        self.deposed = str(error)
        self._stepped_down()

    def fail(self, error: Exception) -> None:
        """End all work. Events that are not acknowledged yet never are, and waiting callers are told to ask again."""
        if self.failed is None:
            logger.critical("this Controller is over; the next one continues from the records", exc_info=error)
            self.failed = f"the Controller has failed and is being restarted: {type(error).__name__}: {error}"
            self._contained.note_jobs(self._contained.jobs)
            self._end()
        self._refuse(ControllerUnavailableError(self.failed))

    async def _run(self, dispatcher: Dispatcher) -> None:
        """Plan, record and carry out, until no new event has come meanwhile and the whole queue is planned."""
        try:
            while self._recorded is not None or self._planner.unfinished:
                await self._follow(dispatcher)
        except DeposedError as error:
            self.step_down(error)
            self._refuse(error)
        except Exception as error:
            self.fail(error)
        finally:
            self._running = False

    async def _follow(self, dispatcher: Dispatcher) -> None:
        """Plan, record and carry out once."""
        now = self._journal.clock.now()
        placements = self._planner.plan(now, self._instructions)
        self._applied([*{id(one.event): one.event for one in placements if one.event is not None}.values()])
        orders = list(self._orders(placements, dispatcher))
        self._contained.end_those_of_failed(self._state, self._instructions)
        self._in_writing, self._recorded = self._recorded, None
        instructions, self._instructions = self._instructions, Instructions()
        await self._journal.write(self._state)
        unrecordable = self._set_unrecorded_aside()
        dispatcher.carry_out(instructions)
        for order, placement in orders:
            if order.attempt.job_id not in unrecordable:
                dispatcher.dispatch(order, placement)
        if self._in_writing is not None:
            self._in_writing.set_result(None)
            self._in_writing = None

    def _orders(
        self, placements: list[PlacedGang], dispatcher: Dispatcher
    ) -> Iterator[tuple[AttemptOrder, PlacedGang]]:
        for one in placements:
            try:
                yield dispatcher.order(one.job, one.gang), one
            except Exception as error:
                attempt = one.job.current_attempt(one.gang)
                event = TaskDispatchFailedEvent(attempt, str(error), self._journal.clock.now())
                self._instructions.failed.append(FailedEvent(event, error))

    def _set_unrecorded_aside(self) -> Collection[str]:
        """End the jobs that can't be recorded. Return their ids, so that no order of theirs is sent.

        Their older records say that they still run, so a note tells a successor to end them.
        """
        unrecordable = self._journal.take_unrecordable()
        new = unrecordable.keys() - self._contained.jobs.keys()
        for job_id in new:
            self._contained.end(job_id, "recorded", unrecordable[job_id], self._state, self._instructions)
            self.apply([])
        self._contained.note_jobs(new)
        return unrecordable

    def _refuse(self, error: Exception) -> None:
        for waited_for in (self._in_writing, self._recorded):
            if waited_for is not None and not waited_for.done():
                waited_for.set_exception(error)
                waited_for.exception()  # keeps asyncio from logging it if no caller waits
        self._in_writing = self._recorded = None
