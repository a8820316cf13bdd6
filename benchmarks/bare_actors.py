"""The least that Ray needs to reach hosts: actors and tasks without iris_ray, beside which `launch.py` measures."""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Answering:
    """The least that Ray can do on a host: answer a call."""

    def call(self) -> None: ...


Bare = ray.remote(num_cpus=0)(Answering)


class BareSlice:
    """Stands for a SliceActor: calls its hosts."""

    def __init__(self, hosts: list[Any]) -> None:
        self._hosts = hosts

    async def run(self) -> None:
        await asyncio.gather(*(host.call.remote() for host in self._hosts))


class BareController:
    """Stands for the Controller: gives an order to the pool that submits a job, and answers."""

    async def submit(self, pool: Any) -> None:
        pool.assign.remote()


class BarePool:
    """Stands for the SlicePoolManager: submits the job, and on the order has all slices run."""

    def __init__(self, controller: Any, slices: list[Any]) -> None:
        self._controller, self._slices, self._ordered = controller, slices, asyncio.Event()

    async def assign(self) -> None:
        self._ordered.set()

    async def run(self) -> None:
        await self._controller.submit.remote(ray.get_runtime_context().current_actor)
        await self._ordered.wait()
        self._ordered.clear()
        await asyncio.gather(*(one.run.remote() for one in self._slices))


@ray.remote(num_cpus=0, max_calls=1, max_retries=0)
def pinned_task() -> None:
    """What a simple launcher does on each host: a task in a fresh worker."""


def tpu_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("TPU")]


def on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def call_new_actors(places: Sequence[str]) -> None:
    """Start an actor on each of these nodes, all at once, and call it."""
    kinds = [Bare.options(scheduling_strategy=on(place)) for place in places]
    ray.get([actor.call.remote() for actor in [kind.remote() for kind in kinds]])


class BareActors:
    """One actor on each host, and others through which a call takes the way of a launch.

    Args:
        nodes: of the hosts, slice by slice.
        hosts: of each slice.
    """

    def __init__(self, nodes: Sequence[str], hosts: int) -> None:
        self._actors = [Bare.options(scheduling_strategy=on(node)).remote() for node in nodes]
        self.fan_out()
        first = range(0, len(nodes), hosts)
        slices = [self._on(nodes[i], BareSlice, self._actors[i : i + hosts]) for i in first]
        self._pool = self._on(None, BarePool, self._on(None, BareController), slices)
        self.take_the_way()

    def _on(self, node: str | None, kind: type, *arguments: Any) -> Any:
        strategy = {} if node is None else {"scheduling_strategy": on(node)}
        return ray.remote(kind).options(num_cpus=0, **strategy).remote(*arguments)

    def fan_out(self) -> None:
        """Call the actor of each host."""
        ray.get([actor.call.remote() for actor in self._actors])

    def take_the_way(self) -> None:
        """Call them by the way of a launch."""
        ray.get(self._pool.run.remote())
