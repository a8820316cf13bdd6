"""A host whose disk is full, or can't be used: it says so, and runs nobody's code. The errors are the kernel's own."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from ray import cloudpickle

from iris_ray.actors.host.host_actor import TPUHostActor
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_process import TaskProcess
from iris_ray.actors.protocol.answers import Unfit
from iris_ray.actors.protocol.messages import HostPlace, HostReady, ProcessSpec, ProcessStart, TaskLaunch
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.outcomes import EndKind, TaskEnd
from tests.support.processes import Waiting, WaitingActor
from tests.support.waiting import wait_until

AS_ACTOR = ProcessSpec(as_actor=True)
FULL = Path("/dev/full")
"""Every write to it fails with ENOSPC."""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "host"
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(path))
    return path


def starts(*processes: WaitingActor, between: Callable[[], None] = lambda: None) -> list[Any]:
    """What a host answers when it is to start each of these processes; it always answers that it is there."""

    async def asked() -> list[Any]:
        actor = TPUHostActor(HostPlace("node-1", "127.0.0.1", "slice-a", 1), False, cast(Any, None))
        answers = []
        for process in processes:
            start = ProcessStart("slice-a", AS_ACTOR, cast(Any, process), frozenset(), "01")
            answers.append(await actor.start_process(start))
            assert await actor.healthy()
            between()
        await actor.teardown("slice-a")
        return answers

    return asyncio.run(asked())


def test_full_disk_is_reported_until_there_is_room(directory: Path, waiting: Waiting) -> None:
    ProcessLedger(directory, exclusive=False)
    first, second = waiting(), waiting()
    entry = directory / "shared-tasks" / f"{first.identity.pid}.json.{os.getpid()}"  # what `write_whole` writes first
    entry.symlink_to(FULL)
    pumps: list[WaitingActor] = []

    def between() -> None:
        names = {thread.name for thread in threading.enumerate()}
        pumps[:] = [process for process in (first, second) if f"output of {process.identity.pid}" in names]

    refusal, taken = starts(first, second, between=between)
    assert isinstance(refusal, Unfit)
    assert refusal.node_id == "node-1"
    assert refusal.why == "no task can start there: [Errno 28] No space left on device"
    assert refusal.reason == f"slice-a host 1: {refusal.why}"
    assert taken == HostReady(second.identity.pid, (), "")
    wait_until(lambda: not first.identity.runs())  # else nobody would end it
    assert pumps == [second], "nobody reads the output of a process that was refused"


@pytest.mark.parametrize("fails", ["mkfifo", "pipe"])
def test_repeated_refusals_leak_no_descriptor(
    directory: Path, waiting: Waiting, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A host that tasks share asks for many, and its actor stays."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    open_files: list[int] = []
    ProcessLedger(directory, exclusive=False)

    def between() -> None:
        open_files.append(len(os.listdir("/proc/self/fd")))
        monkeypatch.setattr(os, fails, fail)  # not before the event loop has begun

    _, *refusals = starts(*(waiting() for _ in range(4)), between=between)
    monkeypatch.undo()
    assert all(isinstance(refusal, Unfit) for refusal in refusals)
    assert len(set(open_files)) == 1


def test_host_without_directory_says_so(directory: Path, waiting: Waiting) -> None:
    directory.write_text("in the way")
    (refusal,) = starts(waiting())
    assert isinstance(refusal, Unfit)
    assert "File exists" in refusal.why


def test_host_with_directory_writable_by_others_says_so(directory: Path, waiting: Waiting) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    (refusal,) = starts(waiting())
    assert isinstance(refusal, Unfit)
    assert "can be written to by other users" in refusal.why


def test_task_that_cannot_be_recorded_runs_no_user_code(directory: Path, tmp_path: Path) -> None:
    ProcessLedger(directory)
    TaskFiles.of_process(directory, os.getpid()).started.symlink_to(FULL)
    ran = tmp_path / "ran"
    end = launched(ran.touch)
    assert (end.kind, end.error) == (EndKind.HOST_UNFIT, "no task can start there: [Errno 28] No space left on device")
    assert not ran.exists()


def test_disk_error_of_user_code_is_distinguished(directory: Path) -> None:
    ProcessLedger(directory)

    def fills_the_disk() -> None:
        Path("/dev/full").write_text("a checkpoint")

    end = launched(fills_the_disk)
    assert (end.kind, end.error) == (EndKind.DISK_ERROR, "OSError: [Errno 28] No space left on device")
    assert launched(lambda: os.stat("/nowhere/to/be")).kind is EndKind.RAISED


def launched(function: Callable[[], Any]) -> TaskEnd:
    info = JobInfo("job", "job/task-0", 0, 1, 1, 0, 1, "", 0, "127.0.0.1:20002")
    before = dict(os.environ)
    process = TaskProcess("127.0.0.1", (), ())
    try:
        multislice = MultisliceInfo("127.0.0.1", 0, 1, 20_000, 20_001)
        return process.run(TaskLaunch(cloudpickle.dumps(function), {}, info, multislice, None, "label"))
    finally:
        for held in process._held:
            held.close()
        os.environ.clear()
        os.environ.update(before)
