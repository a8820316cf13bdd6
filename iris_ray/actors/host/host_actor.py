"""One TPU host: watches and ends the task processes on it, and keeps what they print.

It runs in a process of its own and stays responsive whatever user code does in the task process.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from importlib import import_module

import psutil
import ray
from ray.actor import ActorHandle

from iris_ray.actors.host.chips import Devices, host_devices, wait_until_free
from iris_ray.actors.host.exit_status import how_it_ended
from iris_ray.actors.host.log_files import logs_directory, prune
from iris_ray.actors.host.oom_kills import oom_kills
from iris_ray.actors.host.process_ledger import STACKS_SIGNAL, ProcessLedger, end_task, host_directory
from iris_ray.actors.host.process_tree import ProcessTree, runs_since
from iris_ray.actors.host.task_output import OutputPump
from iris_ray.actors.wire.answers import ChipsHeld
from iris_ray.actors.wire.messages import HostPlace, Progress
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.actors.wire.task_log import LastLines
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, TaskEnd

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 2.0
"""How long a task process whose function has returned may take to run its exit handlers."""
KILL_GRACE_S = 0.5
"""How long Ray may take to end a process before we do; Ray reports a death that it did not cause as a failure."""
SAVED_POLL_S = 0.02
"""How often a task that has had a notice is looked at; its gang moves once all have saved."""
LOOK_S = 1.0
"""How often the children of a task are noted; later ones are found by their process group, or by the task's token."""
LATE_ANSWER_S = 5.0
"""How long after the deadline of a notice whoever asks still waits here; then it asks again, or is gone. More than
clocks of hosts differ."""
ENDED_KEPT = 4
"""Processes that have ended, of which somebody may still want to know how."""


class TPUHostActor:
    """Knows every task process on its host by pid: the one that runs and the standby that waits.

    Args:
        place: which host this is.
        exclusive: whether no other actor has tasks on this host, so that whatever it finds there is left over.
        pool: the SlicePoolManager, which hears the last lines of every task, and that the host is going to go.
    """

    def __init__(self, place: HostPlace, exclusive: bool, pool: ActorHandle) -> None:
        self._place = place
        self._exclusive = exclusive
        self._pool = pool
        self._devices = host_devices() if exclusive else None
        self._ledger = ProcessLedger(host_directory(), exclusive)
        self._processes: dict[int, TaskWatch] = {}
        self._cleared_up: asyncio.Task[str | None] | None = None
        self._metadata: asyncio.Task[None] | None = None

    async def healthy(self) -> bool:
        """Answering is the proof."""
        return True

    async def adopt(self, standby: ActorHandle, pid: int, started: int, token: str) -> ChipsHeld | None:
        """Watch a standby from now on, unless somebody else holds the host's chips.

        Raises:
            RuntimeError: processes that an earlier actor left on this host can't be ended, or the standby has ended.
        """
        done = self._cleared_up is not None and self._cleared_up.done()
        if self._cleared_up is None or (done and (self._cleared_up.exception() or self._cleared_up.result())):
            self._cleared_up = asyncio.ensure_future(self._clear_up())
        held = await asyncio.shield(self._cleared_up)  # once: what is found later is ours
        if held is not None:
            return ChipsHeld(f"{self._name}: {held}", self._place.node_id, held)
        if self._metadata is None and self._exclusive:
            self._metadata = asyncio.create_task(self._watch_metadata())
        for old in [old for old, process in self._processes.items() if process.ended][:-ENDED_KEPT]:
            if (watch := self._processes.get(old)) is not None:
                await asyncio.to_thread(watch.output.close)
            self._ledger.forget(old)
            self._processes.pop(old, None)  # another call may have been faster
        loop = asyncio.get_running_loop()

        def report(last: LastLines) -> None:
            loop.call_soon_threadsafe(self._report, last)

        tree = ProcessTree(pid, started)
        pidfd = opened(tree)
        output = OutputPump(host_directory(), pid, self._place.node_id, report)
        self._processes[pid] = TaskWatch(standby, tree, pidfd, token, self._ledger, self._devices, output)
        return None

    async def how_it_ended(self, pid: int) -> TaskEnd:
        """How a task process ended that did not say so itself; waits for its end."""
        return await self._processes[pid].facts()

    async def stop(self, pid: int, reason: str | None) -> TaskEnd | None:
        """End a task: returns when no process of it is left and the chips are free, with the facts about its end; None
        if somebody holds the chips.

        Args:
            pid: its process.
            reason: why it is stopped if it still runs; None after it returned, to let exit handlers run.

        Raises:
            RuntimeError: some of its processes can't be ended.
        """
        watch = self._processes[pid]
        held = await watch.end(reason)
        if held is not None:
            logger.warning("%s is not used again for now: %s", self._name, held)
            return None
        return await watch.facts()

    async def notify(self, pid: int, notice: Notice) -> bool:
        """Tell a task that it is to move; returns when it has saved its state, or is over.

        Returns:
            Whether it said that it has saved its state.
        """
        return await self._processes[pid].notify(notice)

    async def progress(self, pid: int) -> Progress:
        """How far a task is, as it says itself."""
        return self._processes[pid].progress()

    async def dump_stacks(self, pid: int) -> None:
        """Have a task print what each of its threads is doing."""
        self._processes[pid].dump_stacks()

    async def teardown(self) -> None:
        """End everything on this host before the actor itself is ended."""
        if self._metadata is not None:
            self._metadata.cancel()
        await asyncio.gather(*(watch.end("the slice is released") for watch in self._processes.values()))

    async def _watch_metadata(self) -> None:
        """Pass on what the host's metadata server announces and calls off."""
        await asyncio.to_thread(
            import_module, "iris_ray.actors.host.metadata"
        )  # 0.1 s for aiohttp: not on the event loop
        from iris_ray.actors.host.metadata import MetadataWatch

        node_id = self._place.node_id
        await MetadataWatch(
            tell=lambda notice: self._pool.take_notice.remote(node_id, notice),
            call_off=lambda: self._pool.maintenance_called_off.remote(node_id),
        ).run()

    def _report(self, last: LastLines) -> None:
        self._pool.take_last_lines.remote(last)

    @property
    def _name(self) -> str:
        return f"{self._place.slice_name} host {self._place.host_index}"

    async def _clear_up(self) -> str | None:
        """What earlier tasks left behind is ended; who holds the chips all the same, or None."""
        await asyncio.to_thread(prune, logs_directory(host_directory()), time.time())
        if stubborn := await asyncio.to_thread(self._ledger.end_leftovers):
            why = f"{self._name}: processes of an earlier task can't be ended: {', '.join(stubborn)}"
            if self._exclusive:
                raise RuntimeError(why)
            logger.warning("%s", why)  # they hold no chips, and others may run here
        if self._devices is None:
            return None
        return await asyncio.to_thread(wait_until_free, self._devices, self._ledger)


def opened(tree: ProcessTree) -> int:
    """A pidfd of a tree's first process.

    Raises:
        RuntimeError: it has ended; somebody else may have its pid.
    """
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(tree.pid)
        if runs_since(tree.pid, tree.started):
            return pidfd
        os.close(pidfd)
    raise RuntimeError(f"the process that waited for a task, pid {tree.pid}, has ended before it got one")


class TaskWatch:
    """One task process, from its adoption until the last process of its task is gone.

    Args:
        handle, tree, pidfd, token: the process, and who descends from it.
        ledger: where it is recorded.
        devices: the chips that it has to itself, or None.
        output: what it prints.
    """

    def __init__(
        self,
        handle: ActorHandle,
        tree: ProcessTree,
        pidfd: int,
        token: str,
        ledger: ProcessLedger,
        devices: Devices | None,
        output: OutputPump,
    ) -> None:
        self.output = output
        self._handle = handle
        self._tree = tree
        self._pid = tree.pid
        self._token = token
        self._ledger = ledger
        self._files = TaskFiles.of_process(host_directory(), tree.pid)
        self._devices = devices
        self._exited_at: float | None = None
        self._exited = asyncio.Event()
        self._started = False
        self._told: Notice | None = None
        self._was_signalled = False
        self._answer: asyncio.Task[bool] | None = None
        self._stopped_for: str | None = None
        self._ending: asyncio.Task[str | None] | None = None
        self._how: str | None = None
        self._oom_kills = self._oom_kills_at_end = oom_kills()
        self._learned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gathered: asyncio.Future[list[psutil.Process]] | None = None
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        ledger.record(tree, token)
        self._noting = asyncio.create_task(self._note_family())

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
        if self._oom_kills < self._oom_kills_at_end and self._how in (None, "was killed by SIGKILL"):
            reason = "the task process was killed by the kernel, because the host's memory was used up"
            return TaskEnd(EndKind.OUT_OF_MEMORY, self._exited_at, error=reason)
        return TaskEnd(EndKind.CRASHED, self._exited_at, error=f"the task process {how}")

    async def notify(self, notice: Notice) -> bool:
        """Have the task told, and wait for its answer until the notice's deadline, and a moment longer.

        A notice may replace an earlier one; the same is told once, whoever asks again.
        """
        if self._answer is None or notice != self._told:
            if self._answer is not None:
                self._answer.cancel()
            self._told, self._answer = notice, asyncio.create_task(self._tell(notice))
        answer = self._answer
        await asyncio.wait({answer}, timeout=max(0.0, notice.deadline - time.time()) + LATE_ANSWER_S)
        return answer.done() and not answer.cancelled() and answer.result()

    async def _tell(self, notice: Notice) -> bool:
        content = {"kind": notice.kind.value, "reason": notice.reason, "deadline": notice.deadline}
        unfinished = self._files.notice.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content))
        unfinished.replace(self._files.notice)
        while not self._exited.is_set() and not self._ledger.has_started(self._pid):
            await self._exits_within(SAVED_POLL_S)  # a standby still waits; its handler is not there yet
        if not self._was_signalled:  # its handler may be saving: another signal would start it once more, within itself
            self._was_signalled = True
            self._signal(signal.SIGTERM)
        while not self._exited.is_set() and not self._files.saved.exists():
            await self._exits_within(SAVED_POLL_S)
        return self._files.saved.exists()

    def progress(self) -> Progress:
        saved = self._files.saved.exists()
        try:
            at = self._files.heartbeat.stat().st_mtime
            step = self._files.heartbeat.read_text()
        except FileNotFoundError:
            return Progress(None, None, saved)
        return Progress(time.time() - at, int(step) if step else None, saved)

    def dump_stacks(self) -> None:
        if self._ledger.has_started(self._pid):  # else it would die of it
            self._signal(STACKS_SIGNAL)

    def _signal(self, number: int) -> None:
        """Unless it is over; a pid that somebody else has meanwhile is never hit."""
        with contextlib.suppress(ProcessLookupError):
            if not self._exited.is_set():
                signal.pidfd_send_signal(self._pidfd, number)

    async def end(self, reason: str | None) -> str | None:
        """Make sure that every process of the task is gone. Calling it again waits for the same end.

        Returns:
            Who holds the host's chips after it, or None.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(reason))
        return await asyncio.shield(self._ending)

    async def _end(self, reason: str | None) -> str | None:
        known = await asyncio.to_thread(self._tree.gather)
        if not self._exited.is_set():
            self._stopped_for = reason or "the task had returned"
            if reason is None:
                self._handle.exit.remote()
                await self._exits_within(EXIT_GRACE_S)
            ray.kill(self._handle)
            await self._exits_within(KILL_GRACE_S)
        if self._gathered is not None:  # it has ended; who was its tree then may have started others since
            await self._gathered
            known = await asyncio.to_thread(self._tree.gather)
        left = await asyncio.to_thread(end_task, known, self._token)
        if left:
            raise RuntimeError(f"processes of a task can't be ended: {', '.join(left)}")
        await self._exits_within(KILL_GRACE_S)
        await asyncio.to_thread(self.output.close)
        held = None
        if self._devices is not None and self._ledger.has_started(self._pid):  # others never had the chips
            held = await asyncio.to_thread(wait_until_free, self._devices, self._ledger)
        self._ledger.forget(self._pid)
        return held

    async def _note_family(self) -> None:
        """Know who descends from the task, for when it ends without a word."""
        while not self._exited.is_set():
            if self._ledger.has_started(self._pid):
                with contextlib.suppress(OSError):  # a full disk is no reason to look no more
                    await asyncio.to_thread(self._ledger.note_tree, self._tree, self._token)
            await self._exits_within(LOOK_S)

    async def _exits_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)

    def _on_exit(self) -> None:
        self._exited_at = time.time()
        self._started = self._ledger.has_started(self._pid)
        self._oom_kills_at_end = oom_kills()
        self._gathered = asyncio.ensure_future(asyncio.to_thread(self._tree.gather, just_ended=True))
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
