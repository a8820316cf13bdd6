"""The zygotes of one host: one for each way to start a process, started when it is needed."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from secrets import token_hex
from socket import AF_UNIX, SOCK_SEQPACKET, socketpair
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError, RuntimeEnvSetupError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.misfit import misfit
from iris_ray.actors.calls.ray_internals import ClusterToJoin
from iris_ray.actors.host.environment_actor import EnvironmentActor
from iris_ray.actors.host.forks import ForkedProcess, ModuleUnfit, Zygote, ZygoteDoor, ZygoteFailed, ZygoteStart
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_environment import raylet_environment
from iris_ray.actors.protocol.answers import OtherVersion
from iris_ray.actors.protocol.messages import ProcessSpec
from iris_ray.errors import VersionMismatchError

logger = logging.getLogger(__name__)

MOST_IDLE = 4
"""The limit for zygotes without forks, besides the one in use."""


class Zygotes:
    """The zygotes of a host.

    Args:
        name: the host's name, for messages.
        ledger: returns the host's record of processes.
    """

    def __init__(self, name: str, ledger: Callable[[], ProcessLedger]) -> None:
        self._name = name
        self._ledger = ledger
        self._started: dict[str, asyncio.Task[tuple[Zygote, ClusterToJoin]]] = {}  # by the key of a `ProcessSpec`
        self._unfit: dict[str, str] = {}  # modules that no zygote imports, and why
        self._raylet: dict[str, str] | None = None
        self._recorded: set[Zygote] = set()
        self._may_record = asyncio.Event()
        self._recording = BackgroundTasks()

    async def raylet(self) -> dict[str, str]:
        """Return the variables of the host's raylet."""
        if self._raylet is None:
            self._raylet = await asyncio.to_thread(raylet_environment)
        return self._raylet

    async def ready(self, process: ProcessSpec, actor: ActorHandle | None) -> tuple[Zygote, ClusterToJoin]:
        """Return a zygote that can fork, and the cluster of its forks. Concurrent callers wait for one start.

        Args:
            process: what it forks.
            actor: the `EnvironmentActor` that starts it, or None.

        Raises:
            ZygoteFailed: it can't be started.
            RuntimeEnvSetupError: Ray can't make its environment.
        """
        if actor is not None:  # a zygote of an earlier one may be there, and Ray may have deleted its environment
            await self._require_environment(actor)
        starting = self._started.get(process.key)
        if is_mine := starting is None or _has_failed(starting):
            starting = asyncio.ensure_future(self._start(process, actor))
            starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next use raises it
            self._started[process.key] = starting
        assert starting is not None
        try:
            return await asyncio.shield(starting)
        except ZygoteFailed:
            if is_mine or actor is None:
                raise
        return await self.ready(process, actor)  # the actor that was to start it may have ended with its job

    async def _require_environment(self, actor: ActorHandle) -> None:
        """Wait until Ray has made the environment of an `EnvironmentActor`.

        Raises:
            ZygoteFailed, VersionMismatchError, RuntimeEnvSetupError: it can't be used.
        """
        versions = Actor[EnvironmentActor](actor).call(EnvironmentActor.versions)
        if (why := await misfit(versions, f"the environment of the tasks on {self._name}", 0, None)) is not None:
            raise (VersionMismatchError if isinstance(why, OtherVersion) else ZygoteFailed)(why.reason)

    def warm_up(self, process: ProcessSpec, actor: ActorHandle | None) -> None:
        """Begin to start a zygote, if it is not there. Return at once."""
        waiting = asyncio.ensure_future(self.ready(process, actor))
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # the fork raises it as well

    def may_record(self) -> None:
        """Have zygotes recorded from now on, even before their first fork, as an import may hang.

        Call this once the host is prepared: that ends all recorded processes.
        """
        self._may_record.set()

    async def _record_soon(self, zygote: Zygote) -> None:
        await self._may_record.wait()
        if not zygote.ended:
            with contextlib.suppress(OSError):  # a full disk refuses its first fork, unless it has room by then
                await self.record(zygote)

    async def record(self, zygote: Zygote) -> None:
        """Have the reaper end a zygote if this process ends, and the zygote can't end itself.

        Raises:
            OSError: the disk is full or faulty.
        """
        if zygote not in self._recorded and zygote.tree is not None:
            await asyncio.to_thread(self._ledger().record, zygote.tree)
            self._recorded.add(zygote)

    async def fork(
        self, process: ProcessSpec, actor: ActorHandle | None
    ) -> tuple[ForkedProcess, Zygote, ClusterToJoin]:
        """Return a new process. Should its zygote have ended, start another one once.

        Raises:
            ZygoteFailed, RuntimeEnvSetupError: as `ready`.
            OSError: the host can't start a process now.
        """
        zygote, cluster = await self.ready(process, actor)
        try:
            return await zygote.fork(), zygote, cluster
        except ZygoteFailed as failure:
            logger.warning("%s: %s; starting another one", self._name, failure)
        zygote, cluster = await self.ready(process, actor)
        return await zygote.fork(), zygote, cluster

    async def _start(self, process: ProcessSpec, actor: ActorHandle | None) -> tuple[Zygote, ClusterToJoin]:
        await self._forget_ended(process.key)
        while True:
            preload = [module for module in process.preload if module not in self._unfit]
            try:
                return await self._start_with(replace(process, preload=tuple(preload)), actor)
            except ModuleUnfit as failure:
                logger.warning("%s: %s", self._name, failure)
                self._unfit[failure.module] = str(failure)

    async def _start_with(self, process: ProcessSpec, actor: ActorHandle | None) -> tuple[Zygote, ClusterToJoin]:
        raylet = await self.raylet()
        rays_own = os.environ.get("OMP_NUM_THREADS") == "1" and "OMP_NUM_THREADS" not in raylet  # it claims no CPU
        variables = {} if actor else process.variables  # Ray has set those of an environment
        without = ["PYTHONBREAKPOINT", *(["OMP_NUM_THREADS"] if rays_own else [])]  # Ray's debugger needs a worker
        how = ZygoteStart(variables, without, token_hex(8))
        cluster = ClusterToJoin.of_this_process()
        try:
            if actor is None:
                mine, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
                with theirs:
                    await asyncio.to_thread(how.start, theirs)
                path, more = sys.path, {"env_vars": variables}
            else:
                door = ZygoteDoor()
                coming = asyncio.ensure_future(door.taken())
                try:
                    made = Actor[EnvironmentActor](actor)
                    path, more = await made.call(EnvironmentActor.start, how, door.address)
                    mine = await coming
                finally:
                    coming.cancel()
                    door.close()
        except RuntimeEnvSetupError:
            raise
        except (OSError, subprocess.SubprocessError, RayError) as error:
            raise ZygoteFailed(f"the process that forks tasks can't be started: {error}") from error
        zygote = Zygote(mine, how.token)
        await zygote.known()
        self._recording.start(self._record_soon(zygote), f"recording a process that forks tasks on {self._name}")
        await zygote.prepare(path, process.preload)
        return zygote, replace(cluster, runtime_env=_merged(cluster.runtime_env, more))

    async def _forget_ended(self, key: str) -> None:
        """Forget the zygotes that have ended, and end those that no task needs, except the latest."""
        done = {k: one.result()[0] for k, one in self._started.items() if one.done() and not _has_failed(one)}
        idle = [k for k, zygote in done.items() if k != key and zygote.is_idle]
        for k in idle[: max(0, len(idle) - MOST_IDLE)]:
            done[k].end()
        for k in [k for k, one in self._started.items() if _has_failed(one)]:
            del self._started[k]
        for zygote in [zygote for zygote in self._recorded if zygote.ended]:
            self._recorded.discard(zygote)
            if zygote.tree is not None:
                await asyncio.to_thread(self._ledger().forget, zygote.tree)


def _has_failed(starting: "asyncio.Task[tuple[Zygote, ClusterToJoin]]") -> bool:
    if not starting.done():
        return False
    if starting.cancelled() or starting.exception() is not None:
        return True
    zygote, _ = starting.result()
    return zygote.ended or zygote.is_retired


def _merged(environment: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a runtime environment with more in it, as Ray merges those of a job and of its actor."""
    variables = {**environment.get("env_vars", {}), **more.get("env_vars", {})}
    merged = {**environment, **more} | {"env_vars": variables}
    return {name: value for name, value in merged.items() if value}
