"""A client and a Controller of versions that can't talk to each other find that out when they connect."""

import asyncio
from collections.abc import Iterator

import pytest
import ray

from iris_ray.actors.calls import controller_client
from iris_ray.actors.calls.controller_client import ControllerClient
from iris_ray.actors.calls.names import NAMESPACE
from iris_ray.actors.protocol import version
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.messages import PoolProcess
from iris_ray.actors.protocol.version import PROTOCOL_VERSION
from iris_ray.errors import VersionMismatchError
from iris_ray.testing import SimulatedCluster


async def ask() -> str:
    return await ControllerClient(PoolProcess("pool", 1)).ask(ControllerInterface.why, "no job")


class OldController:
    """From before there were protocol numbers."""

    async def ping(self) -> None: ...


@pytest.fixture
def old_controller(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(controller_client, "CONTROLLER_NAME", "an old controller")
    named = {"name": "an old controller", "namespace": NAMESPACE}
    actor = ray.remote(OldController).options(num_cpus=0.01, **named).remote()
    ray.get(actor.ping.remote())
    yield
    ray.kill(actor)


@pytest.mark.usefixtures("old_controller")
def test_controller_without_protocol_is_an_older_one() -> None:
    with pytest.raises(VersionMismatchError, match=r"an older version \(protocol 0\)"):
        asyncio.run(ask())


@pytest.mark.proof
def test_newer_controller_refuses_older_pools_connection(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(ask())
    monkeypatch.setattr(version, "PROTOCOL_VERSION", PROTOCOL_VERSION - 1)
    with pytest.raises(VersionMismatchError, match="install iris_ray"):
        asyncio.run(ask())
