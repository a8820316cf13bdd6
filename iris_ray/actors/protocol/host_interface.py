"""The interfaces of a host's actors: the TPUHostActor that watches its tasks, and the process of each task."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ray.actor import ActorHandle

from iris_ray.actors.protocol.answers import Unreachable
from iris_ray.actors.protocol.marks import within
from iris_ray.actors.protocol.messages import HostReady, ProcessReady, ProcessStart, Progress, TaskLaunch
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.membership import Membership
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import TaskEnd

TEARDOWN_TIMEOUT_S = 15.0


class HostInterface(Protocol):
    """The methods of a TPUHostActor, for a SliceActor, a pool and other hosts. A task is named by its process's pid."""

    async def versions(self) -> dict[str, Any]:
        """Return `versions_here`. Answer callers of all versions."""

    async def healthy(self) -> bool:
        """Return True. The answer proves that the host and this actor are alive."""

    async def watch_peers(
        self, place: str, watch: str, peers: Mapping[int, tuple[ActorHandle, str]], silence_s: float
    ) -> None:
        """Ping other hosts of a place, on behalf of its SliceActor. End an earlier watch for the place.

        Args:
            place: the place; this host may be in several.
            watch: the id of this watch.
            peers: actors and names of the hosts by index.
            silence_s: as for `HostWatch`.
        """

    async def silent_peers(self, place: str, watch: str) -> tuple[dict[int, str], dict[int, str]] | None:
        """Return the silent and the hung hosts of a watch, as `FailureDetector` has them; None without this watch."""

    @within(None)
    async def start_process(self, start: ProcessStart) -> HostReady | Unreachable:
        """Start a process that waits for a task, and watch it. The first call prepares the host.

        Returns:
            The waiting process; or `Unfit`: the host can't take a task, `SetupFailed` without hosts: it can't set up
            what the user asks for, or another reason why the process did not start.

        Raises:
            RuntimeError: processes that an earlier actor left on this host can't be ended, or the process has ended.
        """

    @within(None)
    async def run(self, pid: int, launch: TaskLaunch) -> TaskEnd:
        """Run a task in a process that waits. Return how it ended, whatever user code does."""

    @within(None)
    async def stop(self, pid: int, reason: str | None, exit_grace: float = 0.0) -> TaskEnd | None:
        """End a task, and wait until all of its processes are gone and the chips are free.

        Args:
            pid: its process.
            reason: why it is stopped if it still runs; None after it returned.
            exit_grace: how long exit handlers may run if it has returned, or has failed; seconds.

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
            sent_at: the time on that clock.

        Returns:
            Whether it has saved its state. The answer comes at the notice's deadline or a few seconds later at most.
        """

    async def meet_gang(self, pid: int, attempt: AttemptId, peers: Sequence[tuple[ActorHandle, str]]) -> None:
        """Note whose task a process runs, so that the hosts of a gang can tell each other's tasks.

        Args:
            pid: the process.
            attempt: of its task.
            peers: actors and names of the hosts to which this host passes notices on.
        """

    async def hear_notice(self, attempt: AttemptId, notice: Notice, sent_at: float) -> None:
        """Tell the tasks of an attempt that they are to move, and pass that on. Return at once.

        Args:
            attempt: if it does not run here, the notice is ignored.
            notice: with its deadline by the sender's clock.
            sent_at: the time on that clock.
        """

    async def hear_membership(self, pid: int, membership: Membership) -> bool:
        """Tell a task which slices of its job run, unless it knows something newer. Return whether it could be told."""

    async def progress(self, pid: int) -> Progress:
        """Return the latest progress of a task."""

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a service, as the Controller's ``serve`` does."""

    async def job_over(self, job_id: str) -> None:
        """Remove a job's directory on this host."""

    @within(TEARDOWN_TIMEOUT_S)
    async def teardown(self, place: str) -> None:
        """End all tasks of a place. If the tasks have the host to themselves, the caller ends this actor next."""


class TaskInterface(Protocol):
    """The methods of a TaskProcess, for its host."""

    def versions(self) -> dict[str, Any]:
        """Return `versions_here`. Answer callers of all versions."""

    def ready(self) -> ProcessReady:
        """Return the process's ids and ports. The ports stay bound until the task starts. An answer proves it waits."""

    def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run the user's function in this thread, unless another process holds this host's chips, or its disk is full.

        Return how the function ended, whatever user code raises. Never return if user code exits after a notice.
        """

    def exit(self) -> None:
        """Run the exit handlers of user code while child processes are still alive, then end the process."""
