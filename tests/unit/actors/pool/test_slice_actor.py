"""One slice's actor with hosts and task processes that are plain coroutines: calls that overtake, answers that fail."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

from iris_ray.actors.calls.liveness import SLICE_UNASKED_S
from iris_ray.actors.pool.slice_actor import SliceActor
from iris_ray.actors.protocol.answers import OtherVersion, SetupFailed
from iris_ray.actors.protocol.messages import HostReady, ProcessSpec, SliceReady, TaskLaunch
from iris_ray.actors.protocol.version import versions_here
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import EndKind, TaskEnd
from tests.support.virtual_time import in_virtual_time

PID = 7
RETURNED = TaskEnd(EndKind.RETURNED, 1.0, b"")


def handle(**methods: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    """What looks like the handle of an actor."""
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


class Host:
    """A TPU host, and what runs in its task processes."""

    def __init__(self) -> None:
        self.stopped: list[tuple[int, str]] = []
        self.tasks: dict[int, Callable[..., Coroutine[Any, Any, TaskEnd]]] = {}  # by pid
        self.actor = handle(healthy=self.healthy, stop=self.stop, run=self.run)

    async def healthy(self) -> bool:
        return True

    async def stop(self, pid: int, reason: str, exit_grace: float) -> TaskEnd:
        self.stopped.append((pid, reason))
        return TaskEnd(EndKind.STOPPED, 1.0, error=reason)

    async def run(self, pid: int, launch: TaskLaunch) -> TaskEnd:
        return await self.tasks[pid](launch)


def slice_actor(host: Host, task: Callable[..., Coroutine[Any, Any, Any]]) -> SliceActor:
    actor = SliceActor("a", [host.actor])
    actor._waiting, host.tasks = {1: [PID]}, {PID: task}
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
    assert host.stopped == [(PID, "not wanted any more")], "its process is of no use any more"


@in_virtual_time
async def test_stop_of_earlier_attempt_does_not_block_next() -> None:
    async def returns(_: TaskLaunch) -> TaskEnd:
        return RETURNED

    actor = slice_actor(Host(), returns)
    await actor.stop(AttemptId("job", 1), "not wanted any more")
    assert (await actor.run_remote_fn(AttemptId("job", 2), 1, [launch(attempt=2)], 5.0)) == {0: RETURNED}


@in_virtual_time
async def test_each_attempt_has_processes_of_its_own() -> None:
    def returns(what: bytes) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def run(_: TaskLaunch) -> TaskEnd:
            return TaskEnd(EndKind.RETURNED, 1.0, what)

        return run

    host = Host()
    actor, host.tasks = SliceActor("a", [host.actor]), {n: returns(b"%d" % n) for n in (1, 2, 3)}
    actor._waiting = {n: [n] for n in (1, 2, 3)}
    assert await actor.run_remote_fn(AttemptId("job", 1), 2, [launch()], 5.0) == {
        0: TaskEnd(EndKind.RETURNED, 1.0, b"2")
    }
    assert list(actor._waiting) == [1, 3]


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
    assert SLICE_UNASKED_S - 3.0 <= silent <= SLICE_UNASKED_S + 1.0


async def test_host_tells_its_versions_once() -> None:
    asked = Counter[str]()

    async def versions() -> dict[str, Any]:
        asked["versions"] += 1
        return versions_here()

    async def start_process(*_: object) -> HostReady:
        asked["start_process"] += 1
        return HostReady(PID, (1, 2, 3, 4), "10.0.0.1:7")

    actor = SliceActor("a", [handle(versions=versions, start_process=start_process)])
    for generation in range(3):
        ready = await actor.start_processes(generation, ProcessSpec(), (), (), "01", 1.0)
        assert isinstance(ready, SliceReady)
        assert ready.file_services == ("10.0.0.1:7",)
    assert asked == {"versions": 1, "start_process": 3}
    known = SliceActor("b", [handle(versions=versions, start_process=start_process)], fitting=[0])
    assert isinstance(await known.start_processes(1, ProcessSpec(), (), (), "01", 1.0), SliceReady)
    assert asked == {"versions": 1, "start_process": 4}


@in_virtual_time
async def test_large_slice_of_another_version_says_so_in_few_words() -> None:
    async def versions(number: int) -> dict[str, Any]:
        return versions_here() | {"protocol": 0, "version": f"0.0.{number}"}

    async def start_process(*_: object) -> HostReady:
        return HostReady(PID, (1, 2, 3, 4), "")

    hosts = [handle(versions=partial(versions, number), start_process=start_process) for number in range(9)]
    refused = await SliceActor("a", hosts).start_processes(1, ProcessSpec(), (), (), "01", 1.0)
    assert isinstance(refused, OtherVersion)
    assert refused.hosts == tuple(range(9))
    assert [f"0.0.{number} " in refused.reason for number in range(9)] == [True] * 4 + [False] * 5
    assert refused.reason.endswith("; and so on, 9 in all")


@in_virtual_time
async def test_processes_end_if_one_of_their_hosts_does_not_get_ready() -> None:
    """They would wait there for ever: the pool does not know them."""

    async def start_process(*_: object) -> HostReady:
        return HostReady(PID, (1, 2, 3, 4), "")

    async def fails(*_: object) -> SetupFailed:
        return SetupFailed("no such package", ())

    async def versions() -> dict[str, Any]:
        return versions_here()

    host = Host()
    hosts = [
        handle(versions=versions, start_process=start_process, stop=host.stop, healthy=host.healthy),
        handle(versions=versions, start_process=fails),
    ]
    failed = await SliceActor("a", hosts).start_processes(1, ProcessSpec(), (), (), "01", 1.0)
    assert failed == SetupFailed("no such package", (1,), works_elsewhere=True)
    await asyncio.sleep(1.0)
    assert [pid for pid, _ in host.stopped] == [PID]
