"""One TPU slice: speaks for all its hosts, so that the pool asks one actor a slice and not one a host."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from iris_ray.actors.messages import StandbyReady, TaskLaunch
from iris_ray.actors.resource_pool import ResourcePoolManager, Unreachable, answer
from iris_ray.errors import TaskSetupError
from iris_ray.outcomes import EndKind, TaskEnd

STOP_TIMEOUT_S = 15.0


@dataclass(slots=True)
class HostTask:
    """One host's task of the current attempt."""

    pid: int
    end: "asyncio.Task[TaskEnd | None]"

    def known_end(self) -> TaskEnd | None:
        """What is known about its end by now."""
        return self.end.result() if self.end.done() and not self.end.cancelled() else None


class SliceActor(ResourcePoolManager[int]):
    """The hosts of one slice, by worker id.

    Args:
        name: the slice's name.
        hosts: its TPUHostActors, in the order of worker ids.
    """

    def __init__(self, name: str, hosts: Sequence[ActorHandle]) -> None:
        self._name = name
        self._hosts = dict(enumerate(hosts))
        self._standbys: dict[int, tuple[ActorHandle, int]] = {}  # with their pids
        self._running: tuple[str, int] | None = None  # job id and attempt
        self._tasks: dict[int, HostTask] = {}

    def members(self) -> Mapping[int, ActorHandle]:
        return self._hosts

    def member_name(self, key: int) -> str:
        return f"{self._name} host {key}"

    async def healthy(self) -> dict[int, str | None]:
        """Why each host counts as lost; None for those that answer."""
        answers = await self.ask_all("healthy", timeout_s=3.0)
        return {key: a.reason if isinstance(a, Unreachable) else None for key, a in answers.items()}

    async def prepare(self, standbys: Sequence[ActorHandle], timeout_s: float) -> tuple[int, ...] | Unreachable:
        """Take these standbys for the next attempt; returns, once all have started, the ports that host 0's holds."""
        calls = (self._take_standby(i, standby, timeout_s) for i, standby in enumerate(standbys))
        answers = await asyncio.gather(*calls)
        for i, (standby, reply) in enumerate(zip(standbys, answers, strict=True)):
            if isinstance(reply, Unreachable):
                return reply
            self._standbys[i] = standby, reply.pid
        assert isinstance(answers[0], StandbyReady)
        return answers[0].ports

    async def _take_standby(self, host: int, standby: ActorHandle, timeout_s: float) -> StandbyReady | Unreachable:
        # Asked from here, so that the connection over which its task will be started is there by then.
        ready = await answer(standby.ready.remote(), f"the standby on {self.member_name(host)}", timeout_s)
        if isinstance(ready, Unreachable):
            return ready
        if ready.error:
            raise TaskSetupError(f"{self.member_name(host)}: {ready.error}")
        adopted = await self.ask(host, "adopt", standby, ready.pid, ready.token, timeout_s=timeout_s)
        return adopted if isinstance(adopted, Unreachable) else ready

    async def run_remote_fn(self, launches: Sequence[TaskLaunch]) -> dict[int, TaskEnd | None]:
        """Start one task on every host; returns when all have returned, or at the first other end.

        The answer holds the ends known by then; None where a host no longer answers.
        """
        self._running = launches[0].info.job_id, launches[0].info.attempt
        self._tasks = {}
        for i, launch in enumerate(launches):
            standby, pid = self._standbys.pop(i)
            end = asyncio.ensure_future(self._run_task(i, standby, pid, launch))
            self._tasks[i] = HostTask(pid, end)
        pending = {task.end for task in self._tasks.values()}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            ends = [task.result() for task in done]
            if any(end is None or end.kind is not EndKind.RETURNED for end in ends):
                break
        return {i: task.known_end() for i, task in self._tasks.items() if task.end.done()}

    async def _run_task(self, host: int, standby: ActorHandle, pid: int, launch: TaskLaunch) -> TaskEnd | None:
        try:
            end: TaskEnd = await standby.run.remote(launch)
            return end
        except RayTaskError as error:  # what it sent can't be read here
            return TaskEnd(EndKind.RAISED, time.time(), None, str(error.cause), str(error))
        except RayError:
            facts: TaskEnd | Unreachable = await self.ask(host, "how_it_ended", pid)
            return None if isinstance(facts, Unreachable) else facts

    async def stop(self, job_id: str, attempt: int, reason: str | None) -> dict[int, TaskEnd | None]:
        """End every task of that attempt that still runs and wait until all its processes are gone.

        Returns:
            How each task ended; None where its host can't vouch that it has. Nothing if that attempt is not running
            here (any more).
        """
        if self._running != (job_id, attempt):
            return {}
        tasks, self._tasks, self._running = self._tasks, {}, None
        calls = (self.ask(i, "stop", task.pid, reason, timeout_s=STOP_TIMEOUT_S) for i, task in tasks.items())
        answers = await asyncio.gather(*calls)
        ends: dict[int, TaskEnd | None] = {}
        for (i, task), facts in zip(tasks.items(), answers, strict=True):
            ends[i] = None if isinstance(facts, Unreachable) else task.known_end() or facts
            task.end.cancel()
        return ends

    async def teardown(self) -> None:
        """End everything on the slice before its actors are ended."""
        await self.ask_all("teardown", timeout_s=STOP_TIMEOUT_S)
