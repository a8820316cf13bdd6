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
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs import host as outputs_host
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
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


def test_unused_directory_goes_once_the_task_is_gone(tmp_path: Path) -> None:
    async def main() -> None:
        alone = PartAlone(tmp_path, PoolThatKnows(1 << 30))
        ended = asyncio.get_running_loop().call_later(0.5, lambda: alone.watches.clear())
        await alone.until(lambda: not alone.output.path.exists())
        ended.cancel()
        assert not alone.watches, "a running task keeps its directory"

    asyncio.run(main())
