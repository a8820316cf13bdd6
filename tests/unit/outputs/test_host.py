"""The part on a host keeps the directories of running tasks within the limit that operators have set."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.host.services import TaskOver
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs import host as outputs_host
from iris_ray.outputs.core import Removed
from iris_ray.outputs.directory import OutputDirectory, Trimmed, outputs_directory
from iris_ray.outputs.host import OutputsOnHost

ATTEMPT = TaskAttemptId("job", 3, 2)


class PoolThatKnows:
    """Answers as a pool does."""

    def __init__(self, most_bytes: int | None) -> None:
        self.limit = most_bytes

    async def most_bytes(self) -> int | None:
        return self.limit


class PartAlone:
    """The part of one host, without an actor around it."""

    def __init__(self, directory: Path, pool: PoolThatKnows) -> None:
        files = TaskFiles.of_process(directory, os.getpid())
        StartedTask(ATTEMPT.job_id, ATTEMPT.task_index, ATTEMPT.attempt, 1, "label").write(files)
        self.watches: dict[int, Any] = {os.getpid(): SimpleNamespace(files=files, gone=asyncio.Event())}
        self.output = OutputDirectory.of(outputs_directory(directory), ATTEMPT)
        self.output.create()
        host: Any = SimpleNamespace(
            directory=lambda: directory, watches=self.watches, pool=Actor.here(pool, "the pool")
        )
        running: Any = SimpleNamespace(in_thread=asyncio.to_thread)
        self.part = OutputsOnHost(host, running)

    async def until(self, is_so: Callable[[], bool]) -> None:
        looking = asyncio.ensure_future(self.part.run())
        try:
            async with asyncio.timeout(20):
                while not is_so():
                    assert not looking.done()
                    await asyncio.sleep(0.02)
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_host, "LOOK_S", 0.05)
    monkeypatch.setattr(outputs_host, "ASK_S", 0.0)


def test_running_task_is_kept_within_the_limit_of_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        pool = PoolThatKnows(None)
        alone = PartAlone(tmp_path, pool)
        (alone.output.path / "x").write_bytes(os.urandom(1 << 20))
        looked = asyncio.ensure_future(alone.until(lambda: False))
        await asyncio.sleep(0.5)
        assert (alone.output.path / "x").exists()
        pool.limit = 1 << 19
        while (alone.output.path / "x").exists() or "task_output_gb" not in caplog.text:  # it is removed, then told
            await asyncio.sleep(0.02)
        looked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looked

    asyncio.run(main())
    assert "task 3 of job has more in its $IRIS_OUTPUT_DIR than may be kept" in caplog.text
    assert "task_output_gb" in caplog.text


def test_unused_directory_goes_once_the_task_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        alone = PartAlone(tmp_path, PoolThatKnows(1 << 30))
        await alone.part.happened([TaskOver(ATTEMPT)])
        assert not alone.output.path.parent.exists()

    asyncio.run(main())


def test_task_that_no_look_has_seen_is_kept_within_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It fills its directory and ends between two looks."""

    async def main() -> None:
        alone = PartAlone(tmp_path, PoolThatKnows(1 << 19))
        (alone.output.path / "x").write_bytes(os.urandom(1 << 20))
        await alone.part.happened([TaskOver(ATTEMPT)])
        assert list(alone.output.path.iterdir()) == []
        assert alone.output.removed().files == 1

    asyncio.run(main())
    assert "1 of its oldest files, 1 MB, were removed" in caplog.text


def test_what_can_not_be_removed_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int | None] = []

    def trim(self: OutputDirectory, most_bytes: int | None) -> Trimmed:
        trimmed.append(most_bytes)
        return Trimmed(Removed(), "'x': Operation not permitted")

    monkeypatch.setattr(OutputDirectory, "trim", trim)
    asyncio.run(PartAlone(tmp_path, PoolThatKnows(None)).until(lambda: len(trimmed) >= 3))
    assert caplog.text.count("'x': Operation not permitted") == 1


def test_pause_between_looks_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is: programs write meanwhile."""
    monkeypatch.setattr(outputs_host, "PAUSE", 1e6)
    monkeypatch.setattr(outputs_host, "LONGEST_PAUSE_S", 0.1)
    looks: list[int | None] = []

    def trim(self: OutputDirectory, most_bytes: int | None) -> Trimmed:
        looks.append(most_bytes)
        return Trimmed(Removed())

    monkeypatch.setattr(OutputDirectory, "trim", trim)
    asyncio.run(PartAlone(tmp_path, PoolThatKnows(None)).until(lambda: len(looks) >= 3))
