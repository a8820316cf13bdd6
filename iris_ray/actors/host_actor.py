"""One TPU host: starts, watches and ends the task processes on it.

It runs in a process of its own and stays responsive whatever user code does in the task process.
"""

import asyncio
import os
import random
import socket
import time

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from iris_ray.actors.host_processes import ProcessLedger, end_task, host_directory
from iris_ray.actors.messages import HostPlace, TaskLaunch
from iris_ray.actors.pidfd import how_it_ended
from iris_ray.outcomes import EndKind, TaskEnd

# Below Linux' default ephemeral range (32768 and up), where an outgoing connection may take a port at any moment, and
# above Ray's default worker ports (10002-19999).
_PORTS = range(20_000, 32_768)

EXIT_GRACE_S = 2.0
"""How long a task process whose function has returned may take to run its exit handlers."""


class TPUHostActor:
    """Carries out one task at a time on its host, each in a process of its own.

    Args:
        place: which host this is.
        standby: the task process that will run the next task.
    """

    def __init__(self, place: HostPlace, standby: ActorHandle) -> None:
        self._place = place
        self._ledger = ProcessLedger(host_directory())
        self._standby: Standby | None = Standby(standby)
        self._running: RunningTask | None = None

    async def healthy(self) -> bool:
        """Answering is the proof."""
        return True

    async def adopt_standby(self, standby: ActorHandle) -> None:
        """Take this process for the next task."""
        self._standby = Standby(standby)

    async def prepare(self, ports: int, avoid: frozenset[int]) -> tuple[int, ...]:
        """Wait until a task could start at once: the last one's processes are gone and a standby answers.

        Args:
            ports: how many free TCP ports of this host to find.
            avoid: ports that must not be among them.

        Raises:
            RuntimeError: processes of an earlier task can't be ended, or there is no standby.
        """
        if self._running is not None:
            await self._running.end(None)
            self._running = None
        if self._standby is None:
            raise RuntimeError(f"{self._place.slice_name} host {self._place.worker_id} has no standby")
        own = await self._standby.ready()
        stubborn = await asyncio.to_thread(self._ledger.end_leftovers, own.pid)
        if stubborn:
            raise RuntimeError(
                f"{self._place.slice_name} host {self._place.worker_id}: an earlier task's processes can't be ended:"
                f" {', '.join(stubborn)}"
            )
        return free_ports(self._place.address, ports, avoid)

    async def run_remote_fn(self, launch: TaskLaunch) -> TaskEnd:
        """Run one task in the standby; returns when it ended, however it ended."""
        assert self._standby is not None, "prepare() comes first"
        standby, self._standby = self._standby, None
        self._ledger.record(await standby.ready(), launch.info.task_id)
        self._running = RunningTask(standby, launch, self._ledger)
        return await self._running.wait()

    async def stop(self, reason: str | None) -> TaskEnd | None:
        """End the current task, if any, and wait until no process of it is left; returns how it ended.

        Args:
            reason: why it is stopped if it still runs; None after it returned, to let exit handlers run.
        """
        if self._running is None:
            return None
        end = await self._running.end(reason)
        self._running = None
        return end

    async def teardown(self) -> None:
        """End everything on this host before the actor itself is ended."""
        await self.stop("the slice is released")
        if self._standby is not None:
            ray.kill(self._standby.handle)


class Standby:
    """A task process that waits."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self._process: psutil.Process | None = None

    async def ready(self) -> psutil.Process:
        """The process, once it has started."""
        if self._process is None:
            self._process = psutil.Process(await self.handle.pid.remote())
        return self._process


class RunningTask:
    """One task from its start until the last of its processes is gone."""

    def __init__(self, standby: Standby, launch: TaskLaunch, ledger: ProcessLedger) -> None:
        assert standby._process is not None
        self._handle = standby.handle
        self._process = standby._process
        self._task_id = launch.info.task_id
        self._ledger = ledger
        self._stopped_for: str | None = None
        self._exited_at: float | None = None
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        # A task of its own: cancelling the caller must not lose track of the process.
        self._end = asyncio.create_task(self._watch(launch))
        self._gone: asyncio.Task[None] | None = None

    async def wait(self) -> TaskEnd:
        return await asyncio.shield(self._end)

    async def end(self, reason: str | None) -> TaskEnd:
        """Make sure that every process of the task is gone. Calling it again waits for the same end."""
        if self._gone is None:
            self._gone = asyncio.create_task(self._end_processes(reason))
        await asyncio.shield(self._gone)
        return await self.wait()

    async def _watch(self, launch: TaskLaunch) -> TaskEnd:
        try:
            end: TaskEnd = await self._handle.run.remote(launch)
            return end
        except RayTaskError as error:  # what the process sent can't be read here
            return TaskEnd(EndKind.RAISED, time.time(), None, str(error.cause), str(error))
        except RayActorError:
            pass
        if self._exited_at is None:  # Ray may notice a little before the pidfd does
            await asyncio.sleep(0.05)
        ended_at = self._exited_at or time.time()
        if self._stopped_for is not None:
            return TaskEnd(EndKind.STOPPED, ended_at, error=self._stopped_for)
        how = how_it_ended(self._pidfd) or "ended without a word"
        return TaskEnd(EndKind.CRASHED, ended_at, error=f"the task process {how}")

    def _on_exit(self) -> None:
        self._exited_at = time.time()
        asyncio.get_running_loop().remove_reader(self._pidfd)

    async def _end_processes(self, reason: str | None) -> None:
        if not self._end.done():
            self._stopped_for = reason or "stopped"
        elif self._exited_at is None and reason is None:
            self._handle.exit.remote()
            for _ in range(int(EXIT_GRACE_S / 0.02)):
                if self._exited_at is not None:
                    break
                await asyncio.sleep(0.02)
        ray.kill(self._handle)
        left = await asyncio.to_thread(end_task, self._process, self._task_id)
        await self.wait()
        if not left:
            self._ledger.forget(self._process.pid)
        if self._exited_at is None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)


def free_ports(address: str, count: int, avoid: frozenset[int]) -> tuple[int, ...]:
    """TCP ports that nothing on this host listens on right now."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        if port in avoid or port in found:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        found.append(port)
    return tuple(found)
