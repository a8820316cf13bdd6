"""What a SlicePoolManager may be asked, and told: by those whose jobs it runs, by its hosts, and by the Controller."""

from typing import Any, Protocol

from iris_ray.actors.protocol.marks import within
from iris_ray.actors.protocol.messages import AttemptOrder, PoolView, RunRequest
from iris_ray.actors.protocol.task_log import LastLines
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import HostNotice, Notice

RECLAIM_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0


class ForCallers(Protocol):
    """What the process asks that runs jobs in the pool."""

    async def run(self, request: RunRequest) -> list[Any]:
        """Run one job to its end. Return its tasks' results by index, or raise the job's own error."""

    async def begin(self, request: RunRequest) -> None:
        """Run a job without a caller whose request is large: this process keeps it, and the job ends with it."""

    async def results(self) -> list[Any]:
        """Return what came of the only job of a pool that has no caller, as `run` does."""

    async def accepted(self, job_id: str) -> bool:
        """Wait until it is known whether the Controller has a job, and return it."""

    async def release(self) -> None:
        """Give up every slice that no job has a use for, those included whose last task is just being ended."""

    async def tasks_ended(self) -> None:
        """Wait until no task of a job whose results are out runs any more."""

    async def until_idle(self, calls: int) -> None:
        """Wait until that many runs have come and gone and no slice is left.

        A run that was cancelled before it arrived never comes: nothing at all for a while will do, too.
        """


class ForHosts(Protocol):
    """What hosts tell their pool. They wait for no answer."""

    async def take_last_lines(self, last: LastLines) -> None:
        """Take the last lines that a task has printed. They are to outlive its host."""

    async def take_notice(self, node_id: str, notice: HostNotice, sent_at: float) -> None:
        """Take the notice of a host that is going to go. Its clock said `sent_at`, and Ray may not know it."""

    async def maintenance_called_off(self, node_id: str) -> None:
        """Note that the maintenance of which a host gave notice is not planned any more."""


class ForTheController(Protocol):
    """What the Controller asks. A pool that has all of these is taken for one."""

    async def watched(self) -> None:
        """Never return: a caller that waits learns of this process's end."""

    async def reconnect(self, epoch: int) -> PoolView:
        """Obey a new Controller that has taken over, and no earlier one."""

    async def assign(self, order: AttemptOrder) -> bool | None:
        """Start an attempt, if it is not known already.

        Returns:
            False if the job is not known here (any more); None if the order is not to be carried out: it was meant for
            the process before this one, or for a spare that is not wanted any more.

        Raises:
            NotYetError: this process has just begun; the caller that waits for the job may still repeat it here.
        """

    async def drop_spare(self, job_id: str) -> None:
        """Note that a spare is not wanted any more. Its order may come later than this."""

    async def notify_attempt(self, attempt: AttemptId, notice: Notice, epoch: int) -> None:
        """Tell the tasks of an attempt that it is to move."""

    @within(STOP_TIMEOUT_S)
    async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> None:
        """End an attempt. Return when no process of it is left."""

    async def job_ended(self, job_id: str) -> None:
        """Note that the Controller has ended a job, which may still wait for an order."""

    @within(RECLAIM_TIMEOUT_S)
    async def give_up_slice(self, name: str, epoch: int) -> bool:
        """Release an idle slice that another pool needs; return False if it is in use after all."""


class PoolInterface(ForCallers, ForHosts, ForTheController, Protocol):
    """All that a SlicePoolManager may be asked."""
