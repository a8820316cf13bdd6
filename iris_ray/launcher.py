"""The ``run_on_pod`` family: run a function on every host of one or several TPU slices, all or none."""

import concurrent.futures
import contextlib
import functools
import getpass
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.messages import ProcessSpec, RunRequest
from iris_ray.actors.pool import SlicePoolManager
from iris_ray.actors.ray_internals import is_client_mode
from iris_ray.errors import InvalidFunctionError, InvalidRequestError, IrisError, NoClusterError, RemoteUserError
from iris_ray.multislice import slice_counts
from iris_ray.remote_options import function_and_options
from iris_ray.retry import MAX_RETRIES_FAILURE, MAX_RETRIES_PREEMPTION
from iris_ray.task_env import split_by_start
from iris_ray.topology import get_tpu_config

KEEP_WARM_S = 60.0
MAX_RETRIES_PREEMPTION_RESUMABLE = 1_000_000


def run_on_pod(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int] = 1,
    *,
    max_retries_preemption: int = MAX_RETRIES_PREEMPTION,
    max_retries_failure: int = MAX_RETRIES_FAILURE,
    keep_warm: float = KEEP_WARM_S,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Run a function on every host of TPU slices and wait for its results.

    One fresh process per host, all or none. A lost host means that its slice is lost: the gang restarts on another
    one, from the beginning of the function, so a long one keeps checkpoints.

    Args:
        remote_fn: a function without arguments, or a Ray remote function (its ``runtime_env``, ``num_cpus``,
            ``memory`` and ``resources`` are honoured; options that can't be are refused).
        tpu_type: such as "v4-32" or "v5litepod-16".
        num_slices: how many slices, or the counts that the function can use: ``[2, 4]`` starts on 4 if they are free
            now, else on 2.
        max_retries_preemption: further attempts after lost hosts.
        max_retries_failure: further attempts after errors and crashes of the function.
        keep_warm: seconds that the slices and their processes are kept for the next call; 0 gives them back at once.
        preload: modules that the waiting task processes import ahead, such as ``["jax"]``. They must not read
            environment variables at import that the gang's setting changes.

    Returns:
        One result per host, ordered by slice id, then worker id.

    Raises:
        InvalidRequestError: a bad argument; nothing was acquired.
        NoClusterError: Ray is not initialised and there is no cluster to connect to.
        ray.exceptions.RayTaskError: the function's own error, also an instance of the exception that it raised.
        TaskSetupError: the runtime environment or a module of ``preload`` can't be had on the hosts.
        TaskCrashedError: a task process died without an exception, more often than allowed.
        PreemptedTooManyTimesError: a RuntimeError.

    Example::

        results = run_on_pod(train, "v4-32", num_slices=2)
    """
    ref = run_on_pod_ray.remote(
        remote_fn,
        tpu_type,
        num_slices=num_slices,
        max_retries_preemption=max_retries_preemption,
        max_retries_failure=max_retries_failure,
        keep_warm=keep_warm,
        preload=preload,
    )
    try:
        results: list[Any] = ray.get(ref)
        return results
    except RayTaskError as error:
        if isinstance(error.cause, IrisError) and not isinstance(error.cause, RemoteUserError):
            raise error.cause from None  # ours: the message says it all, the actor's traceback nothing
        raise
    except BaseException:  # Ctrl-C above all: the gang must not go on without anybody waiting for it
        ray.cancel(ref)
        raise


class _RunOnPodRay:
    """``run_on_pod_ray.remote(...)``: like `run_on_pod`, but returns a Ray object reference at once.

    ``ray.get`` on it gives the list of results or raises the job's error; ``ray.cancel`` stops the gang, after which
    ``ray.get`` raises Ray's TaskCancelledError. Several runs of one process share its warm slices.
    """

    def remote(
        self,
        remote_fn: Callable[[], Any] | Any,
        tpu_type: str,
        num_slices: int | Sequence[int] = 1,
        max_retries_preemption: int = MAX_RETRIES_PREEMPTION,
        max_retries_failure: int = MAX_RETRIES_FAILURE,
        *,
        keep_warm: float = KEEP_WARM_S,
        preload: Sequence[str] = (),
    ) -> "ray.ObjectRef[list[Any]]":
        """Start the job; arguments and errors for bad ones as in `run_on_pod`."""
        request = make_request(
            remote_fn, tpu_type, num_slices, max_retries_preemption, max_retries_failure, keep_warm, preload
        )
        require_cluster()
        return _pool_of_this_process.submit(request)

    def options(self, **_: object) -> None:
        raise TypeError("run_on_pod_ray has no options; give them to your function: @ray.remote(...)")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise TypeError("call run_on_pod_ray.remote(...), as with any Ray remote function, or run_on_pod(...)")


run_on_pod_ray = _RunOnPodRay()


def run_on_pod_resumable(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int] = 1,
    *,
    max_retries_preemption: int = MAX_RETRIES_PREEMPTION_RESUMABLE,
    max_retries_failure: int = MAX_RETRIES_FAILURE,
    keep_warm: float = KEEP_WARM_S,
    preload: Sequence[str] = (),
) -> list[Any]:
    """`run_on_pod` for a function that resumes from its own checkpoints: a million preemptions are fine."""
    return run_on_pod(
        remote_fn,
        tpu_type,
        num_slices=num_slices,
        max_retries_preemption=max_retries_preemption,
        max_retries_failure=max_retries_failure,
        keep_warm=keep_warm,
        preload=preload,
    )


def run_on_pod_multislice(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    *,
    keep_warm: float = KEEP_WARM_S,
    preload: Sequence[str] = (),
) -> list[Any]:
    """`run_on_pod` on several slices without any retry: the first lost host or error ends the job."""
    return run_on_pod(
        remote_fn,
        tpu_type,
        num_slices=num_slices,
        max_retries_preemption=0,
        max_retries_failure=0,
        keep_warm=keep_warm,
        preload=preload,
    )


def run_on_pod_multislice_resumable(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    *,
    max_retries_preemption: int = MAX_RETRIES_PREEMPTION_RESUMABLE,
    max_retries_failure: int = MAX_RETRIES_FAILURE,
    keep_warm: float = KEEP_WARM_S,
    preload: Sequence[str] = (),
) -> list[Any]:
    """`run_on_pod_resumable` with the slice counts as an argument that must be given."""
    return run_on_pod_resumable(
        remote_fn,
        tpu_type,
        num_slices=num_slices,
        max_retries_preemption=max_retries_preemption,
        max_retries_failure=max_retries_failure,
        keep_warm=keep_warm,
        preload=preload,
    )


def release() -> None:
    """Give back every slice that this process keeps warm, now. Jobs that still run keep theirs until they end."""
    _pool_of_this_process.release()


# -- at the door ---------------------------------------------------------------------------------------------------


def make_request(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    max_retries_preemption: int,
    max_retries_failure: int,
    keep_warm: float,
    preload: Sequence[str],
) -> RunRequest:
    """Check everything that can be checked without a cluster.

    Raises:
        InvalidRequestError: the first thing that is wrong, and how to mend it.
    """
    if isinstance(remote_fn, str):
        raise InvalidFunctionError(
            f"the first argument is the str {remote_fn!r}; the function comes first, then the type"
        )
    config = get_tpu_config(tpu_type)
    counts = slice_counts(num_slices)
    budgets = {"max_retries_preemption": max_retries_preemption, "max_retries_failure": max_retries_failure}
    for name, value in budgets.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"{name} is {value!r}; give an int of 0 or more")
    if isinstance(keep_warm, bool) or not isinstance(keep_warm, (int, float)) or not keep_warm >= 0:
        raise InvalidRequestError(f"keep_warm is {keep_warm!r}; give seconds, 0 or more")
    if not isinstance(preload, (list, tuple)) or not all(isinstance(module, str) for module in preload):
        raise InvalidRequestError(f'preload is {preload!r}; give a list of module names, such as ["jax"]')
    if wrong := [m for m in preload if not all(part.isidentifier() for part in m.split("."))]:
        raise InvalidRequestError(f"preload holds {wrong[0]!r}, which is no name of a module")

    function, options = function_and_options(remote_fn, config)
    inner = function.func if isinstance(function, functools.partial) else function
    name = getattr(inner, "__name__", type(inner).__name__)
    require_no_arguments(function, name)
    at_start, at_run = split_by_start(options.env)
    runtime_env = dict(options.runtime_env)
    if at_start:
        runtime_env["env_vars"] = at_start
    return RunRequest(
        name=options.name or name.strip("<>"),
        function=pickle_function(function, name),
        user=current_user(),
        tpu_type=config.name,
        hosts_per_slice=config.vm_count,
        chips_per_host=config.chips_per_vm,
        num_slices=counts,
        env=at_run,
        resources=options.resources,
        num_cpus=options.resources.get("CPU"),
        process=ProcessSpec(runtime_env, tuple(preload)),
        max_retries_failure=max_retries_failure,
        max_retries_preemption=max_retries_preemption,
        keep_warm=float(keep_warm),
    )


def current_user() -> str:
    """Who this process works for: ``$IRIS_USER``, or the name of the operating system's account."""
    try:
        return os.environ.get("IRIS_USER") or getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as containers have them
        return str(os.getuid())


def require_no_arguments(function: Callable[..., Any], name: str) -> None:
    """Refuse a function that can't be called without arguments, or that would not run when called."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidFunctionError(f"{name} is an async function; give one that runs it: lambda: asyncio.run({name}())")
    if inspect.isgeneratorfunction(function):
        raise InvalidFunctionError(f"{name} is a generator; give a function that returns: lambda: list({name}())")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature; the call will tell
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidFunctionError(
            f"{name}{signature} can't be called without arguments ({error}); bind them first, for example with"
            f" functools.partial({name}, ...)"
        ) from None


def pickle_function(function: Callable[..., Any], name: str) -> bytes:
    """Pickle a function by value where it needs to be, or say what stands in the way."""
    try:
        payload: bytes = cloudpickle.dumps(function)
        return payload
    except Exception as error:
        raise InvalidFunctionError(
            f"{name} can't be pickled: {error}. It, or something that it refers to, does not travel between hosts"
            " (a lock, an open file, a connection, …); create such things inside the function"
        ) from error


def require_cluster() -> None:
    """Connect to the running cluster if this process has not done so.

    Raises:
        NoClusterError: there is none.
        InvalidRequestError: the process is a Ray Client.
    """
    if is_client_mode():
        raise InvalidRequestError(
            "this process is connected with Ray Client (ray://), which can't own the actors of a gang; run the script"
            " on the cluster, for example with `ray job submit -- python script.py`"
        )
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError as error:
            raise NoClusterError(
                "Ray is not initialised in this process and no running cluster was found. Call"
                " ray.init(address=...), submit the script with `ray job submit`, or try it on a simulated cluster:"
                " iris_ray.testing.SimulatedCluster"
            ) from error


class _ProcessPool:
    """The SlicePoolManager of the calling process: made at the first call, ended when it has nothing left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ActorHandle | None = None
        self._cluster: str | None = None
        self._calls = 0

    def submit(self, request: RunRequest) -> "ray.ObjectRef[list[Any]]":
        with self._lock:
            pool = self._current()
            self._calls += 1
            return pool.run.options(name=f"run_on_pod({request.name})").remote(request)

    def release(self) -> None:
        with self._lock:
            pool = self._pool
            if pool is None or not ray.is_initialized() or self._cluster != self._this_cluster():
                return
            with contextlib.suppress(RayError):  # it is gone already
                ray.get(pool.release.remote())  # without slices and jobs it ends in a moment, see _end_when_idle

    def _this_cluster(self) -> str:
        context = ray.get_runtime_context()
        return f"{context.gcs_address} {context.get_job_id()}"

    def _current(self) -> ActorHandle:
        context, cluster = ray.get_runtime_context(), self._this_cluster()
        if self._pool is None or self._cluster != cluster:
            # On the caller's own node, whose fate it shares; elsewhere it might land on a preemptible TPU host.
            # An actor that asks for no resource at all may be sent to a node that has just died (Ray 2.60).
            here = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
            anchor = {f"node:{ray.util.get_node_ip_address()}": 0.001}
            self._pool = (
                ray.remote(SlicePoolManager)
                .options(num_cpus=0, resources=anchor, max_concurrency=10_000, scheduling_strategy=here)
                .remote()
            )
            self._cluster = cluster
            self._calls = 0
            self._end_when_idle(self._pool)
        return self._pool

    def _end_when_idle(self, pool: ActorHandle) -> None:
        """Have the pool ended once it has done all calls and holds no slice, unless a new call is faster.

        No thread waits for that: one that sits in ray.get when the driver disconnects crashes the process (Ray 2.60).
        """
        calls = max(1, self._calls)
        idle = pool.until_idle.remote(calls).future()

        def idle_or_gone(done: "concurrent.futures.Future[None]") -> None:
            follow_up = self._forget if done.exception() else self._end_if_unused
            threading.Thread(target=follow_up, args=(pool, calls), daemon=True).start()

        idle.add_done_callback(idle_or_gone)

    def _end_if_unused(self, pool: ActorHandle, calls: int) -> None:
        with self._lock:
            if self._pool is not pool or not ray.is_initialized():
                return
            if self._calls == calls:
                self._end()
            else:
                self._end_when_idle(pool)

    def _forget(self, pool: ActorHandle, calls: int) -> None:
        """The pool's process is gone; the next call makes a new one."""
        with self._lock:
            if self._pool is pool:
                self._pool = None

    def _end(self) -> None:
        if self._pool is not None:
            ray.kill(self._pool)
        self._pool = None


_pool_of_this_process = _ProcessPool()
