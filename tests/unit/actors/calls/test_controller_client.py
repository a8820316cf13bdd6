"""A pool's questions to a Controller that hangs."""

import asyncio
import subprocess
import time
from typing import Any

import pytest
import ray

from iris_ray.actors.calls import controller_client
from iris_ray.actors.calls.asking import Actor
from iris_ray.actors.calls.controller_client import AWAY_S, ControllerClient
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.actors.protocol.version import versions_here
from iris_ray.errors import ControllerUnavailableError
from iris_ray.processes.identity import stat_of
from tests.support.virtual_time import in_virtual_time


class HungController:
    """Answers nothing until a time."""

    def __init__(self, until: float) -> None:
        self._until = until

    async def versions(self) -> Any:
        return versions_here()

    async def why(self, job_id: str) -> str:
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))
        return f"{job_id} waits"


def client_of(monkeypatch: pytest.MonkeyPatch, controller: HungController) -> ControllerClient:
    async def found(_: object) -> Any:
        return Actor.here(controller, "the Controller").handle

    monkeypatch.setattr(controller_client, "get_or_start_controller", found)
    return ControllerClient(PoolProcess("a pool", 0))


@in_virtual_time
async def test_controller_that_hangs_for_minutes_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch, HungController(until=300.0))
    assert await client.ask(ControllerInterface.why, "job") == "job waits"


@in_virtual_time
async def test_pool_gives_up_after_the_time_that_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch, HungController(until=float("inf")))
    with pytest.raises(ControllerUnavailableError, match=r"did not answer within 10 s\. Jobs can't be"):
        await client.ask(ControllerInterface.why, "job")
    assert AWAY_S <= time.monotonic() <= AWAY_S + 11.0


def test_pool_waits_for_controller_that_its_caller_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "0.3"]) as starter:
        stat = stat_of(starter.pid)
        assert stat is not None

        def get_actor(name: str, namespace: str) -> str:
            if stat.identity.runs():
                raise ValueError(name)
            return "the Controller"

        monkeypatch.setattr(ray, "get_actor", get_actor)
        found: Any = asyncio.run(controller_client.get_or_start_controller(stat.identity))
    assert found == "the Controller"
