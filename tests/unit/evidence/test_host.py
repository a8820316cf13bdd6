"""The part on a host: what it keeps of a task that hangs, and says of one that has crashed."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.host.services import DeadTask
from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.evidence import files, host
from iris_ray.evidence.dumps import remembered
from iris_ray.evidence.files import ChipSample, Place
from iris_ray.evidence.host import EvidenceOnHost
from iris_ray.model.job_info import JobInfo
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.outputs.directory import OutputDirectory, outputs_directory
from tests.support.core_dumps import core_dump

ATTEMPT = TaskAttemptId("job", 3, 2)


def part_of(directory: Path, *, devices: object = ()) -> EvidenceOnHost:
    """Return the part of one host, on which this process runs a task."""
    task = TaskFiles.of_process(directory, os.getpid())
    StartedTask(ATTEMPT.job_id, ATTEMPT.task_index, ATTEMPT.attempt, 1, "label").write(task)
    watches = {os.getpid(): SimpleNamespace(files=task, runs=True)}
    this: Any = SimpleNamespace(directory=lambda: directory, watches=watches, devices=devices)
    running: Any = SimpleNamespace(in_thread=asyncio.to_thread)
    return EvidenceOnHost(this, running)


def dead(pid: int, logs: Path) -> DeadTask:
    info = JobInfo("job", "job/task-3", 3, 4, 2, 0, 1, "slice-a", 1, "127.0.0.1:20002")
    launch: Any = SimpleNamespace(info=info, env={"TPU_LOG_DIR": str(logs)})
    return DeadTask(pid, frozenset({pid}), launch, 0.0)


def test_what_was_seen_while_the_task_ran_is_kept_with_its_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path), str(tmp_path / "logs"))
    seen = {os.getpid(): place}, ChipSample(1.0, [{"device": 0}])
    monkeypatch.setattr(host, "look_at", lambda pids, now: seen)
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(host, "keep_hang", lambda *given: kept.append(given))

    async def main() -> None:
        part = part_of(tmp_path)
        looking = asyncio.ensure_future(part.run())
        while not part._samples:
            await asyncio.sleep(0.01)
        looking.cancel()
        await part.keep_evidence(os.getpid())

    asyncio.run(main())
    ((directory, attempt, pids, _, where, samples),) = kept
    assert (directory, attempt, where, samples) == (tmp_path, ATTEMPT, place, [seen[1]])
    assert pids[0] == os.getpid()


def test_tasks_without_chips_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SAMPLE_S", 0.01)
    monkeypatch.setattr(host, "look_at", lambda pids, now: pytest.fail("it costs time"))

    async def main() -> None:
        looking = asyncio.ensure_future(part_of(tmp_path, devices=None).run())
        await asyncio.sleep(0.2)
        assert not looking.done()
        looking.cancel()

    asyncio.run(main())


def test_crash_before_the_first_look_is_looked_for_where_its_job_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CORE_PATTERN", tmp_path / "nothing")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "tpu_driver.host.root.log.FATAL.20261130-040000.99").write_text("Check failed")
    part = part_of(tmp_path)
    assert asyncio.run(part.died(dead(98, logs))) == ""
    said = asyncio.run(part.died(dead(99, logs)))
    assert said == "see the last lines of libtpu's logs: iris-ray cp --output job/3:iris-ray . --attempt 2"
    directory = OutputDirectory.of(outputs_directory(tmp_path), ATTEMPT)
    assert "Check failed" in (directory.path / "iris-ray" / "libtpu.txt").read_text()


def test_core_dump_of_a_crash_before_the_first_look_is_in_the_directory_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core_pattern").write_text("core\n")
    (tmp_path / "core_uses_pid").write_text("1\n")
    monkeypatch.setattr(files, "CORE_PATTERN", tmp_path / "core_pattern")
    monkeypatch.setattr(files, "CORE_USES_PID", tmp_path / "core_uses_pid")
    (tmp_path / "core.99").write_bytes(core_dump())
    monkeypatch.chdir(tmp_path)
    said = asyncio.run(part_of(tmp_path, devices=None).died(dead(99, tmp_path)))
    assert f"({tmp_path}/core.99 on its host)" in said
    assert [dump.path for dump in remembered(tmp_path)] == [f"{tmp_path}/core.99"]


def test_clock_that_is_set_back_hides_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CORE_PATTERN", tmp_path / "nothing")
    part = part_of(tmp_path)
    began_at = time.time()
    monkeypatch.setattr(time, "time", lambda: began_at - 3600.0)
    log = tmp_path / "tpu_driver.host.root.log.FATAL.20261130-040000.99"
    log.write_text("Check failed")
    os.utime(log, (time.time(), time.time()))
    task = replace(dead(99, tmp_path), began_at=began_at)
    assert "the last lines of libtpu's logs" in asyncio.run(part.died(task))
