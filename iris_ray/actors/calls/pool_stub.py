"""What a SlicePoolManager may be asked by the Controller, and told by its hosts: one method for each of its own."""

import inspect
from collections.abc import Awaitable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from iris_ray.actors.calls.asking import Unreachable, answer
from iris_ray.actors.protocol.messages import AttemptOrder, PoolView
from iris_ray.actors.protocol.task_log import LastLines
from iris_ray.errors import DeposedError, InvalidMessageError, NotYetError
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import HostNotice, Notice
from iris_ray.model.plain import plain

DISPATCH_TIMEOUT_S = 5.0
RECONNECT_TIMEOUT_S = 5.0
RECLAIM_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
_POOL = "the job's pool"


class PoolStub:
    """The pool behind an actor handle. A pool that does not answer in time, or fails, answers `Unreachable`.

    Args:
        handle: the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    @classmethod
    def is_pool(cls, handle: object) -> bool:
        """Return whether this is an actor with all methods that the Controller calls."""
        called = (name for name, what in vars(cls).items() if inspect.iscoroutinefunction(what))
        return isinstance(handle, ActorHandle) and all(hasattr(handle, name) for name in called)

    async def watched(self) -> None:
        """Wait for the end of the pool's process.

        Raises:
            RayError: it has ended, or can't be reached at the moment.
        """
        await self.handle.watched.remote()

    async def reconnect(self, epoch: int) -> PoolView | Unreachable:
        """Have the pool obey a new Controller from now on; return what it holds."""
        view = await _answer(self.handle.reconnect.remote(epoch), "a pool", RECONNECT_TIMEOUT_S)
        if isinstance(view, Unreachable):
            return view
        try:
            made: PoolView = plain(PoolView, view, "what a pool has")
        except InvalidMessageError as error:
            return Unreachable(str(error))
        return made

    async def assign(self, order: AttemptOrder) -> bool | Unreachable | None:
        """Give an order; see `SlicePoolManager.assign` for what the answer means.

        Raises:
            NotYetError: the pool's process has just begun; its jobs may come back to it.
        """
        taken: bool | Unreachable | None = await _answer(self.handle.assign.remote(order), _POOL, DISPATCH_TIMEOUT_S)
        return taken

    async def notify_attempt(self, attempt: AttemptId, notice: Notice, epoch: int) -> Unreachable | None:
        """Have an attempt's tasks told that it is to move."""
        call = self.handle.notify_attempt.remote(attempt, notice, epoch)
        told: Unreachable | None = await _answer(call, _POOL, DISPATCH_TIMEOUT_S)
        return told

    async def stop_attempt(self, attempt: AttemptId, reason: str, epoch: int) -> Unreachable | None:
        """Have an attempt ended; None once no process of it is left."""
        call = self.handle.stop_attempt.remote(attempt, reason, epoch)
        stopped: Unreachable | None = await _answer(call, _POOL, STOP_TIMEOUT_S)
        return stopped

    async def drop_spare(self, job_id: str) -> Unreachable | None:
        """Say that a spare is not wanted any more."""
        dropped: Unreachable | None = await _answer(self.handle.drop_spare.remote(job_id), _POOL, DISPATCH_TIMEOUT_S)
        return dropped

    async def job_ended(self, job_id: str) -> Unreachable | None:
        """Say that a job is over; the pool may still wait for an order."""
        told: Unreachable | None = await _answer(self.handle.job_ended.remote(job_id), _POOL, DISPATCH_TIMEOUT_S)
        return told

    async def give_up_slice(self, name: str, epoch: int) -> bool | Unreachable:
        """Have an idle slice released for another owner; False if it is in use after all."""
        call = self.handle.give_up_slice.remote(name, epoch)
        given: bool | Unreachable = await _answer(call, f"the holder of {name}", RECLAIM_TIMEOUT_S)
        return given

    # -- for its hosts, which wait for no answer -------------------------------------------------------------------

    def take_last_lines(self, last: LastLines) -> None:
        """Pass on what a task has printed last."""
        self.handle.take_last_lines.remote(last)

    def take_notice(self, node_id: str, notice: HostNotice, sent_at: float) -> None:
        """Say that a host is going to go; ``sent_at`` is what its clock says."""
        self.handle.take_notice.remote(node_id, notice, sent_at)

    def maintenance_called_off(self, node_id: str) -> None:
        """Say that the maintenance of a host is not planned any more."""
        self.handle.maintenance_called_off.remote(node_id)


async def _answer(call: Awaitable[Any], name: str, timeout_s: float) -> Any:
    """Return what the pool answers; an error of its own is no answer."""
    try:
        return await answer(call, name, timeout_s)
    except (DeposedError, NotYetError, RayError):
        raise
    except Exception as error:
        return Unreachable(f"{name} failed: {type(error).__name__}: {error}")
