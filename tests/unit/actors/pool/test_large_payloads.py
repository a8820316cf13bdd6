"""Large results and exceptions stay in their task's process until the pool has fetched them. In virtual time."""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from iris_ray.actors.protocol.messages import TaskLaunch
from iris_ray.actors.protocol.payloads import INLINE_BYTES
from iris_ray.model.outcomes import TaskEnd
from tests.support.hosts_in_process import Process, Task
from tests.support.ray_in_process import Handle
from tests.support.virtual_cluster import VirtualCluster, played


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
        run = Process.run

        async def with_stored_payload(process: Process, launch: TaskLaunch) -> TaskEnd:
            end = await run(process, launch)
            stored = is_stored(launch, end)
            if stored is False:
                return end
            payload: Any = Stored(bytes(end.payload or b""), None if stored is None else process.handle)
            return replace(end, payload=payload)

        monkeypatch.setattr(Process, "run", with_stored_payload)

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
