"""One runner: a reservation in Ray on one host, and its agent."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from iris_ray.actors.slots.messages import SlotHosts
from iris_ray.actors.slots.runner_agent import RunnerAgent
from iris_ray.model.constraints import AttributeValue
from iris_ray.slots.devices import Device, DeviceKind, Runner
from iris_ray.slots.events import Event, RunnerJoined, RunnerLost

PAUSE_S = 1.0
"""After a host was lost, before another one is asked for."""

_Agent = ray.remote(RunnerAgent)


@dataclass(eq=False)
class ReservedRunner:
    """Asks Ray for a host, says when it is there and when it is gone, and asks again.

    Attributes:
        name: of the runner; the id of each incarnation begins with it.
        hosts: what is wanted.
        hear: takes the events.
    """

    name: str
    hosts: SlotHosts
    hear: Callable[[Event], None]
    group: PlacementGroup | None = None
    agent: ActorHandle | None = None
    _task: "asyncio.Task[None] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Begin, once."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._keep())

    async def close(self) -> None:
        """Give the host back. Ray ends what runs there."""
        if self._task is not None:
            self._task.cancel()
        await self._give_back()

    def placement(self) -> PlacementGroupSchedulingStrategy:
        """Return how an actor is placed on this runner and nowhere else."""
        assert self.group is not None, f"runner {self.name} has no host"
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)

    def runner(self, node_id: str) -> Runner:
        """Return the runner as the reconciler sees it."""
        count = 1 if self.hosts.kind is DeviceKind.CPU else self.hosts.devices
        facts = {"node-id": node_id, **self.hosts.labels}
        attributes = {key: AttributeValue(value) for key, value in facts.items()}
        return Runner(self.name, (Device(self.hosts.kind, self.hosts.memory),) * count, attributes)

    async def _keep(self) -> None:
        while True:
            with suppress(RayError):
                await self._hold()
            await self._give_back()
            await asyncio.sleep(PAUSE_S)

    async def _hold(self) -> None:
        """Wait for a host, and then until it is gone."""
        labels = [dict(self.hosts.labels)] if self.hosts.labels else None
        self.group = placement_group([self.hosts.bundle], bundle_label_selector=labels)
        options = {"num_cpus": 0, "max_concurrency": 1000, "scheduling_strategy": self.placement()}
        self.agent = _Agent.options(**options).remote()
        node_id = await self.agent.node_id.remote()
        with self._joined(node_id):
            await self.agent.watch.remote()

    @contextmanager
    def _joined(self, node_id: str) -> Iterator[None]:
        self.hear(RunnerJoined(self.runner(node_id)))
        try:
            yield
        finally:
            self.hear(RunnerLost(self.name))

    async def _give_back(self) -> None:
        group, self.group, self.agent = self.group, None, None
        if group is not None:
            await asyncio.to_thread(_remove, group)


def _remove(group: Any) -> None:
    with suppress(RayError):
        remove_placement_group(group)
