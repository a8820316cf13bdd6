"""What may be asked of a TPUHostActor: one method for each of its own."""

import time
from collections.abc import Awaitable, Mapping

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import ANSWER_TIMEOUT_S, Unfit, Unreachable, answer
from iris_ray.actors.protocol.messages import Progress, StandbyReady
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import TaskEnd

TEARDOWN_TIMEOUT_S = 15.0


class HostStub:
    """The host behind an actor handle. A host that does not answer in time answers `Unreachable`.

    Args:
        handle: the actor.
        name: what people call the host.
        place: the slice, or the place on a shared host, for whose tasks it is asked.
    """

    def __init__(self, handle: ActorHandle, name: str, place: str) -> None:
        self.name = name
        self._handle = handle
        self._place = place

    def ping(self) -> Awaitable[bool]:
        """Return an awaitable that raises RayError if the actor is gone, and waits for ever if it hangs."""
        pinged: Awaitable[bool] = self._handle.healthy.remote()
        return pinged

    async def healthy(self, timeout_s: float = ANSWER_TIMEOUT_S) -> bool | Unreachable:
        """Ask whether the host is there."""
        there: bool | Unreachable = await answer(self._handle.healthy.remote(), self.name, timeout_s)
        return there

    def silent_peers(self, watch: str) -> Awaitable[tuple[dict[int, str], dict[int, str]] | None]:
        """Return an awaitable as `ping` does: which hosts that this one watches are silent, and which of them may live.

        None if it does not watch them (yet).
        """
        call = self._handle.silent_peers.remote(self._place, watch)
        silent: Awaitable[tuple[dict[int, str], dict[int, str]] | None] = call
        return silent

    def watch_peers(self, watch: str, peers: Mapping[int, "HostStub"], silence_s: float) -> Awaitable[None]:
        """Have the host watch others, instead of those before. Return an awaitable as `ping` does."""
        handles = {i: (peer._handle, peer.name) for i, peer in peers.items()}
        told: Awaitable[None] = self._handle.watch_peers.remote(self._place, watch, handles, silence_s)
        return told

    async def adopt(self, standby: ActorHandle, ready: StandbyReady, timeout_s: float) -> Unreachable | None:
        """Have a standby watched from now on; `Unfit` if the host can't take a task."""
        call = self._handle.adopt.remote(self._place, standby, ready.pid, ready.started, ready.token)
        unfit: Unfit | Unreachable | None = await answer(call, self.name, timeout_s)
        return unfit

    async def how_it_ended(self, pid: int, timeout_s: float | None = ANSWER_TIMEOUT_S) -> TaskEnd | Unreachable:
        """Wait for the end of a task process that did not report it, and return how it ended."""
        end: TaskEnd | Unreachable = await answer(self._handle.how_it_ended.remote(pid), self.name, timeout_s)
        return end

    async def stop(self, pid: int, reason: str | None, exit_grace: float = 0.0) -> TaskEnd | Unreachable | None:
        """End a task, however long that takes; return how it ended, or None if another process then holds the chips."""
        call = self._handle.stop.remote(pid, reason, exit_grace)
        end: TaskEnd | Unreachable | None = await answer(call, self.name, None)
        return end

    async def notify(self, pid: int, notice: Notice) -> bool | Unreachable:
        """Tell a task that it is to move; return whether it says that it has saved its state."""
        call = self._handle.notify.remote(pid, notice, time.time())
        saved: bool | Unreachable = await answer(call, self.name, None)
        return saved

    async def progress(self, pid: int) -> Progress | Unreachable:
        """Return how far a task is."""
        progress: Progress | Unreachable = await answer(self._handle.progress.remote(pid), self.name, ANSWER_TIMEOUT_S)
        return progress

    async def dump_stacks(self, pid: int) -> Unreachable | None:
        """Have a task print what each of its threads is doing."""
        reply: Unreachable | None = await answer(self._handle.dump_stacks.remote(pid), self.name, ANSWER_TIMEOUT_S)
        return reply

    async def job_over(self, job_id: str) -> Unreachable | None:
        """Have what a job has left on the host for its next attempts removed; that may go on after the answer."""
        reply: Unreachable | None = await answer(self._handle.job_over.remote(job_id), self.name, ANSWER_TIMEOUT_S)
        return reply

    async def teardown(self, timeout_s: float | None = TEARDOWN_TIMEOUT_S) -> Unreachable | None:
        """Have every task of the place ended."""
        reply: Unreachable | None = await answer(self._handle.teardown.remote(self._place), self.name, timeout_s)
        return reply
