"""Short words for tests of slots: gigabytes, runners and models."""

from typing import Any

from iris_ray.actors.calls.asking import Actor
from iris_ray.model.constraints import AttributeValue
from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.actors.runners import HostHere
from iris_ray.slots.core.devices import Device, DeviceKind, Runner
from iris_ray.slots.core.fleet import SlotFleet
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.slot import Slot, SlotState

GB = 10**9


def in_state(fleet: SlotFleet, state: SlotState) -> list[Slot]:
    return [slot for slot in fleet.slots.values() if slot.state is state]


def gpus(name: str = "a", count: int = 2, gigabytes: int = 80) -> Runner:
    return Runner(name, (Device(DeviceKind.GPU, gigabytes * GB),) * count)


def chips(name: str = "t", count: int = 4, gigabytes: int = 16) -> Runner:
    return Runner(name, (Device(DeviceKind.TPU, gigabytes * GB),) * count)


def model(name: str = "m", gigabytes: int = 40, **kw) -> ModelSpec:
    """A model for one device, unless ``memory`` says otherwise."""
    return ModelSpec(name, **{"memory": {1: gigabytes * GB}, **kw})


def host_here(
    runner: str, agent: Any, attempt: int = 1, host: int = 0, hosts: int = 1, kind: DeviceKind = DeviceKind.GPU
) -> HostHere:
    """A host with one GPU, or of CPUs; one of several has four TPU chips."""
    kind, devices, gigabytes = (kind, 1, 80) if hosts == 1 else (DeviceKind.TPU, 4, 16)
    facts = {"node": AttributeValue(f"{runner}-{host}"), "zone": AttributeValue("z")}
    group: Any = None
    where = (Actor[RunnerAgent](agent), group, host)
    return HostHere(runner, "job", attempt, kind, devices, gigabytes * GB, facts, *where, host=host, hosts=hosts)
