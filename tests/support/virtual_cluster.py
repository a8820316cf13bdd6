"""A cluster in this process and in virtual time: whole jobs take milliseconds, and seconds are exact."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.calls.names import CONTROLLER_NAME
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.pool.attempt import AT_ONCE_S
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.protocol.messages import JobView
from iris_ray.actors.protocol.status import JobStatus, WorkerStatus
from iris_ray.client.caller_pool import REPEATED
from tests.support import virtual_time
from tests.support.cluster_in_process import ClusterInProcess
from tests.support.hosts_in_process import Task, Work
from tests.support.ray_in_process import Reference
from tests.support.worlds import gang_spec, tasks_spec

LONG_S = 600.0
"""What has not happened after so many seconds of virtual time never will."""


class VirtualCluster(ClusterInProcess):
    """A cluster for stories that are coroutines. Its Controller runs from the beginning.

    Attributes:
        pool: of the test's own jobs.
    """

    def __init__(self, directory: Path, slices: Mapping[str, int]) -> None:
        super().__init__(directory, slices, asyncio.get_running_loop())
        self.controllers: list[Controller] = []

    def new_controller(self) -> Controller:
        self.controllers.append(super().new_controller())
        return self.controllers[-1]

    def part_of_controller(self, service: str) -> Any:
        """Return a service's part in the latest Controller."""
        return next(running.part for running in self.controllers[-1]._services if running.service.name == service)

    async def begin(self) -> None:
        self.ray.create(Controller, (), {"name": CONTROLLER_NAME, "lifetime": "detached"})
        self.pool = self.ray.create(SlicePoolManager, (), {})
        await self.ask("ping")

    def run(self, job_id: str, slices: tuple[int, ...] = (1,), work: Work | None = None, **changes: Any) -> Reference:
        """Start a gang on v4-16 slices, without retries unless told; return a reference to its results.

        Args:
            job_id: its id.
            slices: how many it can use.
            work: what each of its tasks does.
            changes: more for its `JobSpec`, or `RunRequest`; ``pool`` if it is not to be the test's own.
        """
        return self._run(job_id, gang_spec, work, {"slices": slices, "max_retries_failure": 0} | changes)

    def run_tasks(self, job_id: str, replicas: int, work: Work | None = None, **changes: Any) -> Reference:
        """Start tasks that are placed one by one, on one CPU each unless told."""
        wanted = {"replicas": replicas, "resources": {"CPU": 1.0}, "max_retries_failure": 0} | changes
        return self._run(job_id, tasks_spec, work, wanted)

    def _run(self, job_id: str, spec: Callable[..., Any], work: Work | None, changes: dict[str, Any]) -> Reference:
        if work is not None:
            self.works[job_id] = work
        more = {
            name: changes.pop(name)
            for name in ("keep_warm", "stall_timeout", "host_silence", "exit_grace", "process")
            if name in changes
        }
        pool = changes.pop("pool", self.pool)
        request = self.request(spec(job_id, **changes), **more)
        reference: Reference = pool.run.options(**REPEATED).remote(request)
        return reference

    # -- looks -----------------------------------------------------------------------------------------------------

    async def ask(self, method: str, *args: Any) -> Any:
        return await getattr(self.controller(), method).remote(*args)

    async def view(self, job_id: str, index: int = 0) -> JobView:
        found: JobView = await self.ask("report", job_id, [], index)
        return found

    async def charged(self, job_id: str, index: int = 0) -> tuple[int, int]:
        """Return how many failures and preemptions a gang was charged."""
        view = await self.view(job_id, index)
        return view.failures, view.preemptions

    async def status(self, job_id: str) -> JobStatus:
        found: JobStatus = await self.ask("job_status", job_id)
        return found

    async def workers(self) -> list[WorkerStatus]:
        found: list[WorkerStatus] = await self.ask("list_workers")
        return found

    async def started(self, job_id: str, count: int, attempt: int = 1) -> list[Task]:
        """Return the tasks of an attempt once that many have begun."""
        await self.until(lambda: len(self.tasks_of(job_id, attempt)) == count)
        return self.tasks_of(job_id, attempt)

    async def runs(self, job_id: str, count: int, attempt: int = 1) -> list[Task]:
        """Return them when they have run for so long that a lost host does not count as lost before the start."""
        tasks = await self.started(job_id, count, attempt)
        await asyncio.sleep(2 * AT_ONCE_S)
        return tasks

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Return the condition's first true value; await it if it is a coroutine."""
        deadline = time.monotonic() + LONG_S
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            assert time.monotonic() < deadline, "it never happens"
            await asyncio.sleep(0.1)


Story = Callable[[VirtualCluster], Coroutine[Any, Any, None]]


class Stage:
    """Plays stories, each on a new cluster."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._monkeypatch = monkeypatch

    def play(self, story: Story, slices: int = 3) -> None:
        """Play the story on so many v4-16 slices, then check the Controller's state."""
        virtual_time.run(self._play(story, slices))

    async def _play(self, story: Story, slices: int) -> None:
        async def at_once(function: Callable[..., Any], *args: Any, **more: Any) -> Any:
            return function(*args, **more)

        with self._monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", at_once)
            patch.setattr(RunningPart, "in_thread", lambda _, *called, **more: at_once(*called, **more))
            cluster = VirtualCluster(self._directory, {"v4-16": slices})
            cluster.install(patch)
            try:
                await cluster.begin()
                await asyncio.wait_for(story(cluster), 10 * LONG_S)
                for controller in cluster.controllers[-1:]:
                    controller._state.check()
            finally:
                await cluster.ray.end_actors()


def played(slices: int = 3) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make a test of a story: its fixture `stage` plays it on a cluster of so many v4-16 slices."""

    def test_of(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def test(stage: Stage, **more: Any) -> None:
            stage.play(lambda cluster: story(cluster=cluster, **more), slices)

        needed = [one for name, one in signature(story).parameters.items() if name != "cluster"]
        update_wrapper(test, story)
        test.__signature__ = Signature([Parameter("stage", Parameter.POSITIONAL_OR_KEYWORD), *needed])  # type: ignore[attr-defined]
        return test

    return test_of
