"""Fixtures of several rooms, and tests that are coroutines."""

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.testing.metadata_server import HostMetadata, MetadataServers


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
