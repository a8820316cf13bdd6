"""Hosts for slots come and go."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayError

from iris_ray.slots.actors.runners import HostHere, Runners
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.events import RunnerJoined, RunnerLost
from tests.support.slots import host_here


class Agent:
    """Stands for a host's agent, whose process dies when it is told to."""

    def __init__(self) -> None:
        self.dies = asyncio.Event()
        self.watch = SimpleNamespace(remote=self._watch)

    async def _watch(self) -> None:
        await self.dies.wait()
        raise RayError("the agent's process died")


def kept(dies: bool) -> tuple[bool, list[type]]:
    async def hold() -> bool:
        here = host_here("a", Agent())
        waits = asyncio.ensure_future(runners.hold(here))
        await asyncio.sleep(0)
        here.agent.handle.dies.set() if dies else runners.close()
        return await waits

    heard: list[Any] = []
    runners = Runners(heard.append)
    return asyncio.run(hold()), [type(event) for event in heard]


def test_whoever_keeps_a_host_hears_whether_it_is_given_back_or_its_agent_is_gone() -> None:
    assert kept(dies=True) == (False, [RunnerJoined, RunnerLost])
    assert kept(dies=False)[0] is True


class Slices:
    """Runners of two hosts each."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.runners = Runners(self.heard.append)
        self._holds: list[asyncio.Future[bool]] = []

    async def arrives(self, host: int, attempt: int = 1) -> HostHere:
        here = host_here("t", Agent(), attempt, host, hosts=2)
        self._holds.append(asyncio.ensure_future(self.runners.hold(here)))
        await asyncio.sleep(0)
        return here

    async def goes(self, here: HostHere) -> None:
        here.agent.handle.dies.set()
        await asyncio.sleep(0.01)

    def new(self) -> list[type]:
        """What was heard since the last time."""
        found = [type(event) for event in self.heard]
        self.heard.clear()
        return found


def test_a_runner_of_several_hosts_joins_with_the_last_one_and_is_lost_with_the_first() -> None:
    async def story() -> None:
        slices = Slices()
        first = await slices.arrives(1)
        assert slices.new() == []
        second = await slices.arrives(0)
        (joined,) = slices.heard
        assert (joined.runner.kind, len(joined.runner.devices)) == (DeviceKind.TPU, 8)
        assert joined.runner.legal_sets == (tuple(range(8)),)
        assert list(joined.runner.attributes) == ["zone"]  # the hosts are different nodes
        assert slices.runners.by_id["t"].hosts == (second, first)
        slices.new()
        await slices.goes(first)
        assert slices.new() == [RunnerLost]
        await slices.goes(second)
        assert slices.new() == []

    asyncio.run(story())


def test_hosts_of_different_attempts_make_no_runner_and_the_end_of_an_old_one_takes_nothing_from_the_new() -> None:
    async def story() -> None:
        slices = Slices()
        old = await slices.arrives(0)
        new = await slices.arrives(1, attempt=2)
        assert slices.new() == []
        await slices.arrives(0, attempt=2)
        assert slices.new() == [RunnerJoined]
        await slices.goes(old)
        assert slices.new() == []
        await slices.goes(new)
        assert slices.new() == [RunnerLost]

    asyncio.run(story())
