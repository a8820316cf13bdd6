"""What the service of logs answers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from iris_ray.actors.protocol.services import calls_of
from iris_ray.logs.core import LastLines, LogPlace, LogPosition, TaskLog

if TYPE_CHECKING:
    from iris_ray.actors.protocol.messages import PoolProcess


@calls_of("logs")
class LogCalls(Protocol):
    """Calls of the Controller."""

    async def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        """Return a piece of a task's log.

        Args:
            job_id, task_index: the task.
            at: the attempt, and where the piece begins.
            max_bytes: the longest piece.

        Raises:
            UnknownNameError: there is no such job, task or attempt.
        """

    async def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Return pieces of the logs of several tasks of a job, by task index, without tasks that do not exist.

        The first `MOST_LOGS` tasks are read; ask again for the others.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """

    async def locate_logs(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        """Return the places of the logs of several tasks of a job, by task index: the first `MOST_LOGS` that exist.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """

    async def note_last_lines(self, batch: list[LastLines], sender: "PoolProcess") -> None:
        """Remember the last lines of a pool's tasks, in case their hosts vanish.

        Raises:
            NotPermittedError: they are tasks of another pool.
        """


@calls_of("logs")
class LogCallsOfPool(Protocol):
    """Calls of a pool."""

    async def take_last_lines(self, last: LastLines) -> None:
        """Pass the last lines of a task on to the Controller soon. They replace waiting lines of the same log."""
