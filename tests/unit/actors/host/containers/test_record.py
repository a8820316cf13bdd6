"""A host ends the containers of its tasks, whichever of its processes comes to do that."""

import asyncio
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from iris_ray.actors.host.containers import ContainerRecord, end_container
from iris_ray.actors.host.ledger import ProcessLedger
from iris_ray.actors.host.task_watch import TaskWatch
from iris_ray.actors.protocol.task_files import TOKEN_VARIABLE, TaskFiles
from tests.support.containers import StandIn
from tests.support.gangs import alive
from tests.support.processes import TOKEN, Make, Nursery, tree, watched
from tests.support.waiting import wait_until


def container_of(directory: Path, engine: StandIn, pid: int, *command: str) -> int:
    """Start a container that is recorded as that of a task's process, and whose client is gone; return its process."""
    name = f"of-{pid}"
    ContainerRecord(str(engine.path), name).write(TaskFiles.of_process(directory, pid))
    given = {**os.environ, TOKEN_VARIABLE: TOKEN}
    arguments = ["run", f"--name={name}", f"--label=iris-ray.container={name}", "--env=PATH", f"--env={TOKEN_VARIABLE}"]
    client = subprocess.Popen([engine.path, *arguments, "busybox", *command], env=given)
    wait_until(lambda: engine.pid(name) is not None)
    client.kill()
    client.wait()
    found = engine.pid(name)
    assert found is not None
    if command == WITHOUT_TOKEN:  # it has the token until `env` has become `sleep`
        wait_until(lambda: TOKEN_VARIABLE not in psutil.Process(found).environ())
    return found


WITHOUT_TOKEN = ("env", "-i", "sleep", "60")
"""A program that can't be found by its environment: only its engine can end it."""


def test_next_actor_on_the_host_ends_the_container_of_an_earlier_task(
    tmp_path: Path, engine: StandIn, nursery: Nursery
) -> None:
    process = nursery.sleeper()
    ProcessLedger(tmp_path).record(tree(process))
    pid = container_of(tmp_path, engine, process.pid, *WITHOUT_TOKEN)
    assert ProcessLedger(tmp_path).end_leftovers() == []
    assert not alive(pid)
    assert engine.containers() == []
    assert list((tmp_path / "tasks").iterdir()) == []


def test_container_that_can_not_be_ended_keeps_the_host_from_the_next_task_until_it_is(
    tmp_path: Path, engine: StandIn, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = nursery.sleeper()
    ledger, one = ProcessLedger(tmp_path), tree(process)
    ledger.record(one)
    pid = container_of(tmp_path, engine, process.pid, *WITHOUT_TOKEN)
    monkeypatch.setattr("iris_ray.actors.host.ledger.end_container", lambda files: end_container(files, 0.0))
    engine.break_down()
    name = f"of-{process.pid}"
    assert ledger.end_leftovers() == [f"container {name} (Cannot connect to the daemon)"]
    ledger.forget(one)  # a container whose task is forgotten is not
    assert ledger.end_leftovers() == [f"container {name} (Cannot connect to the daemon)"]
    assert alive(pid)
    engine.repair()
    monkeypatch.undo()
    assert ledger.end_leftovers() == []
    assert not alive(pid)


def test_task_that_is_stopped_ends_with_its_container(tmp_path: Path, engine: StandIn, make: Make) -> None:
    child = make("time.sleep(60)")
    pids = []

    async def stop(watch: TaskWatch) -> object:
        child.start()
        while not TaskFiles.of_process(tmp_path, child.process.pid).started.exists():
            await asyncio.sleep(0.01)
        pids.append(container_of(tmp_path, engine, child.process.pid, *WITHOUT_TOKEN))
        child.process.kill()
        child.process.wait()
        while not watch.ended:
            await asyncio.sleep(0.01)
        return await watch.end("cancelled")

    assert watched(child, tmp_path, stop) is None
    assert not any(map(alive, pids))
    assert engine.containers() == []


def test_container_of_a_task_that_runs_is_left_alone(tmp_path: Path, engine: StandIn, nursery: Nursery) -> None:
    task, leftover = nursery.sleeper(), nursery.sleeper()
    shared = ProcessLedger(tmp_path, exclusive=False)
    shared.record(tree(task, "another"))
    pid = container_of(tmp_path, engine, task.pid, *WITHOUT_TOKEN)
    exclusive = ProcessLedger(tmp_path)
    exclusive.record(tree(leftover))
    assert exclusive.end_leftovers() == []
    assert alive(pid)


def test_program_in_a_container_belongs_to_its_task_and_so_does_what_it_starts(
    tmp_path: Path, engine: StandIn, nursery: Nursery
) -> None:
    """Its first process carries the token; others may have another environment. So they are no strangers on chips."""
    process = nursery.sleeper()
    ledger = ProcessLedger(tmp_path)
    ledger.record(tree(process))
    pid = container_of(tmp_path, engine, process.pid, "sh", "-c", "env -i sleep 60; true")
    first = psutil.Process(pid)
    (child,) = wait_until(first.children)
    wait_until(lambda: child.name() == "sleep")
    assert TOKEN_VARIABLE not in child.environ()
    assert ledger.owns(first)
    assert ledger.owns(child)
    assert not ledger.owns(psutil.Process(nursery.sleeper().pid))


def test_task_without_a_container_needs_no_engine(tmp_path: Path) -> None:
    files = TaskFiles.of_process(tmp_path, 77)
    assert end_container(files) == []
    files.container.parent.mkdir()
    files.container.write_text("{")
    assert end_container(files) == []
