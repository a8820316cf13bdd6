"""The readers that the Controller starts on hosts end once nobody has used them for a while."""

import asyncio
import errno
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from iris_ray.errors import UnknownNameError
from iris_ray.logs import reader
from iris_ray.logs.controller import LogsInController, find_attempt_log
from iris_ray.logs.core import LastLines, LogPosition, TaskLog
from iris_ray.logs.files import LogPiece
from iris_ray.logs.reader import IDLE_S, READ_TIMEOUT_S
from tests.support.virtual_time import in_virtual_time
from tests.support.worlds import S, World


class Readers:
    """Stands in for the readers: each has one line of every task.

    Attributes:
        there: the addresses of the hosts on which one runs.
        killing_fails: whether the next attempt to end one raises.
        error: what happens when one reads its disk; None: nothing bad.
        hangs: whether one that is asked never answers.
    """

    def __init__(self) -> None:
        self.there: list[str] = []
        self.killing_fails = False
        self.error: OSError | None = None
        self.hangs = False

    def start(self, node_id: str, address: str) -> Any:
        self.there.append(address)
        return SimpleNamespace(address=address, read=SimpleNamespace(remote=self._read))

    def kill(self, actor: Any) -> None:
        if self.killing_fails:
            self.killing_fails = False
            raise ValueError("unexpected")
        self.there.remove(actor.address)

    async def _read(self, questions: object) -> list[LogPiece]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise RayTaskError("read", "a traceback", self.error)
        return [LogPiece(0, b"loss 2.31\n", 10)]


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    there = Readers()
    monkeypatch.setattr(reader, "start_log_reader", there.start)
    monkeypatch.setattr(ray, "kill", there.kill)
    return there


@pytest.fixture
def world() -> Iterator[World]:
    """A world in which a gang runs on two hosts."""
    world = World()
    world.add_slice("a")
    world.start(max_retries_failure=1)
    yield world
    world.check()


class Logs(LogsInController):
    """The part in a Controller that has a world's state."""

    def __init__(self, world: World) -> None:
        controller: Any = SimpleNamespace(state=world.state, job=world.state.jobs.__getitem__)
        running: Any = None
        super().__init__(controller, running)

    async def fetch(self, index: int) -> TaskLog:
        return await self.fetch_task_logs("job", index, LogPosition(), 100)


async def read_all(logs: Logs) -> list[bytes]:
    """Read what each task has printed."""
    return [(await logs.fetch(index)).data for index in range(2)]


@in_virtual_time
async def test_idle_reader_ends_and_next_question_starts_another(world: World, readers: Readers) -> None:
    logs = Logs(world)
    for _ in range(2):
        assert await read_all(logs) == [b"loss 2.31\n"] * 2
        assert len(readers.there) == 2
        await asyncio.sleep(2 * IDLE_S)
        assert not readers.there


def test_log_of_process_is_on_its_host() -> None:
    """To the Controller two processes of a host are one task, and each has a log."""
    world = World()
    world.add_slice("a")
    world.start(processes_per_host=2)
    state, job = world.state, world.state.jobs["job"]
    nodes = [find_attempt_log(state, job, process, None).node_id for process in range(4)]
    assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2
    assert nodes[0] != nodes[2]
    with pytest.raises(UnknownNameError, match="task of job"):
        find_attempt_log(state, job, 4, None)


@in_virtual_time
async def test_readers_end_although_one_end_fails(
    world: World, readers: Readers, caplog: pytest.LogCaptureFixture
) -> None:
    await read_all(Logs(world))
    readers.killing_fails = True
    await asyncio.sleep(3 * IDLE_S)
    assert not readers.there
    assert "ending idle log readers failed" in caplog.text


@in_virtual_time
async def test_questions_for_lost_hosts_are_answered_however_many_there_are(world: World, readers: Readers) -> None:
    """After a restart of the Controller it looks for the hosts of earlier attempts, two searches at a time."""
    job, logs, loop = world.state.jobs["job"], Logs(world), asyncio.get_running_loop()
    world.long_run()
    world.report(job, S.FAILED)
    world.confirm(job)
    world.schedule()
    readers.hangs, began = True, loop.time()
    answers = await asyncio.gather(*(logs.fetch_task_logs("job", 0, LogPosition(1), 100) for _ in range(50)))
    assert {answer.note for answer in answers} == {
        "the Controller was restarted and does not find the host that it ran on, and nothing that it printed came here"
        " before"
    }
    assert loop.time() - began <= 2 * READ_TIMEOUT_S + 1.0


@in_virtual_time
async def test_log_on_faulty_disk_is_replaced_by_last_lines(world: World, readers: Readers) -> None:
    logs, job = Logs(world), world.state.jobs["job"]
    readers.error = OSError(errno.EIO, os.strerror(errno.EIO))
    logs._memory.remember(LastLines("job", 0, 1, job.task(0).node_id or "", 10, b"loss 2.31\n"))
    found = await logs.fetch(0)
    assert found.data == b"loss 2.31\n"
    assert "can't be read: [Errno 5] Input/output error; these are the last lines" in (found.note or "")
