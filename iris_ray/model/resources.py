"""What each task of a job needs of its host."""

from dataclasses import dataclass

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import require, require_amount, require_int
from iris_ray.model.topology import TPUConfig, get_tpu_config

BYTES_PER_GB = 10**9


def tpu_device(tpu_type: str) -> TPUConfig:
    """Return a TPU type as a device to ask for, such as ``tpu_device("v4-32")``.

    Raises:
        UnknownTPUTypeError: there is no such type; the message has the nearest.
    """
    return get_tpu_config(tpu_type)


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """What each task of a job takes of its host.

    Args:
        cpu: CPUs, as Ray counts them. Without ``cpu``, ``memory_gb``, ``gpu`` and ``device``: one.
        memory_gb: memory in gigabytes (10^9 bytes).
        replicas: tasks; of a gang, per group. On slices of several hosts the number of a slice's hosts, which is the
            default.
        device: the TPU type; each task has all chips of its host. None: a task without TPU.
        gpu: GPUs, which no other task has meanwhile; ``CUDA_VISIBLE_DEVICES`` names them. Not with a TPU type.

    Raises:
        InvalidRequestError: an amount that makes no sense; the message names it.
    """

    cpu: float = 0.0
    memory_gb: float = 0.0
    replicas: int | None = None
    device: TPUConfig | None = None
    gpu: int = 0

    def __post_init__(self) -> None:
        require_amount("cpu", self.cpu)
        require_amount("memory_gb", self.memory_gb)
        require_int("gpu", self.gpu, 0)
        if self.replicas is not None:
            require_int("replicas", self.replicas, 1)
        is_device = isinstance(self.device, TPUConfig | None)
        require(is_device, "device", self.device, 'tpu_device("v4-32"), or None for no TPU')
        if self.device is not None and self.gpu:
            raise InvalidRequestError(f"gpu is {self.gpu}, but the hosts of a {self.device.name} slice have no GPUs")
