"""Hosts for slots come and go."""

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayError

from iris_ray.actors.slots.runners import Runners
from iris_ray.slots.events import RunnerJoined, RunnerLost
from tests.support.slots import gpus


class Here:
    """A host whose agent's process dies at once, or never."""

    runner_id = "a"

    def __init__(self, dies: bool) -> None:
        async def watch() -> None:
            if dies:
                raise RayError("the agent's process died")
            await asyncio.Event().wait()

        self.agent = SimpleNamespace(watch=SimpleNamespace(remote=watch))

    def runner(self) -> Any:
        return gpus("a")


def kept(dies: bool) -> tuple[bool, list[type]]:
    async def keep() -> bool:
        waits = asyncio.ensure_future(runners.keep(here))
        await asyncio.sleep(0)
        if not dies:
            runners.close()
        return await waits

    heard: list[Any] = []
    runners = Runners(heard.append)
    here: Any = Here(dies)
    return asyncio.run(keep()), [type(event) for event in heard]


def test_whoever_keeps_a_host_hears_whether_it_is_given_back_or_its_agent_is_gone() -> None:
    assert kept(dies=True) == (False, [RunnerJoined, RunnerLost])
    assert kept(dies=False)[0] is True
