"""One TPU host: watches and ends the task processes on it, and keeps what they print.

It runs in a process of its own and stays responsive whatever user code does in the task process.
"""

import asyncio
import contextlib
import os
import time

import psutil
import ray
from ray.actor import ActorHandle

from iris_ray.actors.host_processes import ProcessLedger, end_task, family, host_directory
from iris_ray.actors.log_files import logs_directory, prune
from iris_ray.actors.messages import HostPlace
from iris_ray.actors.pidfd import how_it_ended
from iris_ray.actors.task_output import OutputPump
from iris_ray.outcomes import EndKind, TaskEnd
from iris_ray.task_logs import LastLines

EXIT_GRACE_S = 2.0
"""How long a task process whose function has returned may take to run its exit handlers."""
KILL_GRACE_S = 0.5
"""How long Ray may take to end a process before we do; Ray reports a death that it did not cause as a failure."""
ENDED_KEPT = 4
"""Processes that have ended, of which somebody may still want to know how."""


class TPUHostActor:
    """Knows every task process on its host by pid: the one that runs and the standby that waits.

    Args:
        place: which host this is.
        exclusive: whether no other actor has tasks on this host, so that whatever it finds there is left over.
        pool: the SlicePoolManager, which hears the last lines of every task.
    """

    def __init__(self, place: HostPlace, exclusive: bool, pool: ActorHandle) -> None:
        self._place = place
        self._exclusive = exclusive
        self._pool = pool
        self._ledger = ProcessLedger(host_directory(), exclusive)
        self._processes: dict[int, TaskWatch] = {}
        self._cleared_up: asyncio.Task[None] | None = None

    async def healthy(self) -> bool:
        """Answering is the proof."""
        return True

    async def adopt(self, standby: ActorHandle, pid: int, token: str) -> None:
        """Watch a standby from now on.

        Raises:
            RuntimeError: processes that an earlier actor left on this host can't be ended.
        """
        if self._cleared_up is None or (self._cleared_up.done() and self._cleared_up.exception()):
            self._cleared_up = asyncio.ensure_future(self._clear_up())
        await asyncio.shield(self._cleared_up)  # once: what is found later is ours
        for old in [old for old, process in self._processes.items() if process.ended][:-ENDED_KEPT]:
            await asyncio.to_thread(self._processes[old].output.close)
            self._ledger.forget(old)
            del self._processes[old]
        loop = asyncio.get_running_loop()

        def report(last: LastLines) -> None:
            loop.call_soon_threadsafe(self._report, last)

        output = OutputPump(host_directory(), pid, self._place.node_id, report)
        self._processes[pid] = TaskWatch(standby, pid, token, self._ledger, output)

    async def how_it_ended(self, pid: int) -> TaskEnd:
        """How a task process ended that did not say so itself; waits for its end."""
        return await self._processes[pid].facts()

    async def stop(self, pid: int, reason: str | None) -> TaskEnd:
        """End a task: returns when no process of it is left, with the facts about its end.

        Args:
            pid: its process.
            reason: why it is stopped if it still runs; None after it returned, to let exit handlers run.

        Raises:
            RuntimeError: some of its processes can't be ended.
        """
        watch = self._processes[pid]
        await watch.end(reason)
        return await watch.facts()

    async def teardown(self) -> None:
        """End everything on this host before the actor itself is ended."""
        await asyncio.gather(*(watch.end("the slice is released") for watch in self._processes.values()))

    def _report(self, last: LastLines) -> None:
        self._pool.take_last_lines.remote(last)

    async def _clear_up(self) -> None:
        await asyncio.to_thread(prune, logs_directory(host_directory()), time.time())
        stubborn = await asyncio.to_thread(self._ledger.end_leftovers) if self._exclusive else []
        if stubborn:
            raise RuntimeError(
                f"{self._place.slice_name} host {self._place.worker_id}: processes of an earlier task can't be ended:"
                f" {', '.join(stubborn)}"
            )


class TaskWatch:
    """One task process, from its adoption until the last process of its task is gone."""

    def __init__(self, handle: ActorHandle, pid: int, token: str, ledger: ProcessLedger, output: OutputPump) -> None:
        self.output = output
        self._handle = handle
        self._process = psutil.Process(pid)
        self._token = token
        self._ledger = ledger
        self._exited_at: float | None = None
        self._exited = asyncio.Event()
        self._started = False
        self._stopped_for: str | None = None
        self._ending: asyncio.Task[None] | None = None
        self._how: str | None = None
        self._learned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        ledger.record(self._process, token)

    @property
    def ended(self) -> bool:
        return self._exited.is_set()

    async def facts(self) -> TaskEnd:
        """How the process ended; waits for its end."""
        await self._exited.wait()
        await asyncio.shield(self._learned)
        assert self._exited_at is not None
        if self._stopped_for is not None:
            return TaskEnd(EndKind.STOPPED, self._exited_at, error=self._stopped_for)
        how = self._how or "ended without a word"
        if not self._started:
            return TaskEnd(EndKind.NEVER_STARTED, self._exited_at, error=f"the waiting task process {how}")
        return TaskEnd(EndKind.CRASHED, self._exited_at, error=f"the task process {how}")

    async def end(self, reason: str | None) -> None:
        """Make sure that every process of the task is gone. Calling it again waits for the same end."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(reason))
        await asyncio.shield(self._ending)

    async def _end(self, reason: str | None) -> None:
        known = await asyncio.to_thread(family, self._process)
        if not self._exited.is_set():
            self._stopped_for = reason or "the task had returned"
            if reason is None:
                self._handle.exit.remote()
                await self._exits_within(EXIT_GRACE_S)
            ray.kill(self._handle)
            await self._exits_within(KILL_GRACE_S)
        left = await asyncio.to_thread(end_task, known, self._token)
        if left:
            raise RuntimeError(f"processes of a task can't be ended: {', '.join(left)}")
        await self._exits_within(KILL_GRACE_S)
        await asyncio.to_thread(self.output.close)
        self._ledger.forget(self._process.pid)

    async def _exits_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)

    def _on_exit(self) -> None:
        self._exited_at = time.time()
        self._started = self._ledger.has_started(self._process.pid)
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._learned = asyncio.ensure_future(self._learn_how())
        self._exited.set()

    async def _learn_how(self) -> None:
        """The kernel tells how a process ended once its parent has reaped it, a moment after its end."""
        for _ in range(10):
            self._how = how_it_ended(self._pidfd)
            if self._how is not None or self._stopped_for is not None:
                break
            await asyncio.sleep(0.02)
        os.close(self._pidfd)
