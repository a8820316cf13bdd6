"""snapshot → plan → commit → record → carry out: the loop through which every event goes."""

import asyncio
import logging
import time
from collections.abc import Iterable

from iris_ray.actors.controller.dispatcher import Dispatcher
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.errors import DeposedError
from iris_ray.scheduler.planner import Planner
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_all
from iris_ray.state.events import Event, TimePassedEvent
from iris_ray.state.instructions import Instructions

logger = logging.getLogger(__name__)


class EventProcessor:
    """Applies events, and carries out what follows once it is recorded.

    Events of one turn of the asyncio loop, and those that come while something is recorded, share one plan and one
    writing. Nothing follows from any event before `begin`.

    Args:
        state: is changed by the events.
        planner: makes the plans.
        journal: records what is decided, before anything follows from it.
        background: runs the loop.

    Attributes:
        deposed: why this Controller acknowledges nothing any more, or None.
    """

    def __init__(self, state: ControllerState, planner: Planner, journal: Journal, background: BackgroundTasks) -> None:
        self.deposed: str | None = None
        self._state = state
        self._planner = planner
        self._journal = journal
        self._background = background
        self._dispatcher: Dispatcher | None = None
        self._instructions = Instructions()  # what the latest events want done
        self._recorded: asyncio.Future[None] | None = None  # of what has come since the latest plan
        self._running = False

    def begin(self, dispatcher: Dispatcher) -> None:
        """From now on something follows from events."""
        self._dispatcher = dispatcher
        self.apply([])

    def apply(self, events: Iterable[Event]) -> "asyncio.Future[None]":
        """Change the state.

        Returns:
            A future that is done when what follows is decided and recorded. Callers that acknowledge wait for it.
        """
        apply_all(self._state, [TimePassedEvent(time.time()), *events], self._instructions)
        if self._recorded is None:
            self._recorded = asyncio.get_running_loop().create_future()
        if not self._running and self._dispatcher is not None:
            self._running = True
            self._background.start(self._run(self._dispatcher), "planning")
        return self._recorded

    def step_down(self, error: DeposedError) -> None:
        """Acknowledge nothing any more. Callers are told to look for another Controller."""
        logger.warning("%s", error)
        self.deposed = str(error)

    async def _run(self, dispatcher: Dispatcher) -> None:
        """Plan, record, carry out, until nothing new has come meanwhile and the whole queue is planned."""
        try:
            while self._recorded is not None or self._planner.unfinished:
                placements = self._planner.plan(time.time(), self._instructions)
                orders = [(dispatcher.order(one.job, one.gang), one) for one in placements]
                recorded, self._recorded = self._recorded, None
                instructions, self._instructions = self._instructions, Instructions()
                try:
                    await self._journal.write(self._state)
                except DeposedError as error:
                    self.step_down(error)
                    self._refuse(error, recorded)
                    return
                dispatcher.carry_out(instructions)
                for order, placement in orders:
                    dispatcher.dispatch(order, placement)
                if recorded is not None:
                    recorded.set_result(None)
        finally:
            self._running = False

    def _refuse(self, error: DeposedError, recorded: "asyncio.Future[None] | None") -> None:
        for waited_for in (recorded, self._recorded):
            if waited_for is not None:
                waited_for.set_exception(error)
                waited_for.exception()  # there may be no caller that waits for it
        self._recorded = None
