"""From a function and what it needs to a job that runs: what `run_on_pod` and `IrisClient` have in common."""

import concurrent.futures
import contextlib
import functools
import getpass
import inspect
import math
import os
import pickle
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.host.task_environment import split_by_start
from iris_ray.actors.pool.slice_pool_manager import SlicePoolManager
from iris_ray.actors.wire.messages import HOST_SILENCE_S, ProcessSpec, RunRequest
from iris_ray.actors.wire.payloads import INLINE_BYTES, stored_if_large
from iris_ray.actors.wire.ray_internals import is_client_mode
from iris_ray.actors.wire.shared_names import NAMESPACE
from iris_ray.client.remote_options import function_and_options
from iris_ray.errors import InvalidFunctionError, InvalidRequestError, NoClusterError
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.jobs import CoschedulingConfig, JobSpec
from iris_ray.model.topology import TPUConfig
from iris_ray.model.workers import TPU, TPU_TOPOLOGY
from iris_ray.task.job_info import get_job_info

KEEP_WARM_S = 60.0

MAX_NAME_LENGTH = 100
"""Of a job's name: it is a part of ids, of keys and of file names."""
MAX_SPEC_BYTES = 100_000
"""Of all that the Controller gets to know of a job, and puts down in the cluster's key-value store."""
MAX_ENV_BYTES = 1 << 20
"""Of a job's variables in all, names included: they travel to every host with every attempt."""
MAX_VARIABLE_BYTES = 128 * 1024 - 1
"""Of one variable, ``NAME=value``: Linux starts no process with a longer one (MAX_ARG_STRLEN, less the NUL)."""


def make_job(
    fn: Callable[[], Any] | Any,
    config: TPUConfig | None,
    name: str | None,
    env: Mapping[str, str],
    keep_warm: float,
    preload: Sequence[str],
    stall_timeout: float | None = None,
    **spec: Any,
) -> RunRequest:
    """Check everything that can be checked without a cluster, and pack it up.

    Args:
        fn: a function without arguments, or a Ray remote function, whose options are honoured.
        config: the TPU type that it is to run on, if any.
        name: what to call it; its own name if left out.
        env: environment variables of the tasks, besides those in a remote function's ``runtime_env``.
        keep_warm: seconds that idle slices are kept.
        preload: modules that waiting task processes import ahead.
        stall_timeout: seconds without a heartbeat of any task after which the gang counts as hung; None: never.
        spec: the rest of `JobSpec`.

    Raises:
        InvalidRequestError: the first thing that is wrong, and how to mend it.
    """
    if isinstance(keep_warm, bool) or not isinstance(keep_warm, (int, float)) or not keep_warm >= 0:
        raise InvalidRequestError(f"keep_warm is {keep_warm!r}; give seconds, 0 or more")
    if stall_timeout is not None and not _is_positive(stall_timeout):
        raise InvalidRequestError(f"stall_timeout is {stall_timeout!r}; give seconds, more than 0, or None")
    if not isinstance(preload, (list, tuple)) or not all(isinstance(module, str) for module in preload):
        raise InvalidRequestError(f'preload is {preload!r}; give a list of module names, such as ["jax"]')
    if wrong := [m for m in preload if not all(part.isidentifier() for part in m.split("."))]:
        raise InvalidRequestError(f"preload holds {wrong[0]!r}, which is no name of a module")
    function, options = function_and_options(fn, config)
    inner = function.func if isinstance(function, functools.partial) else function
    own_name = getattr(inner, "__name__", type(inner).__name__)
    name = name or options.name or own_name.strip("<>")
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequestError(
            f"the job's name ({name[:20]}…) has {len(name)} characters, and the limit is {MAX_NAME_LENGTH}"
        )
    job = JobSpec(
        job_id=name,
        name=name,
        owner="whoever submits it",
        user=current_user(),
        device=config.name if config else None,
        resources=spec.pop("resources", {}) | options.resources,
        **spec,
    )
    if (size := len(pickle.dumps(job))) > MAX_SPEC_BYTES:
        raise InvalidRequestError(
            f"what job {name} asks for takes {size:,} bytes, and the limit is {MAX_SPEC_BYTES:,}; name fewer or shorter"
            " constraints, preferences, tolerations and resources"
        )
    require_no_arguments(function, own_name)
    env = options.env | dict(env)
    require_env_travels(env)
    at_start, at_run = split_by_start(env)
    runtime_env = dict(options.runtime_env)
    if at_start:
        runtime_env["env_vars"] = at_start
    process = ProcessSpec(runtime_env, tuple(preload))
    payload = pickle_function(function, own_name)
    return RunRequest(job, payload, at_run, process, float(keep_warm), stall_timeout, host_silence_s())


def host_silence_s(environ: Mapping[str, str] = os.environ) -> float:
    """How long a host may be silent before it counts as lost: ``$IRIS_RAY_HOST_SILENCE_S``, or 5 seconds.

    Raises:
        InvalidRequestError: the variable is no number of 2 or more; a host is asked once a second.
    """
    written = environ.get("IRIS_RAY_HOST_SILENCE_S")
    if written is None:
        return HOST_SILENCE_S
    try:
        seconds = float(written)
    except ValueError:
        seconds = 0.0
    if not seconds >= 2.0:
        raise InvalidRequestError(f"IRIS_RAY_HOST_SILENCE_S is {written!r}; give seconds, 2 or more")
    return seconds


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def slices_of(config: TPUConfig, coscheduling: CoschedulingConfig) -> dict[str, Any]:
    """What a job on whole slices of a type says in its `JobSpec`. What the live nodes report wins over the rule."""
    return {
        "replicas": config.vm_count,
        "coscheduling": coscheduling,
        "whole_groups": True,
        "constraints": (of_type(config),),
        "resources": {TPU: float(config.chips_per_vm)},
    }


def of_type(config: TPUConfig) -> Constraint:
    """Hosts of slices of that very type."""
    return Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(config.name))


def identified(request: RunRequest) -> RunRequest:
    """With an id that no job had before. What a task of a job submits is called ``<that job's id>/…``."""
    parent = get_job_info()
    own = f"{request.spec.name.replace('/', '-')}-{secrets.token_hex(4)}"
    return replace(request, spec=replace(request.spec, job_id=f"{parent.job_id}/{own}" if parent else own))


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


def require_env_travels(env: Mapping[str, str]) -> None:
    """Refuse variables that no process can have, or that are too much for a launch. No message has their values."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidRequestError(
                f"the environment variable {name!r} can't be set: its name is empty or holds =, or there is a NUL in it"
            )
    sizes = {name: len(f"{name}={value}".encode(errors="replace")) for name, value in env.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    instead = "put it into a file, or let the function close over it: that travels by Ray's object store"
    if sizes.get(largest, 0) > MAX_VARIABLE_BYTES:
        raise InvalidRequestError(
            f"the environment variable {largest[:100]} takes {sizes[largest]:,} bytes, and the limit is"
            f" {MAX_VARIABLE_BYTES:,}: Linux starts no process with a longer one; {instead}"
        )
    if (total := sum(sizes.values())) > MAX_ENV_BYTES:
        raise InvalidRequestError(
            f"the job's {len(sizes)} environment variables take {total:,} bytes in all, and the limit is"
            f" {MAX_ENV_BYTES:,}; the largest is {largest[:100]} ({sizes[largest]:,} bytes); {instead}"
        )


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


# Made once: Ray exports a class anew for each ray.remote(...).
# A pool whose process dies is started anew, and the runs in it are repeated there; nothing else is.
_SlicePoolManager = ray.remote(num_cpus=0, max_concurrency=10_000, max_restarts=-1)(SlicePoolManager)
REPEATED: dict[str, Any] = {"max_task_retries": -1}


def submit_detached(request: RunRequest) -> tuple["ray.ObjectRef[list[Any]]", ActorHandle]:
    """Have a job run that does not end with this process: in a pool of its own, which ends with the job.

    Returns:
        The reference to its results, and the pool that runs it.
    """
    spec = request.spec
    head = {"node:__internal_head__": 0.001}  # the calling process's own node may be a host that is taken away
    large = len(request.function) > INLINE_BYTES  # what a pool is made with is kept by the cluster, for its restarts
    pool = _SlicePoolManager.options(
        max_restarts=0 if large else -1,
        resources=head,
        lifetime="detached",
        name=f"pool/{spec.job_id}",
        namespace=NAMESPACE,
    ).remote(None if large else request)
    if large:
        ray.get(pool.begin.remote(request))
    results = pool.results.options(name=f"submit({spec.name})", **REPEATED).remote()
    return results, pool


class CallerPool:
    """The SlicePoolManager of the calling process: made at the first call, ended when it has nothing left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ActorHandle | None = None
        self._cluster: str | None = None
        self._calls = 0

    def submit(self, request: RunRequest) -> tuple["ray.ObjectRef[list[Any]]", ActorHandle]:
        """Have a job run; the reference to its results, and the pool that runs it."""
        with self._lock:
            pool = self._current()
            self._calls += 1
            request = replace(request, function=stored_if_large(request.function))
            results = pool.run.options(name=f"run_on_pod({request.spec.name})", **REPEATED).remote(request)
            return results, pool

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
            self._pool = _SlicePoolManager.options(resources=anchor, scheduling_strategy=here).remote()
            self._cluster = cluster
            self._calls = 0
            self._end_when_idle(self._pool)
        return self._pool

    def _end_when_idle(self, pool: ActorHandle) -> None:
        """Have the pool ended once it has done all calls and holds no slice, unless a new call is faster.

        No thread waits for that: one that sits in ray.get when the driver disconnects crashes the process (Ray 2.60).
        """
        calls = max(1, self._calls)
        idle = pool.until_idle.options(**REPEATED).remote(calls).future()

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


pool_of_this_process = CallerPool()
