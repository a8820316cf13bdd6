"""The SlicePoolManager as a Ray actor: what Ray restarts, and which calls Ray repeats."""

from typing import Any

import ray

from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager

PoolActor = ray.remote(num_cpus=0, max_concurrency=10_000, max_restarts=-1)(SlicePoolManager)
"""Made once, because Ray exports a class anew for each ``ray.remote(...)``. If its process dies, Ray starts another."""

REPEATED: dict[str, Any] = {"max_task_retries": -1}
"""Options of the calls that Ray repeats in the pool's new process. Ray repeats no others."""
