"""The actor of one TPU slice. It asks all its hosts, so that the pool asks one actor per slice, not one per host.

For tasks without chips, and for a slice of few hosts, it is an object in the pool's process instead of an actor.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.actor import ActorHandle

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.clocks import Moment, by_this_clock
from iris_ray.actors.calls.liveness import FailureDetector, HostWatch, SharedWatches, WatchUse, answers_unless_silent
from iris_ray.actors.calls.misfit import misfit
from iris_ray.actors.protocol.answers import OtherVersion, SetupFailed, Unreachable
from iris_ray.actors.protocol.host_interface import HostInterface
from iris_ray.actors.protocol.marks import within
from iris_ray.actors.protocol.messages import (
    HOST_SILENCE_S,
    HostReady,
    ProcessSpec,
    ProcessStart,
    Progress,
    SliceReady,
    TaskLaunch,
)
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.membership import Membership
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, TaskEnd

logger = logging.getLogger(__name__)

ANSWER_S = 1.0
"""The time to answer for tasks that are asked after the deadline whether they have saved."""
TEARDOWN_TIMEOUT_S = 20.0
REASONS_NAMED = 4
"""The number of hosts for which a failed start gives the reason: there may be hundreds, and logs repeat it."""


@dataclass(slots=True)
class HostTask:
    """One process of the current attempt: a host's task, or a part of it."""

    host: int
    pid: int
    end: "asyncio.Task[TaskEnd | None]"

    def known_end(self) -> TaskEnd | None:
        """Return its end if it has ended and is known."""
        return self.end.result() if self.end.done() and not self.end.cancelled() else None


class SliceActor:
    """The hosts of one slice, by host index.

    Args:
        name: the slice's name.
        hosts: its TPUHostActors by host index.
        fitting: the hosts whose TPUHostActor is known to have an iris_ray that fits this one.
        shared: watches the only host, for this place and others.
    """

    def __init__(
        self,
        name: str,
        hosts: Sequence[ActorHandle],
        fitting: Collection[int] = (),
        shared: SharedWatches | None = None,
    ) -> None:
        self._name = name
        self._hosts = {i: Actor[HostInterface](handle, f"{name} host {i}") for i, handle in enumerate(hosts)}
        self._fitting = set(fitting)
        self._waiting: dict[int, list[int]] = {}  # the pids of a generation, by process of the slice
        self._unwanted: set[int] = set()  # generations
        self._running: AttemptId | None = None
        self._refused: tuple[AttemptId, str] | None = None  # an attempt that was stopped before it came, and why
        self._tasks: dict[int, HostTask] = {}  # by process of the slice
        self._stopping: dict[AttemptId, dict[int, HostTask]] = {}
        self._silence_s = HOST_SILENCE_S
        self._silent: dict[int, str] = {}  # for how long a host has been silent
        self._shared = shared
        self._watch: HostWatch | WatchUse | None = None
        self._background = BackgroundTasks()

    @property
    def hosts(self) -> Mapping[int, Actor[HostInterface]]:
        """The hosts, by index."""
        return self._hosts

    async def versions(self) -> dict[str, Any]:
        """Return `versions_here`. Answer callers of all versions."""
        return versions_here()

    async def healthy(self, patience_s: float) -> dict[int, Unreachable | None]:
        """Return why each host counts as lost; None for a host that answers in this time; seconds."""
        there = [i for i in self._hosts if i not in self._silent]
        answers = await asyncio.gather(*(self._hosts[i].ask_within(patience_s, HostInterface.healthy) for i in there))
        lost = {i: a for i, a in zip(there, answers, strict=True) if isinstance(a, Unreachable)}
        lost |= {i: Unreachable(f"{self._hosts[i].name} {why}") for i, why in self._silent.items()}
        return {i: lost.get(i) for i in self._hosts}

    async def ping(self) -> None:
        """Note that the pool is alive."""
        if self._watch is not None:
            self._watch.asked()

    @within(None)
    async def start_processes(
        self,
        generation: int,
        process: ProcessSpec,
        actors: Sequence[ActorHandle],
        avoid_ports: Collection[int],
        placement_group: str,
        timeout_s: float,
    ) -> SliceReady | Unreachable:
        """Start processes that wait for one attempt, as many on each host. Return once all of them wait.

        Args:
            generation: the number of this start.
            process: how they are started.
            actors: what Ray has made for them: for each host its `EnvironmentActor`, or for each process its
                `TaskProcess`; empty if they need neither.
            avoid_ports: ports that earlier attempts used.
            placement_group: the id of the slice's reservation.
            timeout_s: seconds for each host.
        """
        count = process.per_host
        each: list[ActorHandle | None] = [None] * (count * len(self._hosts))
        if actors:
            each = [actors[i if process.as_actor else i // count] for i in range(len(each))]
        avoid = frozenset(avoid_ports)
        starts = (ProcessStart(self._name, process, actor, avoid, placement_group) for actor in each)
        calls = (self._start_process(i // count, start, timeout_s) for i, start in enumerate(starts))
        answers = await asyncio.gather(*calls)
        ready = [reply for reply in answers if isinstance(reply, HostReady)]
        if len(ready) == len(answers) and generation not in self._unwanted:
            self._waiting[generation] = [one.pid for one in ready]
            ports = tuple(one.ports for one in (ready if count > 1 else ready[:1]))
            return SliceReady(ports, tuple(one.file_service for one in ready[::count]))
        waiting = {i: (i // count, one.pid) for i, one in enumerate(answers) if isinstance(one, HostReady)}
        self._background.start(self._stop_all(waiting, "they are not needed", 0.0), "ending them")
        if len(ready) == len(answers):
            return Unreachable(f"{self._name}: the processes are not needed any more")
        failed = [reply for reply in answers if isinstance(reply, SetupFailed)]
        if len(failed) + len(ready) < len(answers):
            return next(a for a in answers if isinstance(a, Unreachable) and not isinstance(a, SetupFailed))
        whys = list(dict.fromkeys(reply.reason for reply in failed))
        reasons = "; ".join(whys[:REASONS_NAMED])
        if len(whys) > REASONS_NAMED:
            reasons += f"; and so on, {len(whys)} in all"
        hosts = tuple(dict.fromkeys(host for reply in failed for host in reply.hosts))
        kind = OtherVersion if all(isinstance(reply, OtherVersion) for reply in failed) else SetupFailed
        return kind(reasons, hosts, works_elsewhere=len(hosts) < len(self._hosts))

    async def _start_process(self, host: int, start: ProcessStart, timeout_s: float) -> HostReady | Unreachable:
        at = self._hosts[host]
        versions = None if host in self._fitting else at.call(HostInterface.versions)
        starting = asyncio.ensure_future(at.ask_within(timeout_s, HostInterface.start_process, start))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            if versions is not None:
                if (why := await misfit(versions, at.name, host, timeout_s)) is not None:
                    return why
                self._fitting.add(host)
            started = await starting
        finally:
            starting.cancel()
        return replace(started, hosts=(host,)) if isinstance(started, SetupFailed) else started

    async def end_processes(self, generation: int) -> None:
        """End the processes of a generation, which wait, or start, and are not needed."""
        self._unwanted.add(generation)
        pids = self._waiting.pop(generation, [])
        await self._stop_all({i: (self._host_of(i, pids), pid) for i, pid in enumerate(pids)}, "it is not needed", 0.0)

    @within(None)
    async def run_remote_fn(
        self, attempt: AttemptId, generation: int, launches: Sequence[TaskLaunch], silence_s: float
    ) -> dict[int, TaskEnd | None]:
        """Start the task of every host. Return when all have returned, one ends otherwise, or a host falls silent.

        Args:
            attempt: the tasks' attempt.
            generation: the processes that run them.
            launches: by process of the slice.
            silence_s: a host that has not answered for this time counts as lost; seconds.

        Returns:
            The ends known by then, by process of the slice; None on a host that no longer answers.
        """
        pids = self._waiting.pop(generation)
        if self._refused is not None and self._refused[0] == attempt:  # calls may overtake one another
            return await self._refuse(pids, self._refused[1])
        self._running = attempt
        self._silence_s = silence_s
        self._tasks = {}
        for i, (launch, pid) in enumerate(zip(launches, pids, strict=True)):
            host = self._host_of(i, pids)
            end = asyncio.ensure_future(self._run_task(host, pid, launch))
            self._tasks[i] = HostTask(host, pid, end)
        tasks = self._tasks
        watch = self._watch_hosts()
        silence = asyncio.ensure_future(watch.found())
        pending: set[asyncio.Future[Any]] = {task.end for task in tasks.values()}
        try:
            while pending and not silence.done():
                done, _ = await asyncio.wait({*pending, silence}, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                ends = [task.result() for task in done - {silence}]
                if any(end is None or end.kind is not EndKind.RETURNED for end in ends):
                    break
        finally:
            silence.cancel()
        return {i: task.known_end() for i, task in tasks.items() if task.end.done() or task.host in watch.silent}

    def _host_of(self, process: int, pids: Sequence[int]) -> int:
        return process * len(self._hosts) // len(pids)

    def _watch_hosts(self) -> FailureDetector[int]:
        """Watch the hosts until the attempt is stopped: other slices may run on after the tasks here have returned."""
        self._unwatch_hosts()
        if self._shared is None:
            self._watch = HostWatch(self._hosts, self._name, self._silence_s)
        else:
            self._watch = self._shared.take(self._silence_s)
        self._silent = self._watch.detector.hung
        return self._watch.detector

    def _unwatch_hosts(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    async def _refuse(self, pids: Sequence[int], reason: str) -> dict[int, TaskEnd | None]:
        """End the processes of an attempt that was stopped before it started."""
        await self._stop_all({i: (self._host_of(i, pids), pid) for i, pid in enumerate(pids)}, reason, 0.0)
        return {i: TaskEnd(EndKind.STOPPED, Moment.now(), error=reason) for i in range(len(pids))}

    async def _run_task(self, host: int, pid: int, launch: TaskLaunch) -> TaskEnd | None:
        """Return how a task ended; None if its host is gone."""
        end = await self._hosts[host].ask_once(HostInterface.run, pid, launch)
        return None if isinstance(end, Unreachable) else end

    @within(None)
    async def stop(self, attempt: AttemptId, reason: str | None, exit_grace: float = 0.0) -> dict[int, TaskEnd | None]:
        """End every task of that attempt that still runs, and wait until all its processes are gone.

        Args:
            attempt: the tasks' attempt.
            reason: why; None after all have returned. A later call with a reason ends the processes while their exit
                handlers still run.
            exit_grace: how long exit handlers of tasks that have returned may run; with a reason, those of tasks that
                have failed; seconds.

        Returns:
            The end of each process; None if its host can't confirm it. Empty if that attempt does not run here.
        """
        if self._running == attempt:
            self._stopping[attempt], self._tasks, self._running = self._tasks, {}, None
            self._unwatch_hosts()
        if attempt not in self._stopping:
            self._refused = attempt, reason or "it is over"
            return {}
        tasks = self._stopping[attempt]
        facts = await self._stop_all({i: (task.host, task.pid) for i, task in tasks.items()}, reason, exit_grace)
        self._stopping.pop(attempt, None)
        ends = {i: None if facts[i] is None else task.known_end() or facts[i] for i, task in tasks.items()}
        for task in tasks.values():
            task.end.cancel()
        return ends

    async def _stop_all(
        self, tasks: Mapping[int, tuple[int, int]], reason: str | None, exit_grace: float
    ) -> dict[int, TaskEnd | None]:
        """End these processes, by host and pid. Return the end of each; None if its host can't confirm it."""
        hosts = {i: self._hosts[host] for i, (host, _) in tasks.items()}
        asked = {
            i: hosts[i].ask_once(HostInterface.stop, pid, reason, exit_grace)
            for i, (host, pid) in tasks.items()
            if host not in self._silent
        }
        ping = HostInterface.healthy
        answers = await answers_unless_silent(asked, lambda i: hosts[i].call(ping), self._silence_s)
        for i, why in answers.items():
            if isinstance(why, Exception):
                logger.warning("%s: %s", hosts[i].name, why)
        return {i: end if isinstance(end := answers.get(i), TaskEnd) else None for i in tasks}

    async def introduce(self, attempt: AttemptId, peers: Sequence[Sequence[tuple[ActorHandle, str]]]) -> None:
        """Tell each host of that attempt to which hosts of the gang it passes notices on.

        Args:
            attempt: the tasks' attempt.
            peers: by host index, with their actors and names.
        """
        if self._running == attempt:
            meet = HostInterface.meet_gang
            asks = (
                self._hosts[task.host].ask_once(meet, task.pid, attempt, peers[task.host])
                for task in self._tasks.values()
            )
            await asyncio.gather(*asks)

    async def notify(self, attempt: AttemptId, notice: Notice, sent_at: float) -> tuple[bool, bool]:
        """Tell every task of that attempt that it is to move. Return when all have answered, or at the deadline.

        Args:
            attempt: the tasks' attempt.
            notice: with its deadline by the sender's clock.
            sent_at: the time on that clock.

        Returns:
            Whether all have saved their state or returned, and whether any task has saved and waits for the move.
        """
        if self._running != attempt or not self._tasks:
            return False, False
        notice = by_this_clock(notice, sent_at)
        waits = [asyncio.ensure_future(self._notify(task, notice)) for task in self._tasks.values()]
        done, late = await asyncio.wait(waits, timeout=max(ANSWER_S, notice.deadline - time.time()))
        for wait in late:
            wait.cancel()
        saved = [wait.result() for wait in done]
        return not late and None not in saved, True in saved

    async def _notify(self, task: HostTask, notice: Notice) -> bool | None:
        """Wait for a task. Return True once it has saved its state, False once it has returned; None for neither."""
        host = self._hosts[task.host]
        saved = asyncio.ensure_future(host.ask_once(HostInterface.notify, task.pid, notice, time.time()))
        try:
            await asyncio.wait({saved, task.end}, return_when=asyncio.FIRST_COMPLETED)
            if saved.done() and saved.result() is True:
                return True
            end = task.known_end()
            return False if end is not None and end.kind is EndKind.RETURNED else None
        except Exception:
            logger.exception("%s could not be told that it is to move", host.name)
            return None
        finally:
            saved.cancel()

    async def hear_membership(self, attempt: AttemptId, membership: Membership) -> bool:
        """Tell every task of that attempt which slices of its job run. Return whether all could be told."""
        if self._running != attempt or not self._tasks:
            return False
        hear = HostInterface.hear_membership
        asks = (self._hosts[task.host].ask_once(hear, task.pid, membership) for task in self._tasks.values())
        return all(reply is True for reply in await asyncio.gather(*asks))

    async def progress(self, attempt: AttemptId) -> dict[int, Progress | Unreachable]:
        """Return the progress of every process of that attempt that has not returned; none if it does not run here."""
        if self._running != attempt:
            return {}
        running = {i: task for i, task in self._tasks.items() if not task.end.done()}
        asks = (self._hosts[task.host].ask_once(HostInterface.progress, task.pid) for task in running.values())
        replies = await asyncio.gather(*asks)
        return dict(zip(running, replies, strict=True))

    async def last_progress(self, attempt: AttemptId, process: int) -> Progress | Unreachable | None:
        """Return a process's progress, even if it has ended; None if that attempt does not run here."""
        task = self._tasks.get(process) if self._running == attempt else None
        return None if task is None else await self._hosts[task.host].ask_once(HostInterface.progress, task.pid)

    async def ask_of_each(
        self, attempt: AttemptId, service: str, method: str, within_s: float
    ) -> dict[int, tuple[Any, float]]:
        """Ask a service on the hosts about each process of that attempt that has not returned.

        Args:
            attempt: if it does not run here, the answer is empty.
            service, method: the call; it takes the process's pid.
            within_s: how long a host may take; seconds.

        Returns:
            The answer or `Unreachable` by process, and the seconds that it took.
        """
        if self._running != attempt:
            return {}
        running = {i: task for i, task in self._tasks.items() if not task.end.done()}
        asks = (self._ask_of(task, service, method, within_s) for task in running.values())
        return dict(zip(running, await asyncio.gather(*asks), strict=True))

    async def _ask_of(self, task: HostTask, service: str, method: str, within_s: float) -> tuple[Any, float]:
        began = time.monotonic()
        host, about = self._hosts[task.host], (task.pid,)
        try:
            answer: Any = await host.ask_within(within_s, HostInterface.serve, service, method, about, {})
        except Exception as error:  # the service's own
            answer = Unreachable(f"{type(error).__name__}: {error}")
        return answer, time.monotonic() - began

    @within(TEARDOWN_TIMEOUT_S)
    async def teardown(self) -> None:
        """End every task process on the slice, before its actors are ended."""
        await asyncio.gather(*(host.ask_once(HostInterface.teardown, self._name) for host in self._hosts.values()))

    def close(self) -> None:
        """Stop watching the hosts. The pool calls this when it gives the place back, if this is an object there."""
        self._unwatch_hosts()
        for task in (task for tasks in (self._tasks, *self._stopping.values()) for task in tasks.values()):
            task.end.cancel()
