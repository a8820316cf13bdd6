"""Why an attempt is to end before its tasks do."""

import asyncio

from iris_ray.model.notices import OUR_MOVES, Notice
from iris_ray.model.outcomes import TaskKey, TpuCancelled, TpuPreempted, TpuResult


class StopRequest:
    """Set once; the first reason counts.

    Attributes:
        reason: done when the attempt is to end; why, for people.
        cause: the task because of which we end the attempt, and its outcome; None if the end was requested.
        moved_for: the notice because of which all tasks were ended, if nothing else was the matter.
    """

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cause: tuple[TaskKey, TpuResult] | None = None
        self.moved_for: Notice | None = None

    @property
    def asked(self) -> bool:
        """Whether the attempt is to end."""
        return self.reason.done()

    def ask(self, reason: str) -> None:
        """Have the attempt ended on request."""
        if not self.asked:
            self.reason.set_result(reason)

    def blame(self, key: TaskKey, result: TpuResult, reason: str) -> None:
        """Have the attempt ended because of one of its tasks."""
        if not self.asked:
            self.cause = key, result
            self.ask(reason)

    def move(self, notice: Notice, reason: str) -> None:
        """Have the attempt ended so that its gang can run elsewhere."""
        if not self.asked:
            by_us = notice.kind in OUR_MOVES
            self.moved_for = notice
            self.blame(TaskKey(0, 0), TpuCancelled(reason) if by_us else TpuPreempted(reason), reason)
