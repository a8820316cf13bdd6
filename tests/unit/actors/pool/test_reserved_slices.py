"""How long the slices that a pool holds may take to answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

from iris_ray.actors.pool.reserved_slice import ReservedSlice
from iris_ray.actors.pool.reserved_slices import ReservedSlices
from iris_ray.actors.wire.messages import HostPlace, ProcessSpec
from tests.support import virtual_time


async def never(*_: object) -> None:
    await asyncio.Event().wait()


def test_idle_slice_whose_actor_is_silent_for_5_s_is_lost() -> None:
    async def looked_at() -> tuple[tuple[str, ...], float]:
        actor: Any = SimpleNamespace(healthy=SimpleNamespace(remote=never))
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ready.set_result((1, 2, 3))
        hosts = (HostPlace("node", "10.0.0.1", "a", 0),)
        slices = ReservedSlices("pool")
        group: Any = SimpleNamespace()
        slices._held["a"] = ReservedSlice(hosts, {"TPU": 4.0}, ProcessSpec(), group, actor, (), [], ready)
        return await slices.lost_while_idle(), virtual_time.now()

    assert virtual_time.run(looked_at()) == (("a",), 5.0)
