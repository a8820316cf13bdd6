"""The service of logs in a pool: it passes the last lines of tasks on to the Controller."""

import asyncio

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.pool.services import Pool, PoolEvent, PoolPart
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.logs.calls import LogCalls, LogCallsOfPool
from iris_ray.logs.core import LastLines
from iris_ray.model.lifecycle import TaskAttemptId

GATHERED_S = 0.5
"""Last lines that come within this time go to the Controller in one call."""


class LogsInPool(PoolPart):
    """Passes the last lines of the pool's tasks on to the Controller, in batches, beside all other work."""

    calls = (LogCallsOfPool,)

    def __init__(self, pool: Pool, running: RunningPart[PoolEvent]) -> None:
        super().__init__(pool, running)
        self._waiting: dict[TaskAttemptId, LastLines] = {}
        self._sending: asyncio.Task[None] | None = None

    async def take_last_lines(self, last: LastLines) -> None:
        self._waiting[last.log_id] = last
        if self._sending is None or self._sending.done():
            self._sending = self.pool.background.repeat(self._send_batch, "sending the last lines of tasks")

    async def _send_batch(self) -> bool:
        """Send the lines that come within `GATHERED_S`. Return whether none are left."""
        await asyncio.sleep(GATHERED_S)
        batch, self._waiting = self._waiting, {}
        lines, sender = list(batch.values()), self.pool.controller.sender
        reply = await self.pool.controller.ask_once(LogCalls.note_last_lines, lines, sender)
        if isinstance(reply, Unreachable):
            self._waiting = batch | self._waiting
        return not self._waiting
