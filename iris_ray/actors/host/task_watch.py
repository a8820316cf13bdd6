"""Watches one task process from its adoption until the last process of its task is gone."""

import asyncio
import contextlib
import logging

import psutil
import ray
from ray.actor import ActorHandle

from iris_ray.actors.calls.actor import Actor
from iris_ray.actors.host.chip_release import wait_until_free
from iris_ray.actors.host.chips import Devices
from iris_ray.actors.host.containers.record import end_container
from iris_ray.actors.host.directories.host_directory import host_directory
from iris_ray.actors.host.exits.diagnosis import ProcessExit, diagnose
from iris_ray.actors.host.exits.oom_kills import RecentOomKills
from iris_ray.actors.host.output.pump import OutputPump
from iris_ray.actors.host.processes.end_task import end_task
from iris_ray.actors.host.processes.ledger import ProcessLedger
from iris_ray.actors.host.processes.tree import ProcessTree
from iris_ray.actors.host.processes.watched_process import WatchedProcess
from iris_ray.actors.host.task_notices import TaskNotices
from iris_ray.actors.host.task_progress import TaskProgress
from iris_ray.actors.host.task_signals import STACKS_SIGNAL
from iris_ray.actors.protocol.host_interface import TaskInterface
from iris_ray.actors.wire.background import BackgroundTasks
from iris_ray.actors.wire.clocks import Moment
from iris_ray.actors.wire.messages import Progress
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import TaskEnd

logger = logging.getLogger(__name__)

DYING_S = 600.0
"""How long processes may take to end once they are killed: to give back hundreds of GB takes the kernel a minute."""
KILL_GRACE_S = 0.5
"""How long Ray may take to end a process before we do; Ray reports a death that it did not cause as a failure."""
DESCENDANTS_S = 1.0
"""Seconds between two updates of a task's process tree. Processes that are started and lose their parent between two
updates are found by their process group or by the task's token."""
EXIT_STATUS_TRIES, EXIT_STATUS_POLL_S = 10, 0.02
"""The kernel tells how a process ended only after its parent has reaped it, a moment after its end."""


class TaskWatch:
    """One task process of a host.

    Args:
        standby: the actor that runs in the process.
        process, tree: the process, and its process tree.
        ledger: records the process.
        devices: the host's chips, if the task has them to itself; otherwise None.
        output: reads what the task prints.
    """

    def __init__(
        self,
        standby: ActorHandle,
        process: WatchedProcess,
        tree: ProcessTree,
        ledger: ProcessLedger,
        devices: Devices | None,
        output: OutputPump,
    ) -> None:
        self.output = output
        self._standby = standby
        self._process = process
        self._tree = tree
        self._ledger = ledger
        self._devices = devices
        self._files = TaskFiles.of_process(host_directory(), tree.pid)
        self._progress = TaskProgress(self._files)
        self._background = BackgroundTasks()
        self._notices = TaskNotices(process, self._files, self._has_started, self._background)
        self._oom_kills = RecentOomKills()
        self._stopped_for: str | None = None
        self._exit: asyncio.Task[ProcessExit] | None = None
        self._searched_at_exit: asyncio.Task[list[psutil.Process]] | None = None
        self._ending: asyncio.Task[str | None] | None = None
        self._hurry = asyncio.Event()
        process.watch(self._on_exit)
        ledger.record(tree)
        self._background.start(self._record_descendants(), f"recording the descendants of pid {tree.pid}")

    @property
    def ended(self) -> bool:
        """Whether the task's own process has ended; its descendants may still run."""
        return self._process.ended

    @property
    def runs(self) -> bool:
        """Whether user code runs, and no stop has begun."""
        return not self.ended and self._ending is None and self._has_started()

    async def how_it_ended(self) -> TaskEnd:
        """Wait for the end of the process, and return how it ended."""
        await self._process.wait()
        assert self._exit is not None
        return diagnose(await asyncio.shield(self._exit))

    async def notify(self, notice: Notice) -> bool:
        """Tell the task that it is to move; return whether it has saved its state, as `TaskNotices.deliver` does."""
        return await self._notices.deliver(notice)

    def progress(self) -> Progress:
        """Return what the task has last said about its progress."""
        return self._progress.read()

    def dump_stacks(self) -> None:
        """Have the process print the stacks of its threads, once it has a handler for that signal."""
        if self._has_started():
            self._process.signal(STACKS_SIGNAL)

    async def end(self, reason: str | None, exit_grace: float = 0.0) -> str | None:
        """End every process of the task. Later calls wait for the same end; one with a reason cuts its grace short.

        Args:
            reason: why the task is stopped; None if its function has returned, so that exit handlers may run.
            exit_grace: how long they may; seconds.

        Returns:
            Which process holds the host's chips afterwards, as part of a sentence about the host; None if none does.

        Raises:
            RuntimeError: some processes of the task can't be ended.
        """
        if reason is not None:
            self._hurry.set()
            self.output.stop_showing()
        if self._ending is None:
            ending = self._end(reason, exit_grace)
            self._ending = self._background.start(ending, f"ending the task of pid {self._tree.pid}")
        return await asyncio.shield(self._ending)

    def forget(self) -> None:
        """Remove the record of the process, which has ended."""
        self._ledger.forget(self._tree)

    def _search(self, just_ended: bool = False) -> list[psutil.Process]:
        """Return all processes of the task, those included that it has named."""
        self._tree.adopt(self._files.read_members())
        return self._tree.search(just_ended)

    async def _end(self, reason: str | None, exit_grace: float) -> str | None:
        had_ended = self.ended
        if not had_ended:
            await asyncio.to_thread(self._tree.update)  # while its descendants can be told by their parents
            await self._end_standby(reason, exit_grace)
        if self._searched_at_exit is None or had_ended:  # its descendants may have started others since
            found = await asyncio.to_thread(self._search)
        else:
            found = await self._searched_at_exit
        left = await asyncio.to_thread(end_task, found, self._search, DYING_S)
        if left := left + await asyncio.to_thread(end_container, self._files):
            raise RuntimeError(f"processes of a task can't be ended: {', '.join(left)}")
        await self._process.wait_at_most(KILL_GRACE_S)
        await asyncio.to_thread(self.output.close)
        held = None
        if self._devices is not None and self._has_started():  # a task that has not started never had the chips
            held = await asyncio.to_thread(wait_until_free, self._devices, self._ledger)
        self.forget()
        return None if held is None else held.why

    async def _end_standby(self, reason: str | None, exit_grace: float) -> None:
        """Have Ray end the task's own process: by itself if the task has returned, then by force."""
        self._stopped_for = reason or "the task had returned"
        if reason is None:
            await self._let_exit(exit_grace)
        ray.kill(self._standby)
        await self._process.wait_at_most(KILL_GRACE_S)

    async def _let_exit(self, exit_grace: float) -> None:
        """Have the process end by itself, for so many seconds at most, or until somebody is in a hurry."""
        Actor[TaskInterface](self._standby).call(TaskInterface.exit)
        waits = [asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(self._hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=exit_grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.ended:
            why = "was asked to end" if self._hurry.is_set() else f"has had its exit_grace of {exit_grace:g} s"
            logger.warning(
                "pid %d had returned and still ran threads or exit handlers; it %s and is killed", self._tree.pid, why
            )

    def _has_started(self) -> bool:
        return self._ledger.has_started(self._tree.pid)

    async def _record_descendants(self) -> None:
        """Keep the record of the task's process tree up to date while its process lives."""
        while not self.ended:
            self._oom_kills.look()
            if self._has_started():
                with contextlib.suppress(OSError):  # the disk may be full now and have room later
                    await asyncio.to_thread(self._ledger.record_descendants, self._tree)
            await self._process.wait_at_most(DESCENDANTS_S)

    def _on_exit(self) -> None:
        at, had_started, memory_was_short = Moment.now(), self._has_started(), self._oom_kills.found()
        search = asyncio.to_thread(self._search, just_ended=True)
        self._searched_at_exit = self._background.start(search, f"finding the descendants of pid {self._tree.pid}")
        learning = self._learn_exit(at, had_started, memory_was_short)
        self._exit = self._background.start(learning, f"learning how pid {self._tree.pid} ended")

    async def _learn_exit(self, at: float, had_started: bool, memory_was_short: bool) -> ProcessExit:
        """Ask the kernel how the process ended, unless we stopped it, and close its pidfd."""
        for _ in range(EXIT_STATUS_TRIES):
            code = self._process.exit_code()
            if code is not None or self._stopped_for is not None:
                break
            await asyncio.sleep(EXIT_STATUS_POLL_S)
        self._process.close()
        return ProcessExit(at, had_started, memory_was_short, code, self._stopped_for)
