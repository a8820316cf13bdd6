"""The last lines of a pool's tasks, on their way to the Controller."""

import asyncio

from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.wire.answers import Unreachable
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.controller_client import ControllerClient
from iris_ray.actors.wire.task_log import LastLines, LogId

GATHERED_S = 0.5
"""What comes within this time goes to the Controller in one call."""


class LastLinesRelay:
    """Gathers what hosts report and passes it on in batches, beside all other work.

    Args:
        controller: gets it.
    """

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller
        self._waiting: dict[LogId, LastLines] = {}
        self._background = BackgroundTasks()
        self._sending: asyncio.Task[None] | None = None

    def take(self, last: LastLines) -> None:
        """Pass these lines on soon, instead of older ones of the same attempt."""
        self._waiting[last.log_id] = last
        if self._sending is None or self._sending.done():
            self._sending = self._background.repeat(self._send_batch, "sending the last lines of tasks")

    async def _send_batch(self) -> bool:
        """Send what comes within a moment. Return whether nothing is left to be sent."""
        await asyncio.sleep(GATHERED_S)
        batch, self._waiting = self._waiting, {}
        lines, sender = list(batch.values()), self._controller.sender
        reply = await self._controller.ask_once(ControllerInterface.note_last_lines, lines, sender)
        if isinstance(reply, Unreachable):
            self._waiting = batch | self._waiting
        return not self._waiting
