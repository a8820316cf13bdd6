"""Fixtures of several rooms, and tests that are coroutines."""

import asyncio
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.testing.metadata_server import HostMetadata, MetadataServers

if TYPE_CHECKING:
    from tests.support.containers import StandIn
    from tests.support.processes import Make, Nursery, Waiting
    from tests.support.virtual_cluster import Stage


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.fixture(scope="module")
def servers() -> Iterator[MetadataServers]:
    """The metadata servers of simulated hosts."""
    servers = MetadataServers()
    yield servers
    servers.close()


@pytest.fixture
def host_metadata(servers: MetadataServers) -> HostMetadata:
    """That of one host."""
    return servers.serve("127.0.0.1", {"project/project-id": "my-project"})


@pytest.fixture
def own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test has a host of its own, and this process is no task on it: the host's directory."""
    monkeypatch.setenv("IRIS_RAY_HOST_DIR", str(tmp_path))
    monkeypatch.delenv(TaskFiles.VARIABLE, raising=False)
    (tmp_path / "tasks").mkdir()
    return tmp_path


@pytest.fixture
def files(own_host: Path, monkeypatch: pytest.MonkeyPatch) -> TaskFiles:
    """This process is a task."""
    files = TaskFiles.of_process(own_host, os.getpid())
    monkeypatch.setenv(TaskFiles.VARIABLE, files.prefix)
    return files


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Stage":
    """A stage for stories of whole jobs in virtual time."""
    from tests.support.virtual_cluster import Stage

    return Stage(tmp_path, monkeypatch)


@pytest.fixture
def nursery() -> Iterator["Nursery"]:
    from tests.support.processes import Nursery

    nursery = Nursery()
    yield nursery
    nursery.clear()


@pytest.fixture
def waiting(nursery: "Nursery", monkeypatch: pytest.MonkeyPatch) -> "Waiting":
    """Starts processes that wait for a task, and that Ray can kill as it kills actors."""
    import ray

    from tests.support.processes import WaitingActor

    monkeypatch.setattr(ray, "kill", lambda actor: actor.identity.signal(signal.SIGKILL))
    return lambda: WaitingActor(nursery.sleeper())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator["StandIn"]:
    """A container engine on this host, called docker."""
    from tests.support.containers import a_stand_in

    with a_stand_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def make(own_host: Path) -> Iterator["Make"]:
    """Starts tasks of this host."""
    from tests.support.processes import Child

    children = []

    def make(*args: str) -> "Child":
        children.append(Child(*args))
        return children[-1]

    yield make
    for child in children:
        if child.process.returncode is None:
            child.clear()
        for stream in (child.process.stdin, child.process.stdout, child.process.stderr):
            if stream is not None:
                stream.close()
