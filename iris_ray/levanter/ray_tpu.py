"""The two functions of ``levanter.infra.ray_tpu`` whose positional arguments differ from those of `iris_ray`."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from iris_ray.client.run_on_pod import run_on_pod
from iris_ray.client.run_options import takes
from iris_ray.model.options import PodGangOptions, default_of


@takes()
def run_on_pod_resumable(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    max_retries_preemption: int = default_of("max_retries_preemption", "run_on_pod_resumable"),
    max_retries_failure: int = default_of("max_retries_failure"),
    **options: Unpack[PodGangOptions],
) -> list[Any]:
    """`iris_ray.run_on_pod_resumable` on one slice, with Levanter's order of arguments.

    Options, results and errors as for `iris_ray.run_on_pod`.
    """
    return run_on_pod_multislice_resumable(
        remote_fn, tpu_type, 1, max_retries_preemption, max_retries_failure, **options
    )


@takes()
def run_on_pod_multislice_resumable(
    remote_fn: Callable[[], Any] | Any,
    tpu_type: str,
    num_slices: int | Sequence[int],
    max_retries_preemption: int = default_of("max_retries_preemption", "run_on_pod_multislice_resumable"),
    max_retries_failure: int = default_of("max_retries_failure"),
    **options: Unpack[PodGangOptions],
) -> list[Any]:
    """`iris_ray.run_on_pod_multislice_resumable`, with Levanter's order of arguments.

    Options, results and errors as for `iris_ray.run_on_pod`.
    """
    return run_on_pod(
        remote_fn,
        tpu_type,
        num_slices=num_slices,
        max_retries_preemption=max_retries_preemption,
        max_retries_failure=max_retries_failure,
        **options,
    )
