"""Watches one task process from its start until the last process of its task is gone."""

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.clocks import Moment
from iris_ray.actors.host.chips import Devices, wait_until_free
from iris_ray.actors.host.directories import host_directory
from iris_ray.actors.host.exit_status import ProcessExit, RecentOomKills, WatchedProcess, diagnose
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.notices import TaskNotices
from iris_ray.actors.host.output import OutputPump
from iris_ray.actors.host.owned import end_owned
from iris_ray.actors.protocol.messages import Progress, Saves, TaskLaunch
from iris_ray.actors.protocol.payloads import with_stored_payload
from iris_ray.actors.protocol.task_files import (
    STATUS_CHARACTERS,
    TaskFiles,
    may_exist,
    write_whole,
)
from iris_ray.model.goodput import MARKS, Marks, StepTime, with_step
from iris_ray.model.membership import Membership
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.model.plain_values import LARGEST_INT
from iris_ray.model.rhythm import Rhythm
from iris_ray.processes.identity import ProcessIdentity, own_memory
from iris_ray.processes.tree import Listing, ProcessTree, end_processes

logger = logging.getLogger(__name__)

DYING_S = 600.0
"""The time for killed processes to end: the kernel needs a minute to free hundreds of GB."""
KILL_GRACE_S = 0.5
"""The time for a process to end before all that it has started is killed."""
LAST_WORD_S = 1.0
"""The time for the answer of a process that has ended: it may be on its way, or Ray may say why it killed it."""
DESCENDANTS_S = 1.0
"""Seconds between two updates of a task's process tree. A process that starts and loses its parent between two updates
is found by its process group or by the task's token."""
EXIT_STATUS_TRIES, EXIT_STATUS_POLL_S = 10, 0.02
"""The kernel tells how a process ended only after its parent has reaped it, a moment after its end."""
ZYGOTE_TELLS_S = 5.0
"""A zygote always tells how its fork ended, even if it is late on a busy host."""


class TaskRunner(Protocol):
    """The way to a task's process: the socket of a fork, or the handle of an actor."""

    is_fork: bool

    @property
    def zygote_ended(self) -> bool:
        """Whether the process has ended because the one that had forked it has."""

    async def run(self, launch: TaskLaunch) -> TaskEnd | None:
        """Have the process run a task. Return how it ended; None if the process is gone without an answer."""

    def let_exit(self) -> None:
        """Have the process run exit handlers and end. Return at once."""

    def kill(self) -> None:
        """End the process, unless a signal does. Return at once."""

    def exit_code(self) -> int | None:
        """Return the exit code of the process, or the negative number of a signal; None if it is not known here.

        A fork's is known unless its zygote hangs.
        """

    def orphans(self) -> list[ProcessIdentity]:
        """Return the processes that tasks of the zygote have started and that have lost their parents; none if that is
        not known here.
        """

    async def left_nothing(self) -> bool:
        """Return whether the process, which has ended, surely has no descendant that runs.

        False if that is not known. Processes that belong to its task in another way may run.
        """

    def close(self) -> None:
        """Note that the process is gone."""


class TaskWatch:
    """One task process of a host.

    Args:
        runner: the way to the process.
        process, tree: the process, and its process tree.
        ledger: records the process.
        devices: the host's chips, if its gang has them to itself; else None.
        output: reads the task's output.
        beside: returns the watches of the processes that may use the same chips.

    Attributes:
        files: those of the process.
        gone: set when no process of the task is left, or none that can be ended.
        over: set once all that belongs to the task has ended, such as its container, or can't be ended.
    """

    def __init__(
        self,
        runner: TaskRunner,
        process: WatchedProcess,
        tree: ProcessTree,
        ledger: ProcessLedger,
        devices: Devices | None,
        output: OutputPump,
        beside: Callable[[], Iterable["TaskWatch"]] = tuple,
    ) -> None:
        self.output = output
        self.gone = asyncio.Event()
        self.over = asyncio.Event()
        self._beside = beside
        self._runner = runner
        self._process = process
        self._tree = tree
        self._ledger = ledger
        self._devices = devices
        self.files = TaskFiles.of_process(host_directory(), tree.pid)
        self._progress = TaskProgress(self.files)
        self._background = BackgroundTasks()
        self._notices = TaskNotices(process, self.files, lambda: self.has_started, self._background)
        self._oom_kills = RecentOomKills()
        self._ended_alone = False  # its function has ended without Ray, so Ray can't have started processes for it
        self._has_failed = False  # user code has raised an error, or called sys.exit; its process waits for its end
        self._stopped_for: str | None = None
        self._killed_for_memory: str | None = None
        self._exit: asyncio.Task[ProcessExit] | None = None
        self._searched_at_exit: asyncio.Task[list[ProcessIdentity]] | None = None
        self._ending: asyncio.Task[str | None] | None = None
        self._hurry = asyncio.Event()
        process.watch(self._on_exit)
        ledger.record(tree)
        self._background.start(self._record_descendants(), f"recording the descendants of pid {tree.pid}")

    @property
    def is_fork(self) -> bool:
        """Whether the process is a fork, which Ray's memory monitor does not know."""
        return self._runner.is_fork

    @property
    def ended(self) -> bool:
        """Whether the task's own process has ended; its descendants may still run."""
        return self._process.ended

    @property
    def has_chips(self) -> bool:
        """Whether user code has begun, so that it may use the chips, and some process of the task is left."""
        return self.has_started and not self.gone.is_set()

    @property
    def runs(self) -> bool:
        """Whether user code runs, and no stop has begun."""
        return not self.ended and self._ending is None and self.has_started

    @property
    def processes(self) -> frozenset[int]:
        """The pids of the task's known processes."""
        return frozenset(process.pid for process in self._tree.known)

    @property
    def began_at(self) -> float | None:
        """When user code began, in seconds since the epoch; None if it has not."""
        return _time_of(self.files.started)

    async def run(self, launch: TaskLaunch) -> TaskEnd:
        """Run a task in the process, and return how it ended, also if the process ends without an answer."""
        answer = asyncio.ensure_future(self._runner.run(launch))
        gone = asyncio.ensure_future(self.how_it_ended())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await asyncio.wait({answer}, timeout=LAST_WORD_S)
            end = answer.result() if answer.done() else None
            if end is None:
                return await gone
            if end.kind is EndKind.OUT_OF_MEMORY and not self.has_started:
                return replace(await gone, error=f"the waiting {end.error.removeprefix('the ')}")
            self._ended_alone = end.never_joined
            self._has_failed = end.kind is not EndKind.RETURNED and self.has_started
            return await asyncio.to_thread(with_stored_payload, end)
        finally:
            answer.cancel()
            gone.cancel()

    async def how_it_ended(self) -> TaskEnd:
        """Wait for the end of the process, and return how it ended."""
        await self._process.wait()
        assert self._exit is not None
        return diagnose(await asyncio.shield(self._exit))

    async def notify(self, notice: Notice) -> bool:
        """Tell the task that it is to move. Return whether it has saved its state, as `TaskNotices.has_saved` does."""
        self._notices.hear(notice)
        return await self._notices.has_saved(notice.deadline)

    def hear(self, notice: Notice) -> None:
        """Tell the task that it is to move, unless it is being ended. Return at once."""
        if not self.ended and self._ending is None:
            self._notices.hear(notice)

    def hear_membership(self, membership: Membership) -> bool:
        """Tell the task which slices of its job run, unless it knows something newer. Return whether it could be told.

        A full disk may have room later.
        """
        known = self.files.read_membership()
        if self.ended or (known is not None and known.epoch >= membership.epoch):
            return True
        try:
            write_whole(self.files.membership, membership.to_json().encode())
        except OSError:
            return False
        return True

    def progress(self) -> Progress:
        return self._progress.read()

    def signal(self, number: int) -> None:
        """Send the process a signal that iris_ray's handlers in it take, if it has them already."""
        if self.has_started:
            self._process.signal(number)

    async def end(self, reason: str | None, exit_grace: float = 0.0) -> str | None:
        """End every process of the task. Later calls wait for that end; a call with a reason cuts its grace short.

        Args:
            reason: why the task is stopped; None if its function has returned.
            exit_grace: how long exit handlers may run after the function has returned or failed; seconds.

        Returns:
            None if the host's chips are free afterwards, or why not, as part of a sentence about the host.

        Raises:
            RuntimeError: some processes of the task can't be ended.
        """
        if reason is not None:
            self._hurry.set()
            self.output.stop_showing()
        if self._ending is None:
            ending = self._end(reason, exit_grace)
            self._ending = self._background.start(ending, f"ending the task of pid {self._tree.pid}")
            self._ending.add_done_callback(lambda _: self.over.set())
        return await asyncio.shield(self._ending)

    def memory(self) -> int:
        """Return the bytes of memory that the known processes of the task do not share with others."""
        return sum(own_memory(process) for process in self._tree.known)

    def kill_for_memory(self, why: str) -> None:
        """End the known processes of the task, because the host has no memory left. Return at once."""
        self._killed_for_memory = why
        for process in self._tree.known:
            process.signal(signal.SIGKILL)

    def forget(self) -> None:
        """Remove the record of the ended process."""
        self._ledger.forget(self._tree)

    def _search(self, just_ended: bool = False, listing: Listing | None = None) -> list[ProcessIdentity]:
        """Return all processes of the task, including those that it has named."""
        self._tree.adopt(self.files.read_members())
        return self._tree.search(just_ended, listing)

    async def _search_at_exit(self, listing: Listing) -> list[ProcessIdentity]:
        """Return the processes of the task that are left. Do without a search if surely none can be.

        A search reads files of all processes of the machine, and costs a short task more than its fork.
        """
        has_others = may_exist(self.files.members) or may_exist(self.files.all_owned)
        if self._ended_alone and not has_others and await self._runner.left_nothing():
            return []
        return await asyncio.to_thread(self._search, just_ended=True, listing=listing)

    async def _end(self, reason: str | None, exit_grace: float) -> str | None:
        had_ended = self.ended
        if not had_ended:
            await asyncio.to_thread(self._tree.update)  # while its descendants still have their parents
            await self._end_process(reason, exit_grace)
        found = [] if self._searched_at_exit is None else await self._searched_at_exit
        if self._searched_at_exit is None or had_ended:  # its descendants may have started others since then
            found = await asyncio.to_thread(self._search, listing=Listing.next())
        left = await asyncio.to_thread(end_processes, found, self._search, DYING_S) if found else []
        self.gone.set()
        if left := left + (await asyncio.to_thread(end_owned, self.files) if may_exist(self.files.all_owned) else []):
            raise RuntimeError(f"processes of a task can't be ended: {', '.join(left)}")
        await self._process.wait_at_most(KILL_GRACE_S)
        await asyncio.to_thread(self.output.close)
        held = None
        if self._devices is not None and self.has_started:  # a task that has not started never had the chips
            await asyncio.gather(*(other.gone.wait() for other in self._beside()))
            await self._end_orphans()
            held = await asyncio.to_thread(wait_until_free, self._devices, self._ledger)
        self.forget()
        return None if held is None else held.why

    async def _end_orphans(self) -> None:
        """End what no search has found: it had left its parent, its session and its environment before any update.

        Call this when no task of the host runs, because an orphan may be any task's.

        Raises:
            RuntimeError: some can't be ended.
        """
        while orphans := self._runner.orphans():
            self._tree.adopt(orphans)
            if left := await asyncio.to_thread(end_processes, orphans, self._search, DYING_S):
                raise RuntimeError(f"processes of a task can't be ended: {', '.join(left)}")

    async def _end_process(self, reason: str | None, exit_grace: float) -> None:
        """End the task's own process: let it exit if the task has returned or failed, then kill it."""
        self._stopped_for = reason or "the task had returned"
        if reason is None:
            await self._let_exit(exit_grace, "returned", self._hurry)
        elif self._has_failed and exit_grace:
            await self._let_exit(exit_grace, "failed", asyncio.Event())
        self._runner.kill()
        await self._process.wait_at_most(KILL_GRACE_S)

    async def _let_exit(self, exit_grace: float, had: str, hurry: asyncio.Event) -> None:
        """Let the process exit by itself, until its grace is over or somebody is in a hurry."""
        self._runner.let_exit()
        waits = [asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(hurry.wait())]
        try:
            await asyncio.wait(waits, timeout=exit_grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self.ended:
            why = "was asked to end" if hurry.is_set() else f"has had {exit_grace:g} s for them"
            logger.warning(
                "pid %d had %s and still ran threads or exit handlers; it %s and is killed", self._tree.pid, had, why
            )

    @property
    def has_started(self) -> bool:
        """Whether user code has begun to run in the process."""
        return self._ledger.has_started(self._tree.pid)

    async def _record_descendants(self) -> None:
        """Keep the record of the task's process tree up to date while its process lives."""
        while not self.ended:
            if self.has_started:
                with contextlib.suppress(OSError):  # a full disk may have room later
                    await asyncio.to_thread(self._ledger.record_descendants, self._tree)
            await self._process.wait_at_most(DESCENDANTS_S)
            if not self.ended:
                self._oom_kills.look()

    def _on_exit(self) -> None:
        at, had_started = Moment.now(), self.has_started
        memory_was_short = self._stopped_for is None and self._oom_kills.found()  # else it does not matter
        search = self._search_at_exit(Listing.next())  # taken now, so that the tasks that end now share a listing
        self._searched_at_exit = self._background.start(search, f"finding the descendants of pid {self._tree.pid}")
        learning = self._learn_exit(at, had_started, memory_was_short)
        self._exit = self._background.start(learning, f"learning how pid {self._tree.pid} ended")

    async def _learn_exit(self, at: float, had_started: bool, memory_was_short: bool) -> ProcessExit:
        """Ask its zygote, or the kernel, how the process ended, unless we stopped it, and close its pidfd."""
        for _ in range(int(ZYGOTE_TELLS_S / EXIT_STATUS_POLL_S) if self.is_fork else EXIT_STATUS_TRIES):
            code = self._runner.exit_code() if self.is_fork else self._process.exit_code()
            if code is not None or self._stopped_for is not None:
                break
            await asyncio.sleep(EXIT_STATUS_POLL_S)
        zygote_ended = self._runner.zygote_ended
        self._process.close()
        self._runner.close()
        return ProcessExit(
            at, had_started, memory_was_short, code, self._stopped_for, self._killed_for_memory, zygote_ended
        )


# -- progress ----------------------------------------------------------------------------------------------------------


class TaskProgress:
    """Reads a task's heartbeats, status and marks from its files. A faulty disk or odd content never raises."""

    def __init__(self, files: TaskFiles) -> None:
        self._files = files
        self._signs: set[float] = set()  # the times of the files that are signs of life, by the wall clock
        self._beat_at = self._looked_at = time.monotonic()

    def read(self) -> Progress:
        files = self._files
        saved, status = os.path.exists(files.saved), files.read_status()
        beat_at = _time_of(files.heartbeat)
        step = None if beat_at is None else _step_in(_text_of(files.heartbeat))
        marks = _marks(files, step, beat_at)
        signs = {one for one in (beat_at, _time_of(files.rhythm)) if beat_at is not None and one is not None}
        rhythm, saves = _rhythm(_text_of(files.rhythm)), _saves(files)
        return Progress(self._age_of(signs), step, saved, status, marks, rhythm, saves)

    def _age_of(self, signs: set[float]) -> float | None:
        """Return the seconds since the latest sign of life, even if the wall clock was set since.

        So a sign counts if it was not there before: after the clock was set back, it is not the latest by its time.
        """
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if not signs:
            return None
        if new := signs - self._signs:
            age = min(max(0.0, time.time() - max(new)), now - before)  # the look before did not see it
            self._signs, self._beat_at = signs, now - age
        return now - self._beat_at


def _marks(files: TaskFiles, step: int | None, beat_at: float | None) -> Marks:
    began = _time_of(files.started)
    if began is None:
        return Marks()
    steps: tuple[StepTime, ...] = ()
    for line in _text_of(files.first_steps).splitlines():
        first, _, at = line.partition(" ")
        if len(steps) < 2 and (number := _step_in(first)) is not None and (time_s := _number(at)) is not None:
            steps = with_step(steps, number, max(0.0, time_s - began))
    if step is not None and beat_at is not None:
        steps = with_step(steps, step, max(0.0, beat_at - began))
    return Marks(steps, *_marked(_text_of(files.marked)))


def _marked(text: str) -> tuple[dict[str, float], dict[str, float]]:
    try:
        before, during = (
            {
                name: number
                for name, seconds in part.items()
                if name in MARKS and (number := _number(seconds)) is not None
            }
            for part in json.loads(text)
        )
    except (ValueError, TypeError, AttributeError):
        return {}, {}
    return before, during


def _saves(files: TaskFiles) -> Saves:
    heeds, saved_at = os.path.exists(files.asks), _time_of(files.last_save)
    if saved_at is None:
        return Saves(heeds_notices=heeds)
    every_s = _number(_text_of(files.last_save))
    return Saves(max(0.0, time.time() - saved_at), every_s if every_s and every_s > 0 else None, heeds)


def _rhythm(text: str) -> Rhythm:
    try:
        said = json.loads(text)
        pauses = {str(what): number for what, seconds in said["pauses"].items() if (number := _number(seconds))}
        pause = None if said["pause"] is None else str(said["pause"])[:STATUS_CHARACTERS]
        return Rhythm(_step_in(said["steps"]) or 0, _number(said["longest_s"]) or 0.0, pause, pauses)
    except (ValueError, TypeError, AttributeError, KeyError):
        return Rhythm()


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _step_in(text: Any) -> int | None:
    number = _number(text)
    return int(number) if number is not None and abs(number) < LARGEST_INT else None


def _number(said: Any) -> float | None:
    try:
        number = float(said)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
