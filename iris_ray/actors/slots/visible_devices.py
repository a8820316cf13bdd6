"""Which variables tell a process the devices that are its own."""

from collections.abc import Sequence

from iris_ray.slots.devices import DeviceKind

_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""The rectangle that so many chips form, as libtpu writes it."""


def visible_devices(
    kind: DeviceKind, devices: Sequence[int], of_runner: int, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Return variables by which CUDA, ROCm, libtpu and JAX see these devices of a host and no others.

    Args:
        kind: what they are.
        devices: their numbers on the runner.
        of_runner: how many the runner has.
        gpus: the names of the runner's GPUs on its host; if there are none, the numbers are the same.
    """
    listed = ",".join(map(str, devices))
    named = ",".join(gpus[device] if gpus else str(device) for device in devices) if kind is DeviceKind.GPU else ""
    found = {"CUDA_VISIBLE_DEVICES": named, "HIP_VISIBLE_DEVICES": named}
    if kind is DeviceKind.CPU:
        return {**found, "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    if kind is DeviceKind.TPU and len(devices) < of_runner:
        bounds = _CHIP_BOUNDS[len(devices)]
        found |= {"TPU_VISIBLE_CHIPS": listed, "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
    return found
