"""The actor of one TPU host: it watches and ends the task processes there, and keeps their output.

It runs in a process of its own, so user code in a task process can't keep it from answering.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RuntimeEnvSetupError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.clocks import by_this_clock
from iris_ray.actors.calls.liveness import HOST_UNASKED_S, Contact, HostWatch
from iris_ray.actors.calls.misfit import misfit
from iris_ray.actors.host.actor_task import ActorProcess
from iris_ray.actors.host.announced_end import LOOK_S, announced
from iris_ray.actors.host.chips import Devices, NotFree, host_devices, wait_until_free
from iris_ray.actors.host.directories import LocalDirectories, can_not_start, host_directory
from iris_ray.actors.host.exit_status import WatchedProcess
from iris_ray.actors.host.forked_task import Begin
from iris_ray.actors.host.forks import ZygoteFailed
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.memory_guard import MemoryGuard, rays_threshold
from iris_ray.actors.host.notices import GangPeers
from iris_ray.actors.host.output import OutputPump, TellPool
from iris_ray.actors.host.reaper import start_reaper
from iris_ray.actors.host.services import DeadTask, Host, HostParts, TaskOver, host_parts
from iris_ray.actors.host.task_watch import TaskRunner, TaskWatch
from iris_ray.actors.host.zygotes import Zygotes
from iris_ray.actors.protocol.answers import OtherVersion, SetupFailed, Unfit, Unreachable
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.messages import HostPlace, HostReady, ProcessReady, ProcessStart, Progress, TaskLaunch
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.actors.protocol.services import installed_services
from iris_ray.actors.protocol.version import require_fit, versions_here
from iris_ray.errors import VersionMismatchError
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import AttemptId, TaskAttemptId
from iris_ray.model.membership import Membership
from iris_ray.model.notices import NOTICE_S, HostNotice, Notice
from iris_ray.model.outcomes import EndKind, TaskEnd
from iris_ray.processes.identity import ProcessIdentity
from iris_ray.processes.tree import ProcessTree

logger = logging.getLogger(__name__)

ENDED_KEPT = 64
"""The number of ended processes of a place that the actor remembers, for callers that ask how they ended."""
SERVICES_S = 1.0
"""A task on a shared host begins without services, which start when it has run for this time or has ended."""


class TPUHostActor:
    """Starts, watches and ends the task processes of its host, by pid. See `HostInterface`.

    A task belongs to a place: its slice or, without chips, a place of its own on a host that many tasks share.

    Args:
        place: the host.
        exclusive: whether this actor's tasks have the host to themselves, so that any other task on it is a leftover.
        pool: the SlicePoolManager. It gets the last lines of every task, and the notices of the host.
    """

    def __init__(self, place: HostPlace, exclusive: bool, pool: ActorHandle) -> None:
        self._place = place
        self._name = f"{place.slice_name} host {place.host_index}"
        self._exclusive = exclusive
        self._pool = Actor[PoolInterface](pool)
        self._devices = host_devices() if exclusive else None
        self._background = BackgroundTasks()
        self._watches: dict[int, TaskWatch] = {}
        self._places: dict[int, str] = {}  # the place of each process
        self._announcement: asyncio.Task[None] | None = None
        self._contact = Contact(HOST_UNASKED_S, self._runs_a_task)
        self._starting: dict[str, set[asyncio.Task[HostReady | Unreachable]]] = {}  # processes, by place
        self._fence: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._peers: dict[str, tuple[str, HostWatch]] = {}  # by place
        self._files_address: asyncio.Task[str] | None = None
        self._gangs = GangPeers(lambda pid, notice: self._watches[pid].hear(notice))
        self._zygotes = Zygotes(self._name, lambda: self._ledger)

    @cached_property
    def _ledger(self) -> ProcessLedger:
        """Created at the first use, so that the actor starts even if the disk is full, and can say so."""
        return ProcessLedger(host_directory(), self._exclusive)

    @cached_property
    def _preparation(self) -> "HostPreparation":
        return HostPreparation(self._name, self._ledger, self._devices, self._background)

    @cached_property
    def _services(self) -> HostParts:
        """Started at the first use: the first task or the first call of a service."""
        host = Host(
            self._place,
            self._name,
            self._exclusive,
            host_directory,
            self._devices,
            lambda: self._ledger,
            self._watches,
            self._pool,
            self._goes,
            self._stays,
        )
        parts = host_parts(installed_services(), host)
        for work, what in parts.works():
            self._background.start(work, what)
        return parts

    async def versions(self) -> dict[str, Any]:
        return versions_here()

    async def healthy(self) -> bool:
        self._contact.asked()
        return True

    async def watch_peers(
        self, place: str, watch: str, peers: Mapping[int, tuple[ActorHandle, str]], silence_s: float
    ) -> None:
        self._unwatch_peers(place)
        hosts = {i: Actor[HostInterface](actor, name) for i, (actor, name) in peers.items()}
        self._peers[place] = watch, HostWatch(hosts, place, silence_s)

    async def silent_peers(self, place: str, watch: str) -> tuple[dict[int, str], dict[int, str]] | None:
        self._contact.asked()
        known, peers = self._peers.get(place, (None, None))
        if peers is None or known != watch:
            return None
        peers.asked()
        return peers.detector.silent, peers.detector.hung

    async def start_process(self, start: ProcessStart) -> HostReady | Unreachable:
        starting = asyncio.ensure_future(self._start_on_fit_host(start))
        self._starting.setdefault(start.place, set()).add(starting)
        try:
            await asyncio.wait({starting})
        finally:
            starting.cancel()  # if this call is
            self._starting[start.place].discard(starting)
            if not self._starting[start.place]:
                del self._starting[start.place]
        if starting.cancelled():
            return Unreachable(f"{self._name} was given back while a process started")
        return starting.result()

    async def _start_on_fit_host(self, start: ProcessStart) -> HostReady | Unreachable:
        if not start.process.as_actor:
            self._zygotes.warm_up(start.process, start.actor)  # while the host is prepared
        try:
            not_free = await self._preparation.ensure()
            if not_free is None:
                self._zygotes.may_record()
                return await self._start_process(start)
        except (ZygoteFailed, RuntimeEnvSetupError) as error:
            # Without anything of the user's it is the host, such as one without memory, that can't start a process.
            users = start.process.runtime_env or start.process.preload
            return SetupFailed(f"{self._name}: {error}", ()) if users else Unreachable(f"{self._name}: {error}")
        except VersionMismatchError as error:
            return OtherVersion(str(error), ())
        except OSError as error:
            not_free = NotFree(can_not_start(error))
        return Unfit(f"{self._name}: {not_free.why}", self._place.node_id, not_free.why, not_free.ours)

    async def _start_process(self, start: ProcessStart) -> HostReady | Unreachable:
        process, actor = start.process, start.actor
        who = f"a task's process on {self._name}"
        runner: TaskRunner
        if process.as_actor and actor is not None:
            runner = started = ActorProcess(actor)
            if (why := await misfit(started.versions(), who, 0, None)) is not None:
                return why if isinstance(why, SetupFailed) else SetupFailed(why.reason, ())
            ready = await started.ready()
        else:
            runner, zygote, cluster = await self._zygotes.fork(process, actor)
            try:
                await self._zygotes.record(zygote)
                install = f"install iris_ray {versions_here()['version']} in the environment of the tasks"
                require_fit(zygote.versions, versions_here(), who, install)
                raylet = await self._zygotes.raylet()
                cluster = replace(cluster, placement_group=start.placement_group)
                begin = Begin(self._place.address, start.avoid_ports, host_directory(), raylet, cluster)
                ready = await runner.begin(begin)
                self._guard_memory(raylet)
            except BaseException:
                _dismiss(runner)
                raise
        if ready.error:
            _dismiss(runner)
            return SetupFailed(f"{self._name}: {ready.error}", ())
        try:
            await self._watch(start.place, runner, ready)
        except BaseException:
            _dismiss(runner)
            raise
        return HostReady(ready.pid, ready.ports, await self._where_files_are_served())

    def _guard_memory(self, raylet: Mapping[str, str]) -> None:
        """Begin to watch the memory of this host, with the first forked task."""
        if self._guard is None and (threshold := rays_threshold(raylet)) is not None:
            guard = MemoryGuard(self._name, self._running_forks, threshold)
            self._guard = self._background.repeat(guard.look, f"watching the memory of {self._name}")

    def _running_forks(self) -> list[TaskWatch]:
        return [watch for watch in self._watches.values() if watch.is_fork and watch.runs]

    async def run(self, pid: int, launch: TaskLaunch) -> TaskEnd:
        watch = self._watches[pid]
        self._background.start(self._tell_services(watch, launch.info), f"telling services of the end of pid {pid}")
        end = await watch.run(launch)
        if self._exclusive and end.kind is EndKind.CRASHED:
            dead = DeadTask(pid, watch.processes | {pid}, launch, watch.began_at or time.time())
            end = replace(end, error="; ".join([end.error, *await self._services.died(dead)]))
        return end

    async def _tell_services(self, watch: TaskWatch, info: JobInfo) -> None:
        """Have services run while a task does, and hear of its end. On a shared host, short tasks do without them."""
        if not self._exclusive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SERVICES_S):
                    await watch.over.wait()
        services = self._services
        await watch.over.wait()
        services.note([TaskOver(TaskAttemptId(info.job_id, info.task_index, info.attempt))])

    async def _where_files_are_served(self) -> str:
        """Return the address of the file service; "" on a shared host, which has no job directories."""
        if not self._exclusive:
            return ""
        if self._files_address is None:
            self._files_address = self._background.start(self._services.files_address(), "asking for the file service")
        return await asyncio.shield(self._files_address)

    async def _watch(self, place: str, runner: TaskRunner, ready: ProcessReady) -> None:
        pid = ready.pid
        if self._announcement is None:
            self._announcement = self._background.start(self._watch_announcement(), "looking for an announced end")
        if self._fence is None:
            self._fence = self._background.start(self._end_when_cut_off(), "waiting for the loss of contact")
        await self._forget([pid for pid in self._of_place(place) if self._watches[pid].ended][:-ENDED_KEPT])
        root = ProcessIdentity(pid, ready.started)
        process, tree = WatchedProcess(root), ProcessTree(root, ready.token)
        try:
            output = OutputPump(host_directory(), pid, self._place.node_id, self._pool_caller())
        except OSError:
            process.close()
            raise
        try:
            self._watches[pid] = TaskWatch(
                runner, process, tree, self._ledger, self._devices, output, lambda: self._others_with_chips(pid)
            )
        except Exception:  # the disk may be full
            await asyncio.to_thread(output.close)
            raise
        self._places[pid] = place

    async def stop(self, pid: int, reason: str | None, exit_grace: float = 0.0) -> TaskEnd | None:
        watch = self._watches[pid]
        self._gangs.forget(pid)
        held = await watch.end(reason, exit_grace)
        if held is not None:
            logger.warning("%s takes no further task for now: %s", self._name, held)
            return None
        return await watch.how_it_ended()

    async def notify(self, pid: int, notice: Notice, sent_at: float) -> bool:
        return await self._watches[pid].notify(by_this_clock(notice, sent_at))

    async def meet_gang(self, pid: int, attempt: AttemptId, peers: Sequence[tuple[ActorHandle, str]]) -> None:
        if pid in self._watches:
            self._gangs.meet(pid, attempt, [Actor[HostInterface](actor, name) for actor, name in peers])

    async def hear_notice(self, attempt: AttemptId, notice: Notice, sent_at: float) -> None:
        self._gangs.hear(attempt, by_this_clock(notice, sent_at, exact=True))

    async def hear_membership(self, pid: int, membership: Membership) -> bool:
        watch = self._watches.get(pid)
        return watch is not None and watch.hear_membership(membership)

    async def progress(self, pid: int) -> Progress:
        return self._watches[pid].progress()

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._services.answer(service, method, args, kwargs)

    async def job_over(self, job_id: str) -> None:
        await asyncio.to_thread(LocalDirectories.of_host(host_directory()).remove, job_id)

    async def teardown(self, place: str) -> None:
        for watching in (self._announcement, self._fence) if self._exclusive else ():
            if watching is not None:
                watching.cancel()
        self._unwatch_peers(place)
        if starting := {*self._starting.get(place, ())}:  # nobody would end what they start
            for one in starting:
                one.cancel()
            await asyncio.wait(starting)
        pids = self._of_place(place)
        await asyncio.gather(*(self._watches[pid].end("the slice is released") for pid in pids))
        if not self._exclusive:
            await self._forget(pids)

    def _unwatch_peers(self, place: str) -> None:
        if place in self._peers:
            self._peers.pop(place)[1].stop()

    def _runs_a_task(self) -> bool:
        return any(watch.runs for watch in self._watches.values())

    async def _end_when_cut_off(self) -> None:
        """Exit if the pool no longer calls while a task runs here. The reaper then ends the tasks.

        Use `os._exit`, because Ray's ways to exit would wait for the network.
        """
        while not self._contact.is_lost:
            await self._contact.count()
        logger.error(
            "%s: no call from the pool for %g s, so the tasks here end: the network is broken, or the SlicePoolManager"
            " hangs. The job restarts as soon as its pool notices",
            self._name,
            HOST_UNASKED_S,
        )
        os._exit(1)

    def _others_with_chips(self, pid: int) -> list[TaskWatch]:
        return [watch for other, watch in self._watches.items() if other != pid and watch.has_chips]

    def _of_place(self, place: str) -> list[int]:
        return [pid for pid in self._watches if self._places[pid] == place]

    async def _forget(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if (watch := self._watches.get(pid)) is not None:  # a concurrent call may have removed it
                await asyncio.to_thread(watch.output.close)
                if self._watches.pop(pid, None) is watch:
                    del self._places[pid]
                    self._gangs.forget(pid)
                    watch.forget()

    def _pool_caller(self) -> TellPool:
        """Return a function that calls the pool and returns at once; any thread may call it."""
        loop = asyncio.get_running_loop()

        def tell(method: Callable[..., Any], *args: Any) -> None:
            loop.call_soon_threadsafe(lambda: self._pool.call(method, *args))

        return tell

    def _goes(self, notice: HostNotice) -> None:
        """Tell the pool that this host is to go and, since the pool may hang, the tasks here and their gangs."""
        self._pool.call(PoolInterface.take_notice, self._place.node_id, notice, time.time())
        deadline = time.time() + NOTICE_S if notice.deadline is None else notice.deadline
        name = self._name if self._exclusive else f"host {self._place.address}"
        told = Notice(notice.kind, f"{name}: {notice.reason}", deadline)
        for watch in self._watches.values():
            if watch.runs:
                watch.hear(told)
        self._gangs.spread(told)

    def _stays(self) -> None:
        """Tell the pool that the announced maintenance of this host is called off."""
        self._pool.call(PoolInterface.maintenance_called_off, self._place.node_id)

    async def _watch_announcement(self) -> None:
        """Pass on the announcement of this machine's end, which the hook of a pod, for example, has written."""
        told, node_id = None, self._place.node_id
        while True:
            notice = announced(host_directory(), node_id)
            if notice is not None and notice != told:
                told = notice
                self._goes(notice)
            await asyncio.sleep(LOOK_S)


def _dismiss(runner: TaskRunner) -> None:
    """End a process that is not watched."""
    runner.kill()
    runner.close()


# -- the first task ----------------------------------------------------------------------------------------------------


class HostPreparation:
    """Prepares one host for its first task, once: ends leftovers of earlier tasks, and waits for free chips.

    Tasks that start on it later belong to the current actor.

    Args:
        name: the host's name, for messages.
        ledger: the host's record of task processes.
        devices: the host's chips, if its tasks have them to themselves; else None.
        background: runs the preparation.
    """

    def __init__(self, name: str, ledger: ProcessLedger, devices: Devices | None, background: BackgroundTasks) -> None:
        self._name = name
        self._ledger = ledger
        self._devices = devices
        self._background = background
        self._has_reaper = False
        self._latest: asyncio.Task[NotFree | None] | None = None

    async def ensure(self) -> NotFree | None:
        """Prepare the host, unless that has succeeded before. Concurrent callers wait for one try.

        Returns:
            None once the host is ready, or why its chips are not free.

        Raises:
            RuntimeError: processes of an earlier task can't be ended, and the next task would need their chips.
        """
        if self._latest is None or _has_failed(self._latest):
            self._latest = self._background.start(self._prepare(), f"preparing {self._name}")
        return await asyncio.shield(self._latest)

    async def _prepare(self) -> NotFree | None:
        if left := await asyncio.to_thread(self._ledger.end_leftovers):
            why = f"{self._name}: processes of an earlier task can't be ended: {', '.join(left)}"
            if self._devices is not None:
                raise RuntimeError(why)
            logger.warning("%s", why)  # they hold no chips, and other tasks may run beside them
        await self._start_reaper()
        if self._devices is None:
            return None
        return await asyncio.to_thread(wait_until_free, self._devices, self._ledger)

    async def _start_reaper(self) -> None:
        """Start a reaper that ends the host's tasks if this actor dies."""
        if self._has_reaper:
            return
        try:
            await asyncio.to_thread(start_reaper, host_directory(), self._devices is not None)
            self._has_reaper = True
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("%s: if its driver is killed, daemons of its tasks will live on: %s", self._name, error)


def _has_failed(preparation: "asyncio.Task[NotFree | None]") -> bool:
    return preparation.done() and (preparation.exception() is not None or preparation.result() is not None)
