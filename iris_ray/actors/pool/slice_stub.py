"""What may be asked of a SliceActor: one method for each of its own."""

import time
from collections.abc import Awaitable, Sequence

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Unreachable, answer
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.messages import Progress, SliceReady, TaskLaunch
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import TaskEnd

TEARDOWN_TIMEOUT_S = 20.0


class SliceStub:
    """A slice that does not answer in time answers `Unreachable`.

    Args:
        actor: speaks for it: an object of this process, or what `remote_methods` makes of an actor.
        name: the slice's name.
    """

    def __init__(self, actor: SliceActor, name: str) -> None:
        self._actor = actor
        self._name = f"slice {name}"

    def ping(self) -> Awaitable[None]:
        """Return an awaitable that raises RayError if the actor is gone, and waits for ever if it hangs."""
        return self._actor.ping()

    async def healthy(self, patience_s: float, timeout_s: float) -> dict[int, Unreachable | None] | Unreachable:
        """Return why each host counts as lost; None for those that answer.

        Args:
            patience_s: how long each host may take to answer; seconds.
            timeout_s: how long the SliceActor may take; seconds.
        """
        call = self._actor.healthy(patience_s)
        hosts: dict[int, Unreachable | None] | Unreachable = await answer(call, self._name, timeout_s)
        return hosts

    async def prepare(
        self, generation: int, standbys: Sequence[ActorHandle], timeout_s: float
    ) -> SliceReady | Unreachable:
        """Hand over the standbys of an attempt to come; return once all have started."""
        call = self._actor.prepare(generation, standbys, timeout_s)
        ready: SliceReady | Unreachable = await answer(call, self._name, timeout_s + ANSWER_TIMEOUT_S)
        return ready

    async def run_remote_fn(
        self, attempt: AttemptId, generation: int, launches: Sequence[TaskLaunch], silence_s: float
    ) -> dict[int, TaskEnd | None] | Unreachable:
        """Start a task on every host; return when all have returned, or at the first other end."""
        call = self._actor.run_remote_fn(attempt, generation, launches, silence_s)
        ends: dict[int, TaskEnd | None] | Unreachable = await answer(call, self._name, None)
        return ends

    async def stop(
        self, attempt: AttemptId, reason: str | None, exit_grace: float = 0.0
    ) -> dict[int, TaskEnd | None] | Unreachable:
        """End every task of an attempt, however long that takes.

        Returns:
            How each ended; None where its host can't say that it has.
        """
        call = self._actor.stop(attempt, reason, exit_grace)
        ends: dict[int, TaskEnd | None] | Unreachable = await answer(call, self._name, None)
        return ends

    async def notify(self, attempt: AttemptId, notice: Notice, patience_s: float) -> tuple[bool, bool] | Unreachable:
        """Tell every task that it is to move; return whether all have saved or returned, and whether any waits."""
        call = self._actor.notify(attempt, notice, time.time())
        saved: tuple[bool, bool] | Unreachable = await answer(call, self._name, patience_s)
        return saved

    async def progress(self, attempt: AttemptId) -> dict[int, Progress | Unreachable] | Unreachable:
        """Return how far every task is that has not returned."""
        call = self._actor.progress(attempt)
        progress: dict[int, Progress | Unreachable] | Unreachable = await answer(call, self._name, ANSWER_TIMEOUT_S)
        return progress

    async def last_progress(self, attempt: AttemptId, host: int) -> Progress | Unreachable | None:
        """Return what a task has said, even if it has ended; None if it is not known any more."""
        call = self._actor.last_progress(attempt, host)
        progress: Progress | Unreachable | None = await answer(call, self._name, ANSWER_TIMEOUT_S)
        return progress

    async def dump_stacks(self, attempt: AttemptId) -> Unreachable | None:
        """Have every task print what it is doing."""
        call = self._actor.dump_stacks(attempt)
        reply: Unreachable | None = await answer(call, self._name, ANSWER_TIMEOUT_S)
        return reply

    async def teardown(self) -> Unreachable | None:
        """Have everything on the slice ended."""
        reply: Unreachable | None = await answer(self._actor.teardown(), self._name, TEARDOWN_TIMEOUT_S)
        return reply
