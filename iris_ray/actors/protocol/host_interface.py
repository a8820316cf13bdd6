"""What the actors of a host may be asked: the TPUHostActor that watches its tasks, and the process of each task."""

from collections.abc import Mapping
from typing import Protocol

from ray.actor import ActorHandle

from iris_ray.actors.protocol.answers import Unfit
from iris_ray.actors.protocol.marks import within
from iris_ray.actors.protocol.messages import Progress, StandbyReady, TaskLaunch
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import TaskEnd

TEARDOWN_TIMEOUT_S = 15.0


class HostInterface(Protocol):
    """What a SliceActor, a pool and other hosts ask a TPUHostActor. A task is named by the pid of its process."""

    async def healthy(self) -> bool:
        """Return True: an answer proves that the host and this actor are alive."""

    async def watch_peers(
        self, place: str, watch: str, peers: Mapping[int, tuple[ActorHandle, str]], silence_s: float
    ) -> None:
        """Ask other hosts of a place whether they are there, on behalf of its SliceActor.

        Args:
            place: which; this host may be in several.
            watch: names this watch; the one before for this place ends.
            peers: actors and names of the hosts by index.
            silence_s: as for `HostWatch`.
        """

    async def silent_peers(self, place: str, watch: str) -> tuple[dict[int, str], dict[int, str]] | None:
        """Return which hosts that this one watches are silent, and which of them may live; None if it does not."""

    async def adopt(self, place: str, standby: ActorHandle, pid: int, started: int, token: str) -> Unfit | None:
        """Watch a standby from now on. The first call prepares the host.

        Args:
            place: whose task it will run.
            standby: its actor.
            pid, started: its process and the start of that in clock ticks since boot.
            token: the token that processes of its task will carry.

        Returns:
            Why the host can't take a task, so that the standby is not adopted; None if it is.

        Raises:
            RuntimeError: processes that an earlier actor left on this host can't be ended, or the standby has ended.
        """

    async def how_it_ended(self, pid: int) -> TaskEnd:
        """Wait for the end of a task process, and return how it ended. For processes that did not report it."""

    @within(None)
    async def stop(self, pid: int, reason: str | None, exit_grace: float = 0.0) -> TaskEnd | None:
        """End a task, and wait until no process of it is left and the chips are free.

        Args:
            pid: its process.
            reason: why it is stopped if it still runs; None after it returned, so that exit handlers may run.
            exit_grace: how long they may; seconds.

        Returns:
            How the task ended; None if another process holds the chips.

        Raises:
            RuntimeError: some of its processes can't be ended.
        """

    @within(None)
    async def notify(self, pid: int, notice: Notice, sent_at: float) -> bool:
        """Tell a task that it is to move, and wait until it has saved its state or has ended.

        Args:
            pid: its process.
            notice: with its deadline by the sender's clock.
            sent_at: what that clock says.

        Returns:
            Whether it has saved its state. The answer comes at the notice's deadline or a few seconds later at most.
        """

    async def progress(self, pid: int) -> Progress:
        """Return what a task has last said about its progress."""

    async def dump_stacks(self, pid: int) -> None:
        """Have a task print what each of its threads is doing."""

    async def job_over(self, job_id: str) -> None:
        """Remove what a job has left in its directory on this host."""

    @within(TEARDOWN_TIMEOUT_S)
    async def teardown(self, place: str) -> None:
        """End all tasks of a place; if the actor's tasks have the host to themselves, it is ended next."""


class TaskInterface(Protocol):
    """What a SliceActor, a pool and the host ask a TaskProcess."""

    def ready(self) -> StandbyReady:
        """Return what identifies the process: an answer proves that it waits. Its ports stay bound until it starts."""

    def end_leftovers(self, exclusive: bool) -> None:
        """End the task that ran here before, in place of its TPUHostActor, which is gone.

        Args:
            exclusive: whether that task had the host to itself.

        Raises:
            RuntimeError: some of its processes can't be ended.
        """

    def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run the user's function in this thread, unless another process holds this host's chips, or its disk is full.

        Returns how the function ended, whatever user code raises. Does not return if user code exits after a notice.
        """

    def exit(self) -> None:
        """End the process in good order: exit handlers of user code run, and find its child processes alive."""
