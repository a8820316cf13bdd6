"""A handle whose process leaves the cluster, and the stacks that it shows."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from iris_ray.client import job_handle
from iris_ray.client.job_handle import JobHandle
from iris_ray.client.transport import DirectTransport
from iris_ray.errors import NoClusterError

# -- handles ----------------------------------------------------------------------------------------------------------


class Connection:
    """What Ray says about this process's connection."""

    def __init__(self) -> None:
        self.job: str | None = "01000000"
        self.then: list[str | None] = []

    def is_initialized(self) -> bool:
        if self.then:
            self.job = self.then.pop(0)
        return self.job is not None

    def context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379", get_job_id=lambda: self.job)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    made = Connection()
    monkeypatch.setattr(ray, "is_initialized", made.is_initialized)
    monkeypatch.setattr(ray, "get_runtime_context", made.context)
    monkeypatch.setattr(job_handle, "_LOOK_S", 0.01)
    return made


def handle_of(results: "Future[list[Any]]") -> JobHandle:
    return JobHandle("train-1", results, DirectTransport())


@pytest.mark.parametrize("wait", [JobHandle.results, JobHandle.result, JobHandle.wait, JobHandle.exception])
@pytest.mark.parametrize("later", [None, "02000000"], ids=["shutdown", "another connection"])
def test_impossible_results_are_not_awaited(
    connection: Connection, wait: Callable[..., Any], later: str | None
) -> None:
    handle = handle_of(Future())
    connection.then = ["01000000", "01000000", later]  # meanwhile another thread calls ray.shutdown()
    with pytest.raises(NoClusterError, match=r"left the cluster .* get the results of train-1"):
        wait(handle, 10.0)


def test_received_results_outlive_cluster_connection(connection: Connection) -> None:
    results: Future[list[Any]] = Future()
    handle = handle_of(results)
    results.set_result([1, 2])
    connection.job = None
    assert handle.results() == [1, 2]
    assert handle.exception() is None


def test_timeout_is_reported_while_connected(connection: Connection) -> None:
    with pytest.raises(TimeoutError):
        handle_of(Future()).results(0.05)
