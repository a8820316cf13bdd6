"""The pools that the Controller knows: one actor for each calling process. Ray restarts a pool whose process dies."""

import asyncio
import inspect
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from typing import Concatenate, ParamSpec, TypeVar

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import remove_placement_group

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.asking_again import ask_again
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.names import forget_incarnations, reservations_of
from iris_ray.actors.calls.ray_internals import placement_group_by_id, placement_groups_in_use
from iris_ray.actors.controller.journal import Journal
from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.messages import PoolProcess, PoolView
from iris_ray.actors.protocol.pool_interface import ForTheController, PoolInterface
from iris_ray.errors import DeposedError, InvalidMessageError, NotYetError, SupersededError
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.plain_values import plain
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    Event,
    JobCancelledEvent,
    PoolRestartedEvent,
    SliceHeldEvent,
    SliceReleasedEvent,
)

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

LOOK_AGAIN_S = 0.5
REMOVE_AGAIN_S, REMOVAL_S = 1.0, 30.0
"""The pause between two tries to remove the reservations of pools, and the time for all. A GCS restarts in seconds."""
POOL_GONE = "the process that called run_on_pod is gone"


_ASKED = tuple(name for name, what in vars(ForTheController).items() if inspect.iscoroutinefunction(what))


class Pool(Actor[PoolInterface]):
    """A job's pool. If it raises an unexpected error, the answer is `Unreachable`."""

    def __init__(self, handle: ActorHandle, name: str = "the job's pool") -> None:
        super().__init__(handle, name)

    @staticmethod
    def is_one(handle: object) -> bool:
        """Return whether this is an actor with all methods that the Controller calls."""
        return isinstance(handle, ActorHandle) and all(hasattr(handle, name) for name in _ASKED)

    async def ask_within(
        self,
        deadline_s: float | None,
        method: Callable[Concatenate[PoolInterface, P], Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T | Unreachable:
        """Return the pool's answer; `Unreachable` if the pool raises an unexpected error."""
        try:
            return await super().ask_within(deadline_s, method, *args, **kwargs)
        except (DeposedError, NotYetError, RayError):
            raise
        except Exception as error:
            return Unreachable(f"{self.name} failed: {type(error).__name__}: {error}")


class PoolRegistry(Mapping[str, Pool]):
    """The pools by owner, with the number of each pool's process.

    Args:
        journal: records the pools.
        state: read only. Changes reach it as events.
        apply: takes these events.
        background: runs the watching.
    """

    def __init__(
        self,
        journal: Journal,
        state: ControllerState,
        apply: Callable[[Iterable[Event]], object],
        background: BackgroundTasks,
    ) -> None:
        self._journal = journal
        self._state = state
        self._apply = apply
        self._background = background
        self._by_owner: dict[str, Pool] = {}
        self._incarnations: dict[str, int] = {}  # the number of each pool's process
        self._restarting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._left_by: set[str] = set()  # owners whose reservations are to be removed
        self._removing = asyncio.Lock()

    def __getitem__(self, owner: str) -> Pool:
        return self._by_owner[owner]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_owner)

    def __len__(self) -> int:
        return len(self._by_owner)

    def incarnation(self, owner: str) -> int:
        """Return the number of the pool's latest process; 0 if the pool is not known."""
        return self._incarnations.get(owner, 0)

    def require_latest(self, process: PoolProcess) -> None:
        """Refuse a message from a process that a newer one has replaced.

        Raises:
            SupersededError: a newer process has replaced it.
        """
        latest = self.incarnation(process.owner)
        if process.incarnation < latest:
            raise SupersededError(
                f"process {process.incarnation} of pool {process.owner} was replaced by process {latest}: its messages"
                " are refused"
            )

    def meet(self, owner: str, pool: Pool, incarnation: int) -> None:
        """Add a new pool, and watch for its end."""
        self._note(owner, pool, incarnation)
        self._background.start(self._watch(owner, pool, seen=True), f"watching pool {owner}")

    async def come_back(self) -> dict[str, PoolView]:
        """Take over the pools of an earlier Controller. Return the view of each pool that answers."""
        for owner, (handle, incarnation) in self._journal.pools().items():
            if not Pool.is_one(handle):
                logger.error("the record of pool %s has no pool's handle; its jobs are ended", owner)
                continue
            self._note(owner, Pool(handle), incarnation)
        views = await asyncio.gather(*(self._view_of(owner, pool) for owner, pool in self.items()))
        return {owner: view for owner, view in zip(self, views, strict=True) if view is not None}

    def watch(self, seen: Iterable[str]) -> None:
        """Watch for the end of the pools that `come_back` has taken over. Ask those again that are not in ``seen``."""
        for owner, pool in self.items():
            self._background.start(self._watch(owner, pool, owner in seen), f"watching pool {owner}")

    async def end_unknown(self) -> None:
        """End the jobs of pools that are not in the registry, and remove their reservations.

        A job has no pool if the Controller before died while it cleared up after the pool, or if the pool's handle
        can't be read.
        """
        unknown = {owner for owner in self._state.owners() if owner not in self}
        events = [event for owner in unknown for event in ends_with_pool(self._state, owner)]
        if events:
            await self._remove_reservations(unknown)
            self._apply(events)

    async def process_is(self, owner: str, incarnation: int) -> None:
        """Note the number of the pool's process. If it is newer, all attempts of the old process are over.

        Raises:
            SupersededError: a newer process has replaced it.
        """
        async with self._restarting[owner]:
            self.require_latest(PoolProcess(owner, incarnation))
            if self._incarnations.get(owner, incarnation) == incarnation:
                return
            logger.warning("the process of pool %s died and was restarted", owner)
            await self._remove_reservations({owner})  # before the new process reserves anything
            if owner not in self:
                return  # the pool has ended meanwhile
            self._note(owner, self[owner], incarnation)
            self._apply([PoolRestartedEvent(owner)])

    def _note(self, owner: str, pool: Pool, incarnation: int) -> None:
        self._by_owner[owner], self._incarnations[owner] = pool, incarnation
        self._journal.note_pool(owner, (pool.handle, incarnation))

    async def _watch(self, owner: str, pool: Pool, seen: bool) -> None:
        """Wait until a pool ends with its calling process, and end its jobs."""
        while True:
            end = asyncio.ensure_future(pool.call(PoolInterface.watched))
            try:
                while not seen and not (await asyncio.wait({end}, timeout=LOOK_AGAIN_S))[0]:
                    seen = await self._look_at(owner, pool)
                await end
            except ActorUnavailableError:
                await asyncio.sleep(LOOK_AGAIN_S)
                seen = await self._look_at(owner, pool)
            except RayError:
                break
        del self._by_owner[owner], self._incarnations[owner]
        self._restarting.pop(owner, None)
        await self._remove_reservations({owner})
        await _forget_incarnations(owner)
        self._apply(ends_with_pool(self._state, owner))
        self._journal.note_pool(owner, None)

    async def _remove_reservations(self, owners: Collection[str]) -> None:
        """Remove the reservations that pools have left. Waiting calls share one look at Ray's table, which is long.

        Callers wait for this, because a restarted pool must not reserve anything before.
        """
        self._left_by |= set(owners)
        async with self._removing:
            try:
                await ask_again(self._remove_left, Exception, within_s=REMOVAL_S, pause_s=REMOVE_AGAIN_S)
            except Exception:
                logger.error("the reservations of pools %s are left, and hold chips until the pools end", self._left_by)
                self._left_by.clear()

    async def _remove_left(self) -> None:
        left_by, self._left_by = self._left_by, set()
        try:
            if left_by:  # else an earlier call has removed them
                await asyncio.to_thread(remove_reservations, left_by)
        except Exception:
            logger.exception("removing the reservations of pools whose processes are gone failed")
            self._left_by |= left_by
            raise

    async def _look_at(self, owner: str, pool: Pool) -> bool:
        """Ask a pool that has not answered for a while for its slices. Return whether it answers now."""
        view = await self._view_of(owner, pool)
        if view is None:
            return False
        try:
            await self.process_is(owner, view.incarnation)
        except SupersededError:  # a newer process has called meanwhile
            return False
        self._apply([SliceHeldEvent(name, owner) for name in view.slices])
        return True

    async def _view_of(self, owner: str, pool: Pool) -> PoolView | None:
        try:
            answer = await pool.ask_once(PoolInterface.reconnect, self._journal.epoch)
            if isinstance(answer, Unreachable):
                return None
            view: PoolView = plain(PoolView, answer, "the report of a pool")
        except InvalidMessageError:
            return None
        except RayError:  # its runtime environment can't be set up again
            logger.exception("pool %s can't come back", owner)
            return None
        return None if view.incarnation < self.incarnation(owner) else view  # None: a dead process has answered


async def _forget_incarnations(owner: str) -> None:
    try:
        await asyncio.to_thread(forget_incarnations, owner)
    except Exception:
        logger.exception("the numbers of the processes of a pool that is gone are left in the store")


def remove_reservations(owners: Iterable[str]) -> None:
    """Remove the placement groups that vanished pools left behind. Their names begin with the owner."""
    prefixes = tuple(map(reservations_of, owners))
    for group_id, name in placement_groups_in_use().items():
        if name.startswith(prefixes):
            remove_placement_group(placement_group_by_id(group_id))


def ends_with_pool(state: ControllerState, owner: str) -> list[Event]:
    """Return the events that follow from the end of a pool: its jobs, their attempts and its slices are over."""
    attempts: defaultdict[str, list[AttemptId]] = defaultdict(list)
    for attempt in state.attempts_of(owner):
        attempts[attempt.job_id].append(attempt)
    events: list[Event] = []
    for job in state.jobs_of(owner):  # job by job, because the state soon forgets ended jobs without attempts
        job_id = job.spec.job_id
        events += [JobCancelledEvent(job_id, POOL_GONE), *map(AttemptEndConfirmedEvent, attempts.pop(job_id, ()))]
    events += [AttemptEndConfirmedEvent(attempt) for of_job in attempts.values() for attempt in of_job]
    events += [SliceReleasedEvent(name, owner) for name, holder in state.holders.items() if holder == owner]
    return events
