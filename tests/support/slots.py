"""Short words for tests of slots: gigabytes, runners and models."""

from iris_ray.slots.devices import Device, DeviceKind, Runner
from iris_ray.slots.models import ModelSpec

GB = 10**9


def gpus(name: str = "a", count: int = 2, gigabytes: int = 80) -> Runner:
    return Runner(name, (Device(DeviceKind.GPU, gigabytes * GB),) * count)


def chips(name: str = "t", count: int = 4, gigabytes: int = 16) -> Runner:
    return Runner(name, (Device(DeviceKind.TPU, gigabytes * GB),) * count)


def model(name: str = "m", gigabytes: int = 40, **kw) -> ModelSpec:
    """A model for one device, unless ``memory`` says otherwise."""
    return ModelSpec(name, **{"memory": {1: gigabytes * GB}, **kw})
