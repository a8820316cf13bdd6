"""Handing a job over: what is left of it if the caller is interrupted. Ray and the Controller stand aside."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectStoreFullError

from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.payloads import INLINE_BYTES
from iris_ray.client import caller_pool, children, client
from iris_ray.client.caller_pool import CallerPool, pool_of_this_process
from iris_ray.client.job_request import make_pod_request


class Method:
    """A method of an actor, as its handle has it.

    Args:
        remote: what a call does.
    """

    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote

    def options(self, **_: Any) -> "Method":
        return self


class InterruptedPool:
    """A pool whose caller presses Ctrl-C while it waits for an answer."""

    def __init__(self) -> None:
        self.ended: list[str] = []

        self.handle = self
        self.results = Method(lambda: SimpleNamespace(future=Future))
        self.begin = self.accepted = Method(lambda _: "an answer")

    def get(self, answer: object) -> None:
        raise KeyboardInterrupt

    def kill(self, pool: object) -> None:
        assert pool is self
        self.ended.append("the pool")

    def cancel(self, results: object) -> None:
        self.ended.append("the call")


def launch(monkeypatch: pytest.MonkeyPatch, pool: InterruptedPool, request: RunRequest, detached: bool) -> None:
    actor: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _, child: pool))
    monkeypatch.setattr(children, "require_cluster", lambda: None)
    monkeypatch.setattr(pool_of_this_process, "submit", lambda _: (pool.results.remote(), Actor(pool)))
    for name in ("get", "kill", "cancel"):
        monkeypatch.setattr(ray, name, getattr(pool, name))
    monkeypatch.setattr(caller_pool, "PoolActor", actor)
    client.launch(request, detached)


@pytest.mark.parametrize(("detached", "ended"), [(False, "the call"), (True, "the pool")])
def test_interrupted_submission_leaves_no_job_without_handle(
    monkeypatch: pytest.MonkeyPatch, detached: bool, ended: str
) -> None:
    pool = InterruptedPool()
    with pytest.raises(KeyboardInterrupt):
        launch(monkeypatch, pool, make_pod_request(lambda: None, "v4-16", 1), detached)
    assert pool.ended == [ended]


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize(
    ("retries", "said"), [(0, ["ends as preempted if it loses a host", "not moved to more slices"]), (1, [])]
)
def test_submission_says_that_lost_host_ends_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], detached: bool, retries: int, said: list[str]
) -> None:
    request = make_pod_request(lambda: None, "v4-16", [1, 2], max_retries_preemption=retries)
    with pytest.raises(KeyboardInterrupt):
        launch(monkeypatch, InterruptedPool(), request, detached)
    told = capsys.readouterr().err
    assert bool(told) is bool(said)
    assert all(words in told for words in said)


def test_interrupted_upload_leaves_no_detached_job(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, data = InterruptedPool(), bytes(INLINE_BYTES)
    with pytest.raises(KeyboardInterrupt):
        launch(monkeypatch, pool, make_pod_request(lambda: data, "v4-16", 1), detached=True)
    assert pool.ended == ["the pool"]


def test_call_with_unstorable_function_is_not_awaited_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def full(value: object) -> None:
        raise ObjectStoreFullError("no room")

    def until_idle(calls: int) -> SimpleNamespace:
        counted.append(calls)
        return SimpleNamespace(future=Future)

    run = Method(lambda request: request.spec.name)
    pool: Any = Actor(SimpleNamespace(run=run, until_idle=Method(until_idle)))
    pools, data = CallerPool(), bytes(INLINE_BYTES)
    monkeypatch.setattr(pools, "_current", lambda: pool)
    monkeypatch.setattr(ray, "put", full)
    assert pools.submit(make_pod_request(lambda: None, "v4-16", 1))[1] is pool
    with pytest.raises(ObjectStoreFullError):
        pools.submit(make_pod_request(lambda: data, "v4-16", 1))
    pools._end_when_idle(pool)
    assert counted == [1]


def test_pool_that_is_idle_while_the_interpreter_ends_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.12 and newer refuse a new thread then."""
    idle: Future[None] = Future()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    pool: Any = Actor(SimpleNamespace(until_idle=Method(lambda _: SimpleNamespace(future=lambda: idle))))
    CallerPool()._end_when_idle(pool)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    idle.set_result(None)
    assert not caplog.records


@pytest.mark.parametrize(("bytes_of_environment", "kept"), [(INLINE_BYTES // 2, True), (INLINE_BYTES, False)])
def test_large_environment_of_detached_job_outlives_caller(
    monkeypatch: pytest.MonkeyPatch, bytes_of_environment: int, kept: bool
) -> None:
    """Ray gives a pool a large argument as a reference to an object of the caller's."""
    request = make_pod_request(lambda: None, "v4-16", 1, env={"DATA": "x" * bytes_of_environment})
    made_with: list[RunRequest | None] = []
    begun: list[RunRequest] = []
    pool = SimpleNamespace(begin=Method(begun.append), results=Method(lambda: None))

    def make(alone: RunRequest | None, child: None) -> SimpleNamespace:
        made_with.append(alone)
        return pool

    actor: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))
    monkeypatch.setattr(caller_pool, "PoolActor", actor)
    monkeypatch.setattr(ray, "get", lambda _: None)
    caller_pool.submit_detached(request)
    assert made_with == [request if kept else None]
    assert begun == ([] if kept else [request])
