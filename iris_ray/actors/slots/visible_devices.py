"""Which variables tell a process the devices that are its own."""

from collections.abc import Sequence

from iris_ray.slots.devices import DeviceKind

_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""The rectangle that so many chips form, as libtpu writes it."""


def visible_devices(kind: DeviceKind, devices: Sequence[int], of_host: int) -> dict[str, str]:
    """Return variables by which CUDA, ROCm, libtpu and JAX see these devices of a host and no others.

    Args:
        kind: what they are.
        devices: their numbers on the host.
        of_host: how many the host has.
    """
    listed = ",".join(map(str, devices))
    gpus = listed if kind is DeviceKind.GPU else ""
    found = {"CUDA_VISIBLE_DEVICES": gpus, "HIP_VISIBLE_DEVICES": gpus}
    if kind is DeviceKind.CPU:
        return {**found, "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    if kind is DeviceKind.TPU and len(devices) < of_host:
        bounds = _CHIP_BOUNDS[len(devices)]
        found |= {"TPU_VISIBLE_CHIPS": listed, "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
    return found
