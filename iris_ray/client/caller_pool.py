"""Pools of SlicePoolManagers: the one of this process for its jobs, and one for each detached job."""

import atexit
import concurrent.futures
import contextlib
import sys
import threading
import time
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_client import begin_to_start_controller
from iris_ray.actors.calls.names import NAMESPACE, detached_pool
from iris_ray.actors.pool.actor import SlicePoolManager
from iris_ray.actors.protocol.messages import RunRequest, with_stored_function
from iris_ray.actors.protocol.payloads import INLINE_BYTES
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.client.connection import this_connection
from iris_ray.processes.identity import stat_of

PoolActor = ray.remote(num_cpus=0, max_concurrency=10_000, max_restarts=-1)(SlicePoolManager)
"""The SlicePoolManager as a Ray actor, whose process Ray restarts. Ray exports a class anew for each ``ray.remote``."""

REPEATED: dict[str, Any] = {"max_task_retries": -1}
"""Options of the calls that Ray repeats in the pool's new process. Ray repeats no other calls."""


SILENT_S = 1.0
"""Seconds after which a wait for tasks is mentioned."""

FOLLOW_UP = "after a SlicePoolManager"
"""The name of the threads that follow up a pool that is idle or gone."""

RESTART_S = 1.0
"""Seconds before a pool whose process died is asked again: Ray needs a while to start another process."""


class CallerPool:
    """The SlicePoolManager of the calling process: made at the first call, ended when it has no jobs and slices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: Actor[PoolInterface] | None = None
        self._cluster: str | None = None
        self._calls = 0

    def submit(self, request: RunRequest) -> tuple["ray.ObjectRef[list[Any]]", Actor[PoolInterface]]:
        """Start a job. Return the reference to its results, and the pool that runs it."""
        stored = with_stored_function(request)
        with self._lock:
            pool = self._current()
            named = pool.with_options(name=f"run_on_pod({request.spec.name})", **REPEATED)
            results = named.call(PoolInterface.run, stored)
            self._calls += 1  # only after the call was made: the pool ends after so many calls
            return results, pool

    def release(self) -> None:
        """Have the pool give up every slice that none of its jobs uses."""
        if (pool := self._connected()) is not None:
            with contextlib.suppress(RayError):  # it is gone already
                # Without slices and jobs the pool ends in a moment, see _end_when_idle.
                ray.get(pool.call(PoolInterface.release))

    def wait_for_tasks(self) -> None:
        """Wait until the tasks of all jobs with results have ended, because the end of the pool would kill them."""
        if (pool := self._connected()) is None:
            return
        try:
            ended = [pool.call(PoolInterface.tasks_ended)]
            if not ray.wait(ended, timeout=SILENT_S)[0]:
                print(
                    "iris_ray: waiting for tasks that have returned and still run threads or exit handlers, such as an"
                    " upload (exit_grace says for how long). Ctrl-C ends them",
                    file=sys.stderr,
                )
                ray.wait(ended)
        except (KeyboardInterrupt, SystemExit):  # the latter: SIGTERM in a Ray driver
            print("iris_ray: their unfinished work is lost", file=sys.stderr)

    def end_with_process(self) -> None:
        """Wait for tasks like `wait_for_tasks`, and end the pool if this process is a task's.

        A pool holds objects of the process that made it, so Ray keeps a task's process as long as its pool lives. A
        pool with warm slices would keep the hosts of both for another minute.
        """
        self.wait_for_tasks()
        if TaskFiles.of_this_task() is not None and self._connected() is not None:
            with self._lock, contextlib.suppress(RayError):  # it is gone already
                self._end()

    def _connected(self) -> Actor[PoolInterface] | None:
        """Return the pool, if it is on the cluster to which this process is connected now."""
        with self._lock:
            there = self._pool is not None and self._cluster == this_connection()
            return self._pool if there else None

    def _current(self) -> Actor[PoolInterface]:
        context, cluster = ray.get_runtime_context(), this_connection()
        if self._pool is None or self._cluster != cluster:
            # On the caller's own node, whose fate the pool shares; elsewhere might be a preemptible TPU host.
            # An actor that asks for no resource at all may be sent to a node that has just died (Ray 2.60).
            here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
            anchor = {f"node:{ray.util.get_node_ip_address()}": 0.001}
            starting = begin_to_start_controller()  # while Ray starts the pool's process
            starter = None if starting is None else stat_of(starting.pid)
            if starting is not None:
                threading.Thread(target=starting.wait, daemon=True).start()
            self._pool = Actor(
                PoolActor.options(resources=anchor, scheduling_strategy=here).remote(
                    starter=None if starter is None else starter.identity
                )
            )
            self._cluster = cluster
            self._calls = 0
            self._end_when_idle(self._pool)
        return self._pool

    def _end_when_idle(self, pool: Actor[PoolInterface]) -> None:
        """Have the pool ended once it has done all calls and holds no slice, unless a new call comes first.

        No thread waits for that: a thread in ray.get when the driver disconnects crashes the process (Ray 2.60).
        Ray does not repeat the call: a repeated one that is open when the driver disconnects makes Ray 2.60 print
        "Failed to push error to driver".
        """
        calls = max(1, self._calls)
        idle = pool.call(PoolInterface.until_idle, calls).future()

        def idle_or_gone(done: "concurrent.futures.Future[None]") -> None:
            error = done.exception()
            if isinstance(error, ActorUnavailableError):  # its process died, and Ray starts another
                follow_up = self._ask_again
            else:
                follow_up = self._forget if error else self._end_if_unused
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and the pool with it
                threading.Thread(target=follow_up, args=(pool, calls), name=FOLLOW_UP, daemon=True).start()

        idle.add_done_callback(idle_or_gone)

    def _end_if_unused(self, pool: Actor[PoolInterface], calls: int) -> None:
        with self._lock:
            if self._pool is not pool or not ray.is_initialized():
                return
            if self._calls == calls:
                self._end()
            else:
                self._end_when_idle(pool)

    def _ask_again(self, pool: Actor[PoolInterface], calls: int) -> None:
        """Ask the pool's next process when it is idle: its process died, and Ray starts another."""
        time.sleep(RESTART_S)
        with self._lock:
            if self._pool is pool and ray.is_initialized():
                self._end_when_idle(pool)

    def _forget(self, pool: Actor[PoolInterface], calls: int) -> None:
        """Forget a pool whose process is gone; the next call makes a new pool."""
        with self._lock:
            if self._pool is pool:
                self._pool = None

    def _end(self) -> None:
        if self._pool is not None:
            ray.kill(self._pool.handle)
        self._pool = None


pool_of_this_process = CallerPool()
atexit.register(pool_of_this_process.end_with_process)  # before Ray's own handler, which was registered earlier


def submit_detached(request: RunRequest) -> tuple["ray.ObjectRef[list[Any]]", Actor[PoolInterface]]:
    """Start a job that does not end with this process, in a pool of its own, which ends with the job.

    A child that may be adopted ends with the job of its task instead.

    Return the reference to its results, and the pool that runs it.
    """
    spec = request.spec
    head = {"node:__internal_head__": 0.001}  # the calling process's own node may be a host that is taken away
    # The cluster's GCS keeps the arguments of a pool's constructor, for restarts. Of a large argument it keeps only a
    # reference, to an object that goes with this process; and values of secrets may not be there.
    large = len(cloudpickle.dumps(request)) > INLINE_BYTES
    passed_later = large or any(one.value for one in request.secrets.values())
    actor = PoolActor.options(
        max_restarts=0 if passed_later else -1,
        resources=head,
        lifetime="detached",
        name=detached_pool(spec.job_id),
        namespace=NAMESPACE,
    ).remote(None if passed_later else request, child=request.child_of)
    pool = Actor[PoolInterface](actor)
    if passed_later:
        try:
            ray.get(pool.call(PoolInterface.begin, request))
        except BaseException:  # such as Ctrl-C: the caller gets no handle with which to cancel the job
            ray.kill(pool.handle)
            raise
    return pool.with_options(name=f"submit({spec.name})", **REPEATED).call(PoolInterface.results), pool
