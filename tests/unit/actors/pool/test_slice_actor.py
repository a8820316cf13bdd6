"""One slice's actor with hosts and task processes that are plain coroutines: calls that overtake, answers that fail."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError

from iris_ray.actors.calls.liveness import SLICE_UNASKED_S
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.messages import SliceReady, StandbyReady, TaskLaunch
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import EndKind, TaskEnd
from tests.support.virtual_time import in_virtual_time

PID = 7
CRASHED = TaskEnd(EndKind.CRASHED, 1.0, error="the task process was killed by SIGKILL")
RETURNED = TaskEnd(EndKind.RETURNED, 1.0, b"")


def handle(**methods: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """What looks like the handle of an actor."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


class Host:
    """A TPU host whose only task process runs until somebody stops it, or until it is `gone`."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.stopped: list[tuple[int, str]] = []
        self.actor = handle(healthy=self.healthy, stop=self.stop, how_it_ended=self.how_it_ended)

    async def healthy(self) -> bool:
        return True

    async def stop(self, pid: int, reason: str, exit_grace: float) -> TaskEnd:
        self.stopped.append((pid, reason))
        return TaskEnd(EndKind.STOPPED, 1.0, error=reason)

    async def how_it_ended(self, pid: int) -> TaskEnd:
        await self.gone.wait()
        return CRASHED


def slice_actor(host: Host, task: Callable[..., Coroutine[Any, Any, Any]]) -> SliceActor:
    actor = SliceActor("a", [host.actor])
    actor._standbys = {1: [(handle(run=task), PID)]}
    return actor


def launch(attempt: int = 1) -> TaskLaunch:
    info = JobInfo("job", "job/task-0", 0, 1, attempt, 0, 1, "a", 0, "10.0.0.1:1")
    return TaskLaunch(b"", {}, info, MultisliceInfo("10.0.0.1", 0, 1), None, "label")


async def never(*_: object) -> None:
    await asyncio.Event().wait()


@in_virtual_time
async def test_attempt_stopped_before_arrival_does_not_start() -> None:
    host = Host()
    actor = slice_actor(host, never)
    assert await actor.stop(AttemptId("job", 1), "not wanted any more") == {}
    ends, host = await actor.run_remote_fn(AttemptId("job", 1), 1, [launch()], 5.0), host
    assert ends[0] is not None
    assert (ends[0].kind, ends[0].error) == (EndKind.STOPPED, "not wanted any more")
    assert host.stopped == [(PID, "not wanted any more")], "the standby is of no use any more"


@in_virtual_time
async def test_stop_of_earlier_attempt_does_not_block_next() -> None:
    async def returns(_: TaskLaunch) -> TaskEnd:
        return RETURNED

    actor = slice_actor(Host(), returns)
    await actor.stop(AttemptId("job", 1), "not wanted any more")
    assert (await actor.run_remote_fn(AttemptId("job", 2), 1, [launch(attempt=2)], 5.0)) == {0: RETURNED}


@in_virtual_time
async def test_each_attempt_has_own_generation_of_standbys() -> None:
    def returns(what: bytes) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def run(_: TaskLaunch) -> TaskEnd:
            return TaskEnd(EndKind.RETURNED, 1.0, what)

        return run

    actor = SliceActor("a", [Host().actor])
    actor._standbys = {n: [(handle(run=returns(b"%d" % n)), n)] for n in (1, 2, 3)}
    assert await actor.run_remote_fn(AttemptId("job", 1), 2, [launch()], 5.0) == {
        0: TaskEnd(EndKind.RETURNED, 1.0, b"2")
    }
    assert list(actor._standbys) == [3]


@in_virtual_time
async def test_task_of_dead_process_ends_without_answer() -> None:
    host = Host()
    asyncio.get_running_loop().call_later(30.0, host.gone.set)
    assert (await slice_actor(host, never).run_remote_fn(AttemptId("job", 1), 1, [launch()], 5.0)) == {0: CRASHED}


@in_virtual_time
async def test_answer_shortly_after_process_end_counts() -> None:
    host = Host()

    async def returns_late(_: TaskLaunch) -> TaskEnd:
        await host.gone.wait()
        await asyncio.sleep(0.5)
        return RETURNED

    asyncio.get_running_loop().call_later(30.0, host.gone.set)
    assert (await slice_actor(host, returns_late).run_remote_fn(AttemptId("job", 1), 1, [launch()], 5.0)) == {
        0: RETURNED
    }


@in_virtual_time
@pytest.mark.parametrize("kind", [EndKind.NEVER_STARTED, EndKind.CRASHED])
async def test_memory_killed_process_has_run_only_by_hosts_word(kind: EndKind) -> None:
    """Ray kills standbys first. A job that finds one dead has not used up any memory."""

    async def is_killed(_: TaskLaunch) -> TaskEnd:
        raise OutOfMemoryError("the memory monitor has killed it")

    async def how_it_ended(_: int) -> TaskEnd:
        return TaskEnd(kind, 1.0, error="was killed by SIGKILL")

    host = Host()
    host.actor.how_it_ended.remote = how_it_ended
    end = (await slice_actor(host, is_killed).run_remote_fn(AttemptId("job", 1), 1, [launch()], 5.0))[0]
    assert end is not None
    assert end.kind is (kind if kind is EndKind.NEVER_STARTED else EndKind.OUT_OF_MEMORY)
    assert "killed by Ray, because the host's memory was nearly used up" in end.error


def asked_host() -> tuple[Host, list[float]]:
    """A host, and the times at which it is asked whether it is there."""
    host, asked = Host(), list[float]()

    async def healthy() -> bool:
        asked.append(asyncio.get_running_loop().time())
        return True

    host.actor.healthy.remote = healthy
    return host, asked


@in_virtual_time
async def test_host_of_returned_task_is_asked_until_stop() -> None:
    """Other slices may run on for hours. A host that nobody asks ends itself, and what its task still writes."""
    host, asked = asked_host()

    async def returns(_: TaskLaunch) -> TaskEnd:
        return RETURNED

    actor, now = slice_actor(host, returns), asyncio.get_running_loop().time
    await actor.run_remote_fn(AttemptId("job", 1), 1, [launch()], 5.0)
    for _ in range(100):
        await actor.ping()
        await asyncio.sleep(1.0)
    unasked = [now() - asked[-1]]
    await actor.stop(AttemptId("job", 1), None, 0.0)
    await asyncio.sleep(100.0)
    meanwhile, afterwards = [*unasked, now() - asked[-1]]
    assert meanwhile < 2.0
    assert afterwards > 98.0


@in_virtual_time
async def test_slice_not_asked_by_its_pool_stops_asking_hosts() -> None:
    """The pool may be gone. A host that nobody asks ends its task."""
    host, asked = asked_host()
    actor, now = slice_actor(host, never), asyncio.get_running_loop().time
    running = asyncio.ensure_future(actor.run_remote_fn(AttemptId("job", 1), 1, [launch()], 5.0))
    for _ in range(100):
        await actor.ping()
        await asyncio.sleep(1.0)
    last, until = now(), asked[-1]
    await asyncio.sleep(100.0)
    silent = asked[-1] - last
    await actor.ping()
    await asyncio.sleep(3.0)
    running.cancel()
    assert asked[-1] > now() - 3.0, "it asks again once it is asked"
    until, silent = last - until, silent
    assert until <= 1.1
    assert SLICE_UNASKED_S - 2.0 <= silent <= SLICE_UNASKED_S + 1.0


async def test_host_tells_its_versions_once_and_each_standby_its_own() -> None:
    asked = Counter[str]()

    def telling(who: str) -> Callable[[], Coroutine[Any, Any, dict[str, Any]]]:
        async def versions() -> dict[str, Any]:
            asked[who] += 1
            return versions_here()

        return versions

    async def ready() -> StandbyReady:
        return StandbyReady(PID, 1, "token", (1, 2, 3, 4), 1, 1, None)

    async def adopt(*_: object) -> str:
        return "10.0.0.1:7"

    actor = SliceActor("a", [handle(versions=telling("host"), adopt=adopt)])
    for generation in range(3):
        standby = handle(versions=telling("standby"), ready=ready)
        prepared = await actor.prepare(generation, [standby], 1.0)
        assert isinstance(prepared, SliceReady)
        assert prepared.file_services == ("10.0.0.1:7",)
    assert asked == {"host": 1, "standby": 3}
