"""The SlicePoolManager as a Ray actor: what Ray restarts, which calls Ray repeats, and what callers may ask of it."""

from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle

from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.wire.messages import RunRequest

PoolActor = ray.remote(num_cpus=0, max_concurrency=10_000, max_restarts=-1)(SlicePoolManager)
"""Made once, because Ray exports a class anew for each ``ray.remote(...)``. If its process dies, Ray starts another."""

REPEATED: dict[str, Any] = {"max_task_retries": -1}
"""Options of the calls that Ray repeats in the pool's new process. Ray repeats no others."""


class PoolClient:
    """What callers may ask of a SlicePoolManager: one method for each of its own.

    Args:
        handle: the actor.
    """

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle

    def run(self, request: RunRequest, name: str) -> "ray.ObjectRef[list[Any]]":
        """Start a job, and return the reference to its results. Ray shows the call by this name."""
        results: ray.ObjectRef[list[Any]] = self.handle.run.options(name=name, **REPEATED).remote(request)
        return results

    def begin(self, request: RunRequest) -> None:
        """Start the only job of a pool without a caller, and return when the pool has it."""
        ray.get(self.handle.begin.remote(request))

    def results(self, name: str) -> "ray.ObjectRef[list[Any]]":
        """Return the reference to the results of that job. Ray shows the call by this name."""
        results: ray.ObjectRef[list[Any]] = self.handle.results.options(name=name, **REPEATED).remote()
        return results

    def accepted(self, job_id: str) -> bool:
        """Wait until it is known whether the Controller has a job, and return it."""
        return bool(ray.get(self.handle.accepted.options(**REPEATED).remote(job_id)))

    def release(self) -> None:
        """Have every slice given up that no job uses, and return when that is done."""
        ray.get(self.handle.release.remote())

    def tasks_ended(self) -> "ray.ObjectRef[None]":
        """Return a reference that is ready once no task of a job whose results are out runs any more."""
        ended: ray.ObjectRef[None] = self.handle.tasks_ended.remote()
        return ended

    def until_idle(self, calls: int) -> "Future[None]":
        """Return a future that is done once that many runs have come and gone and no slice is left."""
        idle: Future[None] = self.handle.until_idle.remote(calls).future()
        return idle

    def kill(self) -> None:
        """End the pool's process for good."""
        ray.kill(self.handle)
