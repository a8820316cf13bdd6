"""The actor of one TPU slice. It asks all its hosts, so that the pool asks one actor per slice, not one per host.

For tasks without chips it is an object in the pool's process instead of an actor.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError, RuntimeEnvSetupError

from iris_ray.actors.calls.asking import Actor, answer
from iris_ray.actors.calls.clocks import Moment, by_this_clock
from iris_ray.actors.calls.liveness import FailureDetector, HostWatch, answers_unless_silent
from iris_ray.actors.protocol.answers import OtherVersion, SetupFailed, Unreachable
from iris_ray.actors.protocol.host_interface import HostInterface, TaskInterface
from iris_ray.actors.protocol.marks import within
from iris_ray.actors.protocol.messages import HOST_SILENCE_S, Progress, SliceReady, StandbyReady, TaskLaunch
from iris_ray.actors.protocol.payloads import with_fetched_payload
from iris_ray.actors.protocol.version import in_words, require_fit, versions_here
from iris_ray.errors import VersionMismatchError
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.membership import Membership
from iris_ray.model.notices import Notice
from iris_ray.model.outcomes import EndKind, TaskEnd

logger = logging.getLogger(__name__)

HOST_ASKED_AFTER_S = 1.0
"""The age from which a task's host is asked for its end. Not asking before makes launches faster."""
LAST_WORD_S = 1.0
"""The time for Ray to report the end of a process after its host has reported it."""
ANSWER_S = 1.0
"""The time to answer for tasks that are asked after the deadline whether they have saved."""
FETCH_S = 2.0
"""The time to fetch an exception from its task's process, before the process is ended."""
TEARDOWN_TIMEOUT_S = 20.0

Standbys: TypeAlias = list[tuple[ActorHandle, int]]
"""The standbys of a generation by process of the slice, with their pids. Each host has as many as the others."""


@dataclass(slots=True)
class HostTask:
    """One process of the current attempt: a host's task, or a part of it."""

    host: int
    pid: int
    end: "asyncio.Task[TaskEnd | None]"

    def known_end(self) -> TaskEnd | None:
        """Return its end if it has ended and is known."""
        return self.end.result() if self.end.done() and not self.end.cancelled() else None


async def _raised(tasks: Mapping[int, HostTask]) -> dict[int, TaskEnd | None]:
    """Return the ends by an exception that are known by now. Fetch the exceptions, which the processes still hold."""
    known = {i: end for i, task in tasks.items() if (end := task.known_end()) and end.kind is EndKind.RAISED}
    return dict(zip(known, await asyncio.gather(*map(_fetched, known.values())), strict=True))


async def _fetched(end: TaskEnd) -> TaskEnd | None:
    try:
        async with asyncio.timeout(FETCH_S):  # its host may hang
            return await with_fetched_payload(end)
    except TimeoutError:
        return None


_NOT_IMPORTED = re.compile(r"^.*(?:ImportError|ModuleNotFoundError)\b.*$", re.MULTILINE)


async def _started(versions: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the answer. Raise ImportError if the actor could not be made, because iris_ray can't be imported there."""
    try:
        return await versions
    except ActorDiedError as error:
        if lines := _NOT_IMPORTED.findall(str(error)):
            raise ImportError(lines[-1].strip()) from None
        raise


async def misfit(
    versions: Awaitable[Mapping[str, Any]], name: str, host: int, timeout_s: float | None
) -> Unreachable | None:
    """Return why a process on a host can't work with this one; None if it can.

    Args:
        versions: the call that asks it for its versions.
        name: the process, for the message.
        host: the index of its host.
        timeout_s: how long it may take to start; seconds.
    """
    ours = versions_here()
    install = f"install iris_ray {ours['version']} in the image of the hosts"
    try:
        theirs = await answer(_started(versions), name, timeout_s)
        if isinstance(theirs, Unreachable):
            return theirs
        require_fit(theirs, ours, name, install)
    except RuntimeEnvSetupError:
        raise
    except VersionMismatchError as error:
        return OtherVersion(str(error), (host,))
    except Exception as error:  # it has no iris_ray, or one that does not know the question
        why = (str(error).strip().splitlines() or [""])[-1]
        return OtherVersion(
            f"{name} can't use iris_ray: {type(error).__name__}: {why}; this is {in_words(ours)}: {install}",
            (host,),
        )
    return None


class SliceActor:
    """The hosts of one slice, by host index.

    Args:
        name: the slice's name.
        hosts: its TPUHostActors by host index.
    """

    def __init__(self, name: str, hosts: Sequence[ActorHandle]) -> None:
        self._name = name
        self._hosts = {i: Actor[HostInterface](handle, f"{name} host {i}") for i, handle in enumerate(hosts)}
        self._fitting: set[int] = set()  # hosts whose TPUHostActor has an iris_ray that fits this one
        self._file_services: dict[int, str] = {}  # where each host serves files of jobs
        self._standbys: dict[int, Standbys] = {}  # by generation
        self._running: AttemptId | None = None
        self._refused: tuple[AttemptId, str] | None = None  # an attempt that was stopped before it came, and why
        self._tasks: dict[int, HostTask] = {}  # by process of the slice
        self._stopping: dict[AttemptId, dict[int, HostTask]] = {}
        self._silence_s = HOST_SILENCE_S
        self._silent: dict[int, str] = {}  # for how long a host has been silent
        self._watch: HostWatch | None = None

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

    async def prepare(
        self, generation: int, standbys: Sequence[ActorHandle], timeout_s: float
    ) -> SliceReady | Unreachable:
        """Take these standbys for a later attempt, as many of each host, by host. Return once all have started."""
        per_host = len(standbys) // len(self._hosts)
        calls = (self._take_standby(i // per_host, standby, timeout_s) for i, standby in enumerate(standbys))
        answers = await asyncio.gather(*calls)
        failed = [reply for reply in answers if isinstance(reply, SetupFailed)]
        ready = [reply for reply in answers if isinstance(reply, StandbyReady)]
        if len(failed) + len(ready) < len(answers):
            return next(a for a in answers if isinstance(a, Unreachable) and not isinstance(a, SetupFailed))
        if failed:
            reasons = "; ".join(dict.fromkeys(reply.reason for reply in failed))
            hosts = tuple(dict.fromkeys(host for reply in failed for host in reply.hosts))
            kind = OtherVersion if all(isinstance(reply, OtherVersion) for reply in failed) else SetupFailed
            return kind(reasons, hosts, works_elsewhere=len(hosts) < len(self._hosts))
        self._standbys[generation] = [(standby, one.pid) for standby, one in zip(standbys, ready, strict=True)]
        ports = tuple(one.ports for one in (ready if per_host > 1 else ready[:1]))
        services = tuple(self._file_services[i] for i in self._hosts)
        return SliceReady(ports, ready[0].cores, ready[0].free_bytes, services)

    async def _take_standby(self, host: int, standby: ActorHandle, timeout_s: float) -> StandbyReady | Unreachable:
        behind, name, who = (
            Actor[TaskInterface](standby),
            self._hosts[host].name,
            f"the standby on {self._hosts[host].name}",
        )
        try:
            # Asked from here, so that the connection over which its task will be started is there by then.
            versions, asked = behind.call(TaskInterface.versions), behind.call(TaskInterface.ready)
            of_host = None if host in self._fitting else self._hosts[host].call(HostInterface.versions)
            if (why := await misfit(versions, who, host, timeout_s)) is not None:
                return why
            if of_host is not None:
                if (why := await misfit(of_host, name, host, timeout_s)) is not None:
                    return why
                self._fitting.add(host)
            ready = await answer(asked, who, timeout_s)
            if isinstance(ready, Unreachable):
                return ready
            if ready.error:
                return SetupFailed(f"{name}: {ready.error}", (host,))
            process = ready.pid, ready.started, ready.token
            adopt = HostInterface.adopt
            adopted = await self._hosts[host].ask_within(timeout_s, adopt, self._name, standby, *process)
            if isinstance(adopted, Unreachable):
                return adopted
            self._file_services[host] = adopted
            return ready
        except RuntimeEnvSetupError as error:
            return SetupFailed(f"{name}: {error}", (host,))

    @within(None)
    async def run_remote_fn(
        self, attempt: AttemptId, generation: int, launches: Sequence[TaskLaunch], silence_s: float
    ) -> dict[int, TaskEnd | None]:
        """Start the task of every host. Return when all have returned, one ends otherwise, or a host falls silent.

        Args:
            attempt: the tasks' attempt.
            generation: the standbys that run them. Earlier generations are dropped.
            launches: by process of the slice.
            silence_s: a host that has not answered for this time counts as lost; seconds.

        Returns:
            The ends known by then, by process of the slice; None on a host that no longer answers.
        """
        standbys = self._standbys.pop(generation)
        self._standbys = {number: later for number, later in self._standbys.items() if number > generation}
        if self._refused is not None and self._refused[0] == attempt:  # calls may overtake one another
            return await self._refuse(standbys, self._refused[1])
        self._running = attempt
        self._silence_s = silence_s
        self._tasks = {}
        for i, (launch, (standby, pid)) in enumerate(zip(launches, standbys, strict=True)):
            host = self._host_of(i, standbys)
            end = asyncio.ensure_future(self._run_task(host, standby, pid, launch))
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

    def _host_of(self, process: int, standbys: Standbys) -> int:
        return process * len(self._hosts) // len(standbys)

    def _watch_hosts(self) -> FailureDetector[int]:
        """Watch the hosts until the attempt is stopped: other slices may run on after the tasks here have returned."""
        self._unwatch_hosts()
        self._watch = HostWatch(self._hosts, self._name, self._silence_s)
        self._silent = self._watch.detector.hung
        return self._watch.detector

    def _unwatch_hosts(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    async def _refuse(self, standbys: Standbys, reason: str) -> dict[int, TaskEnd | None]:
        """End the standbys of an attempt that was stopped before it started."""
        await self._stop_all({i: (self._host_of(i, standbys), pid) for i, (_, pid) in enumerate(standbys)}, reason, 0.0)
        return {i: TaskEnd(EndKind.STOPPED, Moment.now(), error=reason) for i in range(len(standbys))}

    async def _run_task(self, host: int, standby: ActorHandle, pid: int, launch: TaskLaunch) -> TaskEnd | None:
        try:
            return await self._result(host, standby, pid, launch)
        except RayTaskError as error:  # this process can't unpickle the answer
            return TaskEnd(EndKind.RAISED, Moment.now(), None, str(error.cause), str(error))
        except OutOfMemoryError:
            how = "task process was killed by Ray, because the host's memory was nearly used up"
            killed = TaskEnd(EndKind.OUT_OF_MEMORY, Moment.now(), error=f"the {how}")
            facts = await self._hosts[host].ask_once(HostInterface.how_it_ended, pid)
            if isinstance(facts, Unreachable) or facts.kind is not EndKind.NEVER_STARTED:
                return killed
            return replace(facts, error=f"the waiting {how}")
        except RayError:
            facts = await self._hosts[host].ask_once(HostInterface.how_it_ended, pid)
            return None if isinstance(facts, Unreachable) else facts

    async def _result(self, host: int, standby: ActorHandle, pid: int, launch: TaskLaunch) -> TaskEnd | None:
        """Return the answer of the task's process or, if it is gone without an answer, the end that its host reports.

        Ray does not notice the end of a process as long as a forked child has copies of its connections.
        """

        async def answered() -> TaskEnd:
            return await Actor[TaskInterface](standby).call(TaskInterface.run, launch)

        run = asyncio.ensure_future(answered())
        gone: asyncio.Future[TaskEnd | Unreachable] | None = None
        try:
            await asyncio.wait({run}, timeout=HOST_ASKED_AFTER_S)
            if not run.done():
                gone = asyncio.ensure_future(self._hosts[host].ask_within(None, HostInterface.how_it_ended, pid))
                first: set[asyncio.Future[Any]] = {run, gone}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                await asyncio.wait({run}, timeout=LAST_WORD_S)  # Ray may have ended the process, and say why
            if gone is not None and not run.done() and not isinstance(facts := gone.result(), Unreachable):
                return facts
            return await run
        finally:
            run.cancel()
            if gone is not None:
                gone.cancel()

    @within(None)
    async def stop(self, attempt: AttemptId, reason: str | None, exit_grace: float = 0.0) -> dict[int, TaskEnd | None]:
        """End every task of that attempt that still runs, and wait until all its processes are gone.

        Args:
            attempt: the tasks' attempt.
            reason: why; None after all have returned, to let exit handlers of user code run. A later call with a reason
                ends the processes while their exit handlers still run.
            exit_grace: how long exit handlers may run; seconds.

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
        raised = await _raised(tasks)
        facts = await self._stop_all({i: (task.host, task.pid) for i, task in tasks.items()}, reason, exit_grace)
        self._stopping.pop(attempt, None)
        ends = {
            i: None if facts[i] is None else raised.get(i) or task.known_end() or facts[i] for i, task in tasks.items()
        }
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
        """Stop watching the hosts. The pool calls this when it gives a place on shared hosts back."""
        self._unwatch_hosts()
        for task in (task for tasks in (self._tasks, *self._stopping.values()) for task in tasks.values()):
            task.end.cancel()
