"""The runners that a SlotManager has: hosts that the Controller gave to its jobs, each with its agent."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray.actors.slots.visible_devices import visible_devices
from iris_ray.model.constraints import Attributes
from iris_ray.slots.devices import Device, DeviceKind, DeviceSet, Runner
from iris_ray.slots.events import Event, RunnerJoined, RunnerLost


@dataclass(frozen=True, slots=True)
class RunnerHere:
    """What the task that keeps a host for slots says of it.

    Attributes:
        runner_id: of the runner; the same in every attempt of its job.
        job_id: the job that has the host.
        kind, devices, memory: what slots use there: how many devices, and the bytes of each.
        attributes: typed facts about the host.
        agent: its agent.
        group, bundle: the reservation in Ray, and the part of it that is this host's.
        gpus: the numbers of its GPUs on the host, by the number of the device.
        variables: environment variables that make a process one of the task's.
    """

    runner_id: str
    job_id: str
    kind: DeviceKind
    devices: int
    memory: int
    attributes: Attributes
    agent: ActorHandle
    group: PlacementGroup
    bundle: int
    gpus: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def runner(self) -> Runner:
        """Return the runner as the reconciler sees it."""
        return Runner(self.runner_id, (Device(self.kind, self.memory),) * self.devices, self.attributes)

    def placement(self) -> PlacementGroupSchedulingStrategy:
        """Return how an actor is placed on this host and nowhere else."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)

    def variables_for(self, devices: DeviceSet) -> dict[str, str]:
        """Return the environment of a process that uses these devices."""
        return {**self.variables, **visible_devices(self.kind, devices, self.devices, self.gpus)}


@dataclass(eq=False)
class Runners:
    """Says which runners are there and which are gone.

    Attributes:
        hear: takes the events.
        by_id: those that are there.
    """

    hear: Callable[[Event], None]
    by_id: dict[str, RunnerHere] = field(default_factory=dict)
    _closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(self, here: RunnerHere) -> bool:
        """Use a host until its agent is gone, or all hosts are given back; return whether they are."""
        self.by_id[here.runner_id] = here
        self.hear(RunnerJoined(here.runner()))
        waits = {asyncio.ensure_future(_until_gone(here.agent)), asyncio.ensure_future(self._closed.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            if self.by_id.get(here.runner_id) is here:  # else it is there again, in another attempt
                del self.by_id[here.runner_id]
                self.hear(RunnerLost(here.runner_id))
        return self._closed.is_set()

    def agent(self, runner_id: str) -> ActorHandle | None:
        """Return the agent of a runner; None if the runner is gone."""
        here = self.by_id.get(runner_id)
        return None if here is None else here.agent

    def close(self) -> None:
        """Give all hosts back."""
        self._closed.set()


async def _until_gone(agent: ActorHandle) -> None:
    with suppress(RayError):
        await agent.watch.remote()
