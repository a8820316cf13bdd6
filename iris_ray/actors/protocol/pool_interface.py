"""The interface of a SlicePoolManager, for the process that calls it, for its hosts, and for the Controller."""

from typing import Any, Protocol

from iris_ray.actors.protocol.marks import within
from iris_ray.actors.protocol.messages import Adoption, AttemptOrder, PoolView, RunRequest
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import HostNotice, Notice

RECLAIM_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0


class ForCallers(Protocol):
    """The methods for the process that runs jobs in the pool."""

    async def run(self, request: RunRequest) -> list[Any]:
        """Run one job to its end. Return its tasks' results by index, or raise the job's own error."""

    async def begin(self, request: RunRequest) -> None:
        """Run a job that has a large request and no caller. The job ends with this process, which keeps the request."""

    async def results(self) -> list[Any]:
        """Wait for the only job of a pool without a caller. Return or raise as `run` does."""

    async def adopt(self, request: RunRequest, replaces: bool = False) -> Adoption:
        """Have the next attempt of the task that submitted this pool's only job adopt the job.

        Args:
            request: the task's new request.
            replaces: whether to end the job if the requests differ. The answer then comes when its processes are gone.
        """

    async def accepted(self, job_id: str) -> bool:
        """Wait until the Controller has accepted or refused a job. Return whether it has accepted."""

    async def release(self) -> None:
        """Release every slice that no job needs, including slices whose last task is just ending."""

    async def tasks_ended(self) -> None:
        """Wait until all tasks have ended of jobs whose results are out."""

    async def until_idle(self, calls: int) -> None:
        """Wait until this number of runs has ended and no slice or host is held, or nothing has happened for a while.

        The latter is for a run that was cancelled before it arrived, and never comes.
        """


class ForHosts(Protocol):
    """The methods for hosts. They wait for no answer."""

    async def take_notice(self, node_id: str, notice: HostNotice, sent_at: float) -> None:
        """Take the notice of a host. `sent_at` is the time on the host's clock. Ray may not know of the notice."""

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a service, as the Controller's ``serve`` does."""

    async def maintenance_called_off(self, node_id: str) -> None:
        """Note that a host's announced maintenance is called off."""


class ForTheController(Protocol):
    """The methods for the Controller. It takes an actor with all of these methods for a pool."""

    async def watched(self) -> None:
        """Wait until a newer Controller is obeyed. A Controller that waits learns of this process's end."""

    async def reconnect(self, epoch: int) -> PoolView:
        """Obey the Controller with this epoch from now on, and no earlier one. Return the pool's view of itself."""

    async def assign(self, order: AttemptOrder) -> bool | None:
        """Start an attempt, unless the pool has its order already.

        Returns:
            True if the pool has the order; False if it does not know the job; None if the order is obsolete, because it
            is for an earlier process of the pool or for a spare that was dropped.

        Raises:
            NotYetError: this process has just started, and the job's caller may still repeat the job here.
        """

    async def drop_spare(self, job_id: str) -> None:
        """Note that a spare is not wanted any more. Its order may come later than this call."""

    async def notify_attempt(self, attempt: AttemptId, notice: Notice, epoch: int, sent_at: float) -> None:
        """Tell the tasks of an attempt that it is to move. `sent_at` is the time on the clock of the notice."""

    @within(STOP_TIMEOUT_S)
    async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> None:
        """End an attempt. Return when all of its processes are gone."""

    async def job_ended(self, job_id: str) -> None:
        """Note that the Controller has ended a job, which may still wait for an order."""

    @within(RECLAIM_TIMEOUT_S)
    async def give_up_slice(self, name: str, epoch: int) -> bool:
        """Release an idle slice that another pool needs. Return False if the slice is in use after all."""


class PoolInterface(ForCallers, ForHosts, ForTheController, Protocol):
    """All methods of a SlicePoolManager."""
