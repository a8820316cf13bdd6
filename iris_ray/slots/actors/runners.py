"""The runners of a SlotManager: hosts that the Controller gave to its jobs, each with its agent."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_connection import find_controller
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.model.constraints import Attributes
from iris_ray.slots.actors.runner_agent import RunnerAgent
from iris_ray.slots.core.devices import Device, DeviceKind, Runner, runner_of_slice
from iris_ray.slots.core.events import Event, RunnerJoined, RunnerLost
from iris_ray.slots.core.reconciler import Reconciler, idle_runners, needs_room

SHARE_STEPS = 10_000
"""The number of steps from none of a device to all of it."""


@dataclass(frozen=True, slots=True)
class HostHere:
    """A host that a job's task keeps for slots.

    Attributes:
        runner_id: the id of the host's runner; the same in every attempt of its job.
        job_id, attempt: the job that has the host, and the number of its attempt.
        kind, devices, memory: the devices that slots use there: their number, and the bytes of the smallest.
        group, bundle: the placement group in Ray, and the number of this host's bundle.
        gpus: the names of its GPUs on the host, by the number of the device.
        sizes: the bytes that slots may use of each device, if the driver or the user said them of each.
        totals: the bytes of each whole GPU, if NVIDIA's driver said them.
        variables: environment variables that make a process one of the task's.
        host, hosts: the number of the host in the runner, and how many hosts the runner has.
    """

    runner_id: str
    job_id: str
    attempt: int
    kind: DeviceKind
    devices: int
    memory: int
    attributes: Attributes
    agent: Actor[RunnerAgent]
    group: PlacementGroup
    bundle: int
    gpus: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    host: int = 0
    hosts: int = 1
    sizes: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()

    def share(self, devices: Sequence[int], sizes: Sequence[int]) -> float:
        """Return the smallest share that these sizes, one for each device, make up of their devices, at most 1.

        The share is one of the whole GPU where NVIDIA's driver said how large it is, and otherwise of the bytes that
        slots may use. It is rounded down to `SHARE_STEPS`, so that slots that fill a GPU don't take more than it has.
        """
        of = self.totals or self.sizes
        steps = (
            size * SHARE_STEPS // (of[device] if of else self.memory)
            for device, size in zip(devices, sizes, strict=True)
        )
        return min(SHARE_STEPS, *steps) / SHARE_STEPS  # a user may have said more bytes than the GPU has

    def placement(self) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy that places an actor on this host and nowhere else."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)

    def variables_for(self, devices: Sequence[int]) -> dict[str, str]:
        """Return the environment of a process that uses these devices of the runner."""
        of_runner = self.devices * self.hosts
        return {**self.variables, **visible_devices(self.kind, devices, of_runner, self.gpus)}


@dataclass(frozen=True, slots=True)
class RunnerHere:
    """A runner whose hosts are all there.

    Attributes:
        hosts: one host, or all hosts of a slice in order. A slot has a process on each.
    """

    hosts: tuple[HostHere, ...]

    @property
    def job_id(self) -> str:
        """The job that has its hosts."""
        return self.hosts[0].job_id

    def runner(self) -> Runner:
        """Return the runner as the reconciler sees it, with the attributes that all its hosts share."""
        first = self.hosts[0]
        if len(self.hosts) == 1:
            sizes = first.sizes or (first.memory,) * first.devices
            return Runner(first.runner_id, tuple(Device(first.kind, each) for each in sizes), first.attributes)
        shared = set.intersection(*(set(host.attributes.items()) for host in self.hosts))
        return runner_of_slice(first.runner_id, sum(host.devices for host in self.hosts), first.memory, dict(shared))


@dataclass(eq=False)
class Runners:
    """The runners that are there, by id. It tells the reconciler (``hear``) which have joined, and which are lost."""

    hear: Callable[[Event], None]
    by_id: dict[str, RunnerHere] = field(default_factory=dict)
    _hosts: dict[tuple[str, int], dict[int, HostHere]] = field(default_factory=dict)  # by runner and attempt
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self, here: HostHere) -> bool:
        """Use a host until its agent is gone, or `close` gives all hosts back; return whether `close` did."""
        self._arrived(here)
        waits = {asyncio.ensure_future(_until_gone(here.agent)), asyncio.ensure_future(self._closed.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self._left(here)
        return self._closed.is_set()

    def close(self) -> None:
        """Give all hosts back."""
        self._closed.set()

    def _arrived(self, here: HostHere) -> None:
        """Add a host. Its runner joins when all its hosts of the same attempt are there."""
        hosts = self._hosts.setdefault((here.runner_id, here.attempt), {})
        hosts[here.host] = here
        if len(hosts) == here.hosts:
            runner = self.by_id[here.runner_id] = RunnerHere(tuple(hosts[number] for number in sorted(hosts)))
            self.hear(RunnerJoined(runner.runner()))

    def _left(self, here: HostHere) -> None:
        """Remove a host. Its runner is lost with it, unless another attempt has brought the runner back."""
        key = here.runner_id, here.attempt
        del self._hosts[key][here.host]
        if not self._hosts[key]:
            del self._hosts[key]
        runner = self.by_id.get(here.runner_id)
        if runner is not None and any(host is here for host in runner.hosts):
            del self.by_id[here.runner_id]
            self.hear(RunnerLost(here.runner_id))


async def _until_gone(agent: Actor[RunnerAgent]) -> None:
    with suppress(RayError):
        await agent.call(RunnerAgent.watch)


_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""The rectangle that a number of chips forms, as libtpu writes it."""


def visible_devices(
    kind: DeviceKind, devices: Sequence[int], of_runner: int, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment variables with which CUDA, ROCm, libtpu and JAX see these devices of a host and no others.

    Args:
        kind: the kind of the devices.
        devices: their numbers on the runner, in the order in which the process is to see them.
        of_runner: how many devices the runner has.
        gpus: the names of the runner's GPUs on its host; if empty, they have the same numbers as on the runner.
    """
    listed = ",".join(map(str, devices))
    named = ",".join(gpus[device] if gpus else str(device) for device in devices) if kind is DeviceKind.GPU else ""
    found = {"CUDA_VISIBLE_DEVICES": named, "HIP_VISIBLE_DEVICES": named}
    if kind is DeviceKind.GPU:  # by itself, CUDA counts the fastest GPU first; NVIDIA's driver, and Ray, count by bus
        return {**found, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if kind is DeviceKind.CPU:
        return {**found, "JAX_PLATFORMS": "cpu", "PJRT_DEVICE": "CPU"}
    if kind is DeviceKind.TPU and len(devices) < of_runner:
        bounds = _CHIP_BOUNDS[len(devices)]
        found |= {"TPU_VISIBLE_CHIPS": listed, "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
    return found


# -- yielding ----------------------------------------------------------------------------------------------------------

LOOK_S = 1.0
"""How often the SlotManager looks which runners are idle."""
ANSWER_S = 10.0
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Yielding:
    """Tells the Controller which jobs have hosts that their slots do not need now, so that other jobs may take them.

    Args:
        core: knows which runners are idle.
        runners: the runners that are there, by id.
        jobs: ids of the jobs.
        user: the user in whose name it asks.
    """

    core: Reconciler
    runners: Mapping[str, RunnerHere]
    jobs: Collection[str]
    user: str
    _said: dict[str, bool] = field(default_factory=dict)

    async def report(self, now: Callable[[], float]) -> None:
        """Call `report_changes` after `LOOK_S`. A Controller that can't be reached is told later."""
        await asyncio.sleep(LOOK_S)
        try:
            await self.report_changes(now())
        except (RayError, TimeoutError) as error:
            why = str(error) or f"it did not answer within {ANSWER_S:g} s"
            logger.warning("the Controller could not be told which hosts of slots are idle: %s", why)

    async def report_changes(self, now: float) -> None:
        """Report the jobs that have changed. After an error they are reported again, even if the report arrived."""
        found = self._found(now)
        changed = {job_id: yields for job_id, yields in found.items() if self._said.get(job_id) != yields}
        for job_id in changed:
            self._said.pop(job_id, None)
        if changed:
            async with asyncio.timeout(ANSWER_S):
                await self._tell(changed)
            self._said |= changed

    async def _tell(self, changed: Mapping[str, bool]) -> None:
        controller = await asyncio.to_thread(find_controller)
        if controller is None:
            raise TimeoutError("no Controller runs; the next job starts one")
        await Actor[ControllerInterface](controller).call(ControllerInterface.set_yielding, changed, self.user)

    def _found(self, now: float) -> dict[str, bool]:
        if needs_room(self.core):
            return dict.fromkeys(self.jobs, False)
        busy_ids = self.runners.keys() - idle_runners(self.core, now)
        busy = {self.runners[runner_id].job_id for runner_id in busy_ids}
        return {job_id: job_id not in busy for job_id in self.jobs}
