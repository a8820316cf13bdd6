"""The ``run_on_pod`` family: run a function on every host of one or several TPU slices, all or none."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, cast

import ray
from ray.exceptions import RayTaskError

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.services import module_of
from iris_ray.client.caller_pool import pool_of_this_process
from iris_ray.client.children import as_child, begin, children_outlive_attempts
from iris_ray.client.job_progress import results_of
from iris_ray.client.job_request import make_pod_request
from iris_ray.client.run_options import local_mode, takes, without_mode
from iris_ray.client.user_function import callers_error
from iris_ray.errors import UnknownNameError
from iris_ray.model.options import PodGangOptions, PodOptions, RetryOptions, RunOptions, default_of

if TYPE_CHECKING:
    from iris_ray.local.mode import Mode

JOB_IDS_KEPT = 10_000
"""The number of this process's newest jobs that `run_on_pod_ray.job_id` knows."""


@takes()
def run_on_pod(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    *,
    num_slices: int | Sequence[int] = 1,
    **options: Unpack[PodOptions],
) -> list[Any]:
    """Run a function on every host of TPU slices and wait for its results.

    Each host gets a fresh process (or several: ``processes_per_host``), and all start or none. If a host is lost,
    another slice replaces its own, and the gang restarts from the beginning of the function. A long function therefore
    has to write checkpoints.

    Args:
        remote_fn: a function without arguments, or a Ray remote function (its ``runtime_env``, ``num_cpus``,
            ``memory`` and ``resources`` are honoured; options that can't be are refused).
        tpu_type: such as "v4-32" or "v5litepod-16".
        num_slices: how many slices, or the numbers of slices that the function can use: ``[2, 4]`` starts on 4 if they
            are free now, else on 2.
        options: those of docs/options.md, such as ``spares=1``; ``help(run_on_pod)`` explains each.

    Returns:
        One result per process, ordered by slice id, then worker id, then process; one process per host by default.

    Raises:
        InvalidRequestError: a bad argument; nothing was acquired.
        TypeError: there is no such option; the message names a similar one, or all.
        LimitReachedError: the user has too many queued jobs, or too many tasks.
        NotPermittedError: the user may not use this team, secret or priority band.
        NoClusterError: Ray is not initialised and there is no cluster to connect to.
        ray.exceptions.RayTaskError: the function's own error, also an instance of the exception that it raised.
        TaskSetupError: the runtime environment or a module of ``preload`` is not available on the hosts.
        TaskCrashedError: a task process died without an exception, or the gang exceeded its ``stall_timeout``, more
            often than allowed. It is a `TaskOutOfMemoryError` if the process was killed because its host's memory was
            used up.
        JobUnschedulableError: the job did not run within ``scheduling_timeout``, a condition of ``after`` can no longer
            be met, or a constraint can't be evaluated.
        LaunchesFailedError: a JobUnschedulableError: 19 launches in a row failed, or at least 10 within the
            ``scheduling_timeout``, and the job has never run.
        PreemptedTooManyTimesError: the gang lost its hosts, or was lost for another cause that counts as a preemption,
            more often than ``max_retries_preemption`` allows.
        JobCancelledError: the job was cancelled, or its ``max_runtime`` is over.
        ControllerUnavailableError: the cluster's Controller could not be started or reached.

    Example::

        results = run_on_pod(train, "v4-32", num_slices=2)
    """
    mode = local_mode(options["mode"], options["simulate"])
    return run_request(_request(remote_fn, tpu_type, num_slices, **options), mode)


class _RunOnPodRay:
    """``run_on_pod_ray.remote(...)``: like `run_on_pod`, but returns a Ray object reference at once.

    A call of ``run_on_pod_ray(...)`` itself raises TypeError. ``ray.get`` on the reference returns the list of results
    or raises the job's error; ``ray.cancel`` stops the gang, after which ``ray.get`` raises Ray's TaskCancelledError.
    Several runs of one process share its warm slices.
    """

    def __init__(self) -> None:
        self._job_ids: dict[str, str] = {}

    @takes("run_on_pod_ray.remote")
    def remote(
        self,
        remote_fn: Callable[[], Any] | Any,
        tpu_type: str,
        num_slices: int | Sequence[int] = 1,
        max_retries_preemption: int = default_of("max_retries_preemption"),
        max_retries_failure: int = default_of("max_retries_failure"),
        **options: Unpack[PodGangOptions],
    ) -> "ray.ObjectRef[list[Any]]":
        """Start the job; arguments and errors for bad ones as in `run_on_pod`.

        In a local mode a Ray of this machine carries the reference, and is started if this process has none.
        """
        mode = local_mode(options["mode"], options["simulate"])
        request = _request(
            remote_fn,
            tpu_type,
            num_slices,
            max_retries_preemption=max_retries_preemption,
            max_retries_failure=max_retries_failure,
            **options,
        )
        job_id, results = start_request(request, mode)
        self._note(results, job_id)
        return results

    def job_id(self, reference: "ray.ObjectRef[list[Any]]") -> str:
        """Return the id of the job behind a reference, as ``iris-ray job status`` takes it.

        Raises:
            UnknownNameError: the reference is not one of this process's newest 10,000 jobs.
        """
        try:
            return self._job_ids[reference.hex()]
        except (AttributeError, KeyError):
            raise UnknownNameError(
                f"run_on_pod_ray.job_id: {reference!r} is not what run_on_pod_ray.remote returned in this process for"
                f" one of its newest {JOB_IDS_KEPT:,} jobs; give that reference itself"
            ) from None

    def _note(self, reference: "ray.ObjectRef[list[Any]]", job_id: str) -> None:
        """Remember a job by its reference's id; the reference itself would keep the results in memory."""
        self._job_ids[reference.hex()] = job_id
        while len(self._job_ids) > JOB_IDS_KEPT:
            self._job_ids.pop(next(iter(self._job_ids)), None)

    def options(self, **_: object) -> NoReturn:
        """Raise TypeError: your function carries the options, as in ``@ray.remote(num_cpus=4)``."""
        raise TypeError("run_on_pod_ray has no options; give them to your function: @ray.remote(...)")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("call run_on_pod_ray.remote(...), as with any Ray remote function, or run_on_pod(...)")


run_on_pod_ray = _RunOnPodRay()


@takes()
def run_on_pod_resumable(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    *,
    num_slices: int | Sequence[int] = 1,
    **options: Unpack[PodOptions],
) -> list[Any]:
    """`run_on_pod` for a function that resumes from its own checkpoints: a million preemptions are fine.

    Arguments, results and errors as for `run_on_pod`.
    """
    return run_on_pod(remote_fn, tpu_type, num_slices=num_slices, **options)


@takes()
def run_on_pod_multislice(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    **options: Unpack[PodGangOptions],
) -> list[Any]:
    """`run_on_pod` on several slices without any retry: the first lost host or error ends the job.

    Other arguments, results and errors as for `run_on_pod`.
    """
    never = {name: default_of(name, "run_on_pod_multislice") for name in RetryOptions.__optional_keys__}
    return run_on_pod(remote_fn, tpu_type, num_slices=num_slices, **cast(PodOptions, never | options))


@takes()
def run_on_pod_multislice_resumable(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    **options: Unpack[PodOptions],
) -> list[Any]:
    """`run_on_pod_resumable` with a required ``num_slices``."""
    return run_on_pod_resumable(remote_fn, tpu_type, num_slices=num_slices, **options)


def _request(
    remote_fn: Callable[[], Any] | Any, tpu_type: str, num_slices: int | Sequence[int], **options: Unpack[PodOptions]
) -> RunRequest:
    return make_pod_request(remote_fn, tpu_type, num_slices, **cast(RunOptions, without_mode(options)))


def run_request(request: RunRequest, mode: "Mode | None") -> list[Any]:
    """Run a request, wait for its results and return them. Raises like `run_on_pod`."""
    if mode is not None:
        results: list[Any] = module_of("local", "run").run_here(request, mode)
        return results
    job_id, ref = _start(request)
    try:
        return results_of(job_id, ref)
    except RayTaskError as error:
        raise callers_error(error) from None
    except BaseException:  # such as Ctrl-C: the gang must not go on when its caller has stopped waiting
        if not children_outlive_attempts():
            ray.cancel(ref)
        raise


def start_request(request: RunRequest, mode: "Mode | None") -> tuple[str, "ray.ObjectRef[list[Any]]"]:
    """Start a request, and return the job's id and a reference to its results at once.

    In a local mode a Ray of this machine carries the reference, and is started if this process has none.
    """
    if mode is not None:
        return request.spec.job_id, module_of("local", "run").start_here(request, mode)
    return _start(request)


def _start(request: RunRequest) -> tuple[str, "ray.ObjectRef[list[Any]]"]:
    job_id, results, *_ = begin(as_child(request))
    print(f"iris_ray: job {job_id}", file=sys.stderr)  # `RayJobs.status` reads it
    return job_id, results


def release() -> None:
    """Give back every slice that this process keeps warm. Jobs that still run keep theirs until they end.

    This first waits until the tasks that have returned have ended: they may still save or upload something. Call it
    before ``ray.shutdown()``, which ends them at once.
    """
    pool_of_this_process.release()
