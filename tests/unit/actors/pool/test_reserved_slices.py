"""How long the slices that a pool holds may take to answer."""

import asyncio
import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.pool.reserved_slice import Generation, ReservedSlice
from iris_ray.actors.pool.reserved_slices import ReservedSlices, SpareFailed, in_words, is_broken
from iris_ray.actors.protocol.messages import AttemptOrder, HostPlace, ProcessSpec
from iris_ray.model.lifecycle import AttemptId
from iris_ray.state.events import SliceReleasedEvent
from tests.support import virtual_time
from tests.support.virtual_time import in_virtual_time


async def never(*_: object) -> None:
    await asyncio.Event().wait()


def slices_with(ready: "asyncio.Future[Any]") -> ReservedSlices:
    """One slice, a, whose actor does not answer."""
    answers_not = SimpleNamespace(healthy=never, end_processes=never)
    actors: Any = SimpleNamespace(speaker=Actor.here(answers_not, "slice a"), hosts=())
    hosts = (HostPlace("node", "10.0.0.1", "a", 0),)
    slices = ReservedSlices("pool")
    group: Any = SimpleNamespace()
    held = ReservedSlice(hosts, {"TPU": 4.0}, ProcessSpec(), group, actors, Generation(1, (), ready))
    held.has_started = ready.done()
    slices._held["a"] = held
    return slices


@in_virtual_time
async def test_idle_slice_with_silent_actor_is_lost() -> None:
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ready.set_result((1, 2, 3))
    assert (await slices_with(ready).lost_while_idle(), virtual_time.now()) == (("a",), 5.0)


@in_virtual_time
async def test_host_failing_to_remove_job_files_only_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its pool would wait for the end of that job for ever."""
    told: list[str] = []

    async def removes(job_id: str) -> None:
        told.append(job_id)

    async def has_a_faulty_disk(job_id: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    slices = slices_with(asyncio.get_running_loop().create_future())
    held = slices["a"]
    held.used_by = "job-1"
    removals = {"a host 0": has_a_faulty_disk, "a host 1": removes}
    hosts = [Actor.here(SimpleNamespace(job_over=removal), name) for name, removal in removals.items()]
    held.actors = cast(Any, SimpleNamespace(hosts=hosts))
    await slices.job_over("job-1")
    assert told == ["job-1"]
    assert "a host 0: the files of job job-1 may stay there: [Errno 5] Input/output error" in caplog.text


@in_virtual_time
async def test_slice_given_back_during_start_says_so() -> None:
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    answers = asyncio.ensure_future(slices_with(ready).all_ready(["a"], 5.0))
    await asyncio.sleep(0.1)
    ready.cancel()
    found = await answers
    assert all(map(is_broken, found.values()))
    assert in_words(found) == "a was given back while its processes started"


class Unwilling:
    """A slice that Ray takes back at the second try, once its processes have ended, which takes a while."""

    def __init__(self, name: str, ends_after_s: float = 0.0) -> None:
        self.name, self.in_use, self.tries = name, False, 0
        self.actor = Actor.here(SimpleNamespace(teardown=lambda: asyncio.sleep(ends_after_s)), name)

    def discard(self) -> None:
        self.tries += 1
        if self.tries < 2:
            raise RuntimeError("the GCS does not answer")


@in_virtual_time
async def test_slice_ray_does_not_take_is_given_back_again() -> None:
    """Its chips would stay reserved for as long as the pool lives."""
    slices = ReservedSlices("pool")
    released, retired = Unwilling("a"), Unwilling("b")
    slices._held |= cast(Any, {"a": released, "b": retired})
    assert slices.retire(["b"]) == [SliceReleasedEvent("b", "pool")]
    assert await slices.release_if(lambda _: True) == [SliceReleasedEvent("a", "pool")]
    await asyncio.sleep(5.0)
    assert (released.tries, retired.tries, slices.holds_any) == (2, 2, False)


@in_virtual_time
async def test_slice_has_left_once_all_its_holders_have() -> None:
    slices, releases = ReservedSlices("pool"), []
    for ends_after_s in (9.0, 3.0):
        slices._held |= cast(Any, {"a": Unwilling("a", ends_after_s)})
        releases.append(asyncio.ensure_future(slices.release_if(lambda _: True)))
        await asyncio.sleep(1.0)
    await slices.left("a")
    assert virtual_time.now() == 10.0
    assert not slices.holds_any


@in_virtual_time
async def test_spare_of_an_ended_job_leaves_the_slice_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for processes of another kind. If it retired the slice, the next job's spare would have none."""

    def start_processes(held: ReservedSlice, _: object) -> None:
        held.waiting = Generation(2, (), asyncio.get_running_loop().create_future())

    monkeypatch.setattr(ReservedSlice, "start_processes", start_processes)
    slices = slices_with(asyncio.get_running_loop().create_future())
    held, spares = slices["a"], []
    for job, process in (("job-1", ProcessSpec()), ("job-2", ProcessSpec(preload=("jax",)))):
        order = AttemptOrder(AttemptId(f"{job}/spare-1", 1), (held.hosts,), held.bundle, 1, 1, spare_for=job)
        spares.append(asyncio.ensure_future(slices.hold_ready(order, process, 0.0, 5.0)))
        await asyncio.sleep(0.1)
    assert not spares[1].done()
    with pytest.raises(SpareFailed) as failure:
        await spares[0]
    assert failure.value.broken == ()
    spares[1].cancel()
