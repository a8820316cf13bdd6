"""Following a job: its hosts are read directly, and the Controller only says where they are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.errors import UnknownNameError
from iris_ray.logs import client as module
from iris_ray.logs import reader
from iris_ray.logs.client import HostLogs, host_logs
from iris_ray.logs.core import LogPosition
from iris_ray.logs.reader import LogReader
from tests.support.controller_in_process import ControllerInProcess

TASKS = 6
START = dict.fromkeys(range(TASKS), LogPosition())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """A job of six tasks, each on a host of its own, that have said who they are."""
    with ControllerInProcess(tmp_path, {"v4-16": 3}).installed(monkeypatch) as world:
        world.start_controller()
        world.start("job", (3,))
        for index in range(TASKS):
            world.prints("job", index, f"task {index}\n")
        yield world


@pytest.fixture
def logs(world: ControllerInProcess) -> Iterator[HostLogs]:
    with host_logs(ControllerConnection()) as logs:
        yield logs


def readers(world: ControllerInProcess) -> int:
    return sum(world.ray.is_alive(handle, LogReader) for handle in world.ray._handles())


def test_client_reads_each_host_itself(world: ControllerInProcess, logs: HostLogs) -> None:
    position = START
    for _ in range(5):
        found = logs.fetch_logs("job", position, 1000)
        position = {index: LogPosition(log.attempt, log.next_offset) for index, log in found.items()}
    assert {index: log.end for index, log in found.items()} == dict.fromkeys(range(TASKS), len("task 0\n"))
    assert not any(log.data or log.note for log in found.values()), "it has been read, each byte once"
    calls = world.ray.calls
    assert (calls["read"], readers(world)) == (5 * TASKS, TASKS)
    assert calls["fetch_logs"] == calls["fetch_task_logs"] == 0
    assert calls["locate_logs"] <= 2, "what it has said is good for a moment"


def test_tasks_of_one_host_are_read_together(world: ControllerInProcess, logs: HostLogs) -> None:
    host = world.node_id("v4-16-0", 0)
    places = logs._locate("job", START)
    (shared,) = (place.host for place in places.values() if place.host and place.host[0] == host)
    for index, place in places.items():
        logs._places["job", index, None] = logs._places["job", index, None][0], replace(place, host=shared)
    found = logs.fetch_logs("job", START, 1000)
    assert world.ray.calls["read"] == 1
    assert sum(log.data == f"task {index}\n".encode() for index, log in found.items()) == 1, "the others are elsewhere"


def test_logs_missing_on_host_come_from_controller(world: ControllerInProcess, logs: HostLogs) -> None:
    logs.fetch_logs("job", START, 1000)
    world.kill_host("v4-16-0", 0)
    world.wait_for_no_host("v4-16-0", 0)
    found = logs.fetch_logs("job", START, 1000)
    assert sum(log.from_host for log in found.values()) == TASKS - 1
    (lost,) = (log for log in found.values() if not log.from_host)
    assert lost.note is not None
    assert world.ray.calls["fetch_logs"] == 1


def test_waiting_job_has_no_logs_yet(world: ControllerInProcess, logs: HostLogs) -> None:
    world.submit("late")
    found = logs.fetch_logs("late", {0: LogPosition()}, 1000)
    assert (found[0].attempt, found[0].note) == (0, "it has not been placed on a host yet")
    assert world.ray.calls["read"] == world.ray.calls["fetch_logs"] == 0
    with pytest.raises(UnknownNameError):
        logs.fetch_logs("nobody", {0: LogPosition()}, 1000)


def test_readers_end_when_following_ends(world: ControllerInProcess) -> None:
    with host_logs(ControllerConnection()) as logs:
        logs.fetch_logs("job", START, 1000)
        assert readers(world) == TASKS
    world.ray.in_loop(nothing()).result(10)
    assert readers(world) == 0


def test_unused_reader_is_ended(world: ControllerInProcess, logs: HostLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.fetch_logs("job", START, 1000)
    monkeypatch.setattr(reader, "IDLE_S", -1.0)
    logs.fetch_logs("job", {0: LogPosition()}, 1000)
    world.ray.in_loop(nothing()).result(10)
    assert readers(world) == 0


async def nothing() -> None: ...


def test_readers_are_left_alone_after_leaving_cluster(
    world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have ended with the connection, and a call would have Ray start a cluster on this machine."""
    with host_logs(ControllerConnection()) as logs:
        logs.fetch_logs("job", START, 1000)
        monkeypatch.setattr(module, "this_connection", lambda: None)
        monkeypatch.setattr("ray.kill", lambda _: pytest.fail("Ray would start a cluster here"))
    assert readers(world) == TASKS
