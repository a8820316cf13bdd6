"""Large results and exceptions stay with their host's actor until the pool has fetched them. In virtual time."""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from iris_ray.actors.pool.attempt_end import AttemptShutdown
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace, TaskLaunch
from iris_ray.actors.protocol.payloads import INLINE_BYTES
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.outcomes import EndKind, TaskEnd
from tests.support.attempts import Controller, Slices, new_context
from tests.support.hosts_in_process import Host, Task
from tests.support.ray_in_process import Handle
from tests.support.virtual_cluster import VirtualCluster, played
from tests.support.virtual_time import in_virtual_time


@dataclass(frozen=True)
class Stored:
    """Stands for a reference to a payload in the store of a process, whose ``owner`` it is; None: that is gone."""

    payload: bytes
    owner: Handle | None

    def __await__(self) -> Generator[Any, None, bytes]:
        return self._fetched().__await__()

    async def _fetched(self) -> bytes:
        if self.owner is None or self.owner._is_dead:
            raise ActorDiedError
        return self.payload


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TaskLaunch, TaskEnd], bool | None]], None]:
    """Takes which payloads are stored: True; None: stored, and lost before they can be fetched."""

    def install(is_stored: Callable[[TaskLaunch, TaskEnd], bool | None]) -> None:
        run = Host.run

        async def with_stored_payload(host: Host, pid: int, launch: TaskLaunch) -> TaskEnd:
            end = await run(host, pid, launch)
            stored = is_stored(launch, end)
            if stored is False:
                return end
            payload: Any = Stored(bytes(end.payload or b""), None if stored is None else host.handle)
            return replace(end, payload=payload)

        monkeypatch.setattr(Host, "run", with_stored_payload)

    return install


class DetailedError(ValueError):
    pass


@played()
@pytest.mark.parametrize("size", [1000, 2 * INLINE_BYTES])
async def test_large_user_exception_arrives_as_itself(cluster: VirtualCluster, store: Any, size: int) -> None:
    store(lambda _, end: len(end.payload or b"") > INLINE_BYTES)

    results = cluster.run("job")
    first, _ = await cluster.runs("job", 2)
    first.end.set_exception(DetailedError("bad batch", size * "x"))
    with pytest.raises(DetailedError):
        await results


@played()
async def test_result_lost_with_its_process_is_computed_again(cluster: VirtualCluster, store: Any) -> None:
    def is_stored(launch: TaskLaunch, _: TaskEnd) -> bool | None:
        return None if (launch.info.attempt, launch.info.task_index) == (1, 1) else True

    async def work(task: Task) -> int:
        await asyncio.sleep(2.0)
        return task.info.attempt

    store(is_stored)

    results = cluster.run("job", work=work, max_retries_preemption=1)
    assert await results == [2, 2]
    assert await cluster.charged("job") == (0, 1)


@played()
async def test_large_exceptions_of_all_tasks_arrive_as_themselves(cluster: VirtualCluster, store: Any) -> None:
    store(lambda _, end: len(end.payload or b"") > INLINE_BYTES)

    async def work(task: Task) -> None:
        await asyncio.sleep(2.0)
        raise DetailedError("bad batch", 2 * INLINE_BYTES * "x")

    with pytest.raises(DetailedError):
        await cluster.run("job", work=work)


@in_virtual_time
@pytest.mark.parametrize("answers", [True, False])
async def test_large_exception_that_is_known_only_when_the_gang_stops_is_fetched(answers: bool) -> None:
    """It may be the first cause. A host that does not answer holds up the end by a moment only."""

    class Answer:
        def __await__(self) -> Generator[Any, None, bytes]:
            return (Stored(b"large", SimpleNamespace(_is_dead=False))._fetched() if answers else never()).__await__()  # type: ignore[arg-type]

    async def never() -> bytes:
        await asyncio.Event().wait()
        return b""

    payload, slices = Answer(), Slices()
    slices.ends = {0: TaskEnd(EndKind.RAISED, 1.0, payload, "DetailedError")}
    hosts = (HostPlace("node-0", "10.0.0.0", "a", 0),)
    order = AttemptOrder(AttemptId("job", 3), (hosts,), {"TPU": 4.0}, 1, 1)
    (end,) = (await AttemptShutdown(new_context(order, slices, Controller())).stop_all("another task ended")).values()
    assert end.payload == (b"large" if answers else payload)
