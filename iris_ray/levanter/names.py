"""The public names of `iris_ray.levanter`, those of other packages too."""

from iris_ray.client.run_on_pod import run_on_pod, run_on_pod_multislice, run_on_pod_ray
from iris_ray.levanter.docker import RunDockerOnPodConfig, run_docker_on_pod, submit_tpu_job_on_ray
from iris_ray.levanter.ray_tpu import run_on_pod_multislice_resumable, run_on_pod_resumable
from iris_ray.levanter.training import PRELOAD, run
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import TpuCancelled, TpuFailed, TpuPreempted, TpuRunError, TpuSuccess
from iris_ray.model.topology import TPUConfig, get_tpu_config

__all__ = [
    "PRELOAD",
    "MultisliceInfo",
    "RunDockerOnPodConfig",
    "TPUConfig",
    "TpuCancelled",
    "TpuFailed",
    "TpuPreempted",
    "TpuRunError",
    "TpuSuccess",
    "get_tpu_config",
    "run",
    "run_docker_on_pod",
    "run_on_pod",
    "run_on_pod_multislice",
    "run_on_pod_multislice_resumable",
    "run_on_pod_ray",
    "run_on_pod_resumable",
    "submit_tpu_job_on_ray",
]
