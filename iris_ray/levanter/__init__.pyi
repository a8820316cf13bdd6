from .ray_tpu import (
    MultisliceInfo,
    TpuCancelled,
    TPUConfig,
    TpuFailed,
    TpuPreempted,
    TpuRunError,
    TpuSuccess,
    get_tpu_config,
    run_on_pod,
    run_on_pod_multislice,
    run_on_pod_multislice_resumable,
    run_on_pod_ray,
    run_on_pod_resumable,
)
from .training import PRELOAD, run

__all__ = [
    "PRELOAD",
    "MultisliceInfo",
    "TPUConfig",
    "TpuCancelled",
    "TpuFailed",
    "TpuPreempted",
    "TpuRunError",
    "TpuSuccess",
    "get_tpu_config",
    "run",
    "run_on_pod",
    "run_on_pod_multislice",
    "run_on_pod_multislice_resumable",
    "run_on_pod_ray",
    "run_on_pod_resumable",
]
