"""Endpoints on a cluster: which of the recorded addresses counts, and what is recorded."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from iris_ray import TaskState, lookup_endpoint, register_endpoint
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.endpoints import task as endpoints
from iris_ray.errors import EndpointNotFoundError, InvalidRequestError, NoClusterError, UnknownNameError
from iris_ray.model.job_info import JobInfo

ME = JobInfo("job", "job/task-0", 0, 2, 1, 0, 1, "a", 0, "10.0.0.1:20002")


def test_endpoint_outside_a_task_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="task"):
        register_endpoint("a", "b")


class World:
    """The cluster's store, and a Controller of a job with one state for all its tasks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stored: dict[str, bytes] = {}
        self.asked: list[int] = []
        self.state, self.attempt = TaskState.RUNNING, 1
        self._patch = patch
        store = SimpleNamespace(put=self.stored.__setitem__, get=self.stored.get)
        patch.setattr(endpoints, "ClusterStore", lambda: store)
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(endpoints, "ControllerConnection", lambda patience_s: self)

    def ask(self, question: object, job_id: str, index: int) -> SimpleNamespace:
        assert question is ControllerInterface.task_status
        self.asked.append(index)
        return SimpleNamespace(attempt=self.attempt, state=self.state)

    def act_as(self, me: JobInfo) -> None:
        for variable, value in me.to_env().items():
            self._patch.setenv(variable, value)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def registered_by(world: World, task: JobInfo) -> None:
    world.act_as(task)
    register_endpoint("server", "10.0.0.9:80")


def test_address_of_process_counts_while_its_hosts_task_runs(world: World) -> None:
    """To the Controller two processes of a host are one task."""
    registered_by(world, replace(ME, task_id="job/task-3", task_index=3, processes_per_host=2))
    world.act_as(ME)
    assert lookup_endpoint("server") == "10.0.0.9:80"
    assert world.asked == [1]


def test_running_task_of_group_is_found_by_other_jobs(world: World) -> None:
    group = "trainer=train-1,sampler=job"
    registered_by(world, replace(ME, job_id="train-1", task_id="train-1/task-0", group=group))
    world.act_as(replace(ME, attempt=7, group=group))
    with pytest.raises(EndpointNotFoundError, match="no running task of job"):
        lookup_endpoint("server")
    assert lookup_endpoint("server", member="trainer") == "10.0.0.9:80"
    world.attempt = 2
    with pytest.raises(EndpointNotFoundError, match="no running task of train-1"):
        lookup_endpoint("server", member="trainer")
    with pytest.raises(UnknownNameError, match="did you mean trainer"):
        lookup_endpoint("server", member="trainers")
    world.act_as(ME)
    with pytest.raises(UnknownNameError, match="no job in the group of job"):
        lookup_endpoint("server", member="trainer")


def test_address_counts_while_its_task_runs(world: World) -> None:
    registered_by(world, replace(ME, task_id="job/task-1", task_index=1))
    world.act_as(ME)
    assert lookup_endpoint("server") == "10.0.0.9:80"
    world.state = TaskState.SUCCEEDED
    with pytest.raises(EndpointNotFoundError):
        lookup_endpoint("server")
    assert world.asked == [1, 1]


def test_shrunk_gang_finds_no_addresses_of_earlier_tasks(world: World) -> None:
    """The task that registered it exists no more, and the Controller would not know it."""
    registered_by(world, replace(ME, task_id="job/task-7", task_index=7, num_tasks=8))
    world.act_as(replace(ME, attempt=2))
    with pytest.raises(EndpointNotFoundError):
        lookup_endpoint("server")
    assert world.asked == [], "all tasks of a gang are of the same attempt"


def test_single_tasks_find_each_other_across_attempts(world: World) -> None:
    alone = replace(ME, coordinator_address="")
    registered_by(world, replace(alone, task_id="job/task-1", task_index=1))
    world.act_as(replace(alone, attempt=3))
    assert lookup_endpoint("server") == "10.0.0.9:80"
    world.attempt = 2
    with pytest.raises(EndpointNotFoundError):
        lookup_endpoint("server")


class Address(str):
    """A str of a user's script, which other processes can't import."""

    def __reduce__(self) -> str:
        return "no such name"


def test_name_and_address_become_plain(world: World) -> None:
    world.act_as(ME)
    register_endpoint(Address("server"), Address("10.0.0.9:80"))
    found = lookup_endpoint("server")
    assert (found, type(found)) == ("10.0.0.9:80", str)
    assert json.loads(*world.stored.values()) == [0, 1, "10.0.0.9:80"], "who looks it up unpickles nothing"


@pytest.mark.parametrize(
    ("name", "address"), [("half \udc80", "a"), ("a", "half \udc80"), ("a", "b" * 10_001), ("", "a")]
)
def test_unstorable_endpoint_is_refused(world: World, name: str, address: str) -> None:
    world.act_as(ME)
    with pytest.raises(InvalidRequestError):
        register_endpoint(name, address)
    assert not world.stored


def test_started_child_is_told_it_has_no_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the variables of the task, and no connection to the cluster."""
    for variable, value in ME.to_env().items():
        monkeypatch.setenv(variable, value)
    for ask in (lambda: register_endpoint("server", "10.0.0.9:80"), lambda: lookup_endpoint("server")):
        with pytest.raises(NoClusterError, match="the task's own process"):
            ask()
    with pytest.raises(NoClusterError, match="is not connected to the Ray cluster"):
        endpoints.endpoints_of("job", "")


@pytest.mark.parametrize("timeout", [None, "5", float("nan"), True], ids=str)
def test_invalid_timeout_is_refused(timeout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in ME.to_env().items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidRequestError, match=r"timeout is .*; give seconds"):
        lookup_endpoint("server", timeout)


FORK = """
import os, ray
from iris_ray import lookup_endpoint, register_endpoint, run_on_pod
from iris_ray.actors.calls.controller_connection import find_controller
from iris_ray.errors import NoClusterError

ray._private.worker.global_worker.core_worker = object()
ray.is_initialized = lambda: True
run_on_pod
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
calls = lambda: register_endpoint("a", "b"), lambda: lookup_endpoint("a"), lambda: run_on_pod(print, "v4-8")
refused = 0
for call in (*calls, find_controller):
    try:
        call()
    except NoClusterError:
        refused += 1
os._exit(refused)
"""


def test_forked_child_is_told_without_waiting_for_ray(tmp_path: Path) -> None:
    """Such as a worker of a data loader: it has the task's connection, which does not work there."""
    environ = {name: value for name, value in os.environ.items() if name != "IRIS_RAY_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environ | ME.to_env(), cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 4
