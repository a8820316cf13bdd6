"""What pools, hosts and the Controller make of services whose hooks fail."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from iris_ray.actors.calls.service_parts import RunningParts
from iris_ray.actors.controller.services import ControllerPart, Published, ServiceBoard
from iris_ray.actors.host.services import DeadTask, HostPart, host_parts
from iris_ray.actors.pool.services import PoolPart, pool_parts
from iris_ray.actors.protocol import services
from iris_ray.actors.protocol.services import Service, all_settings, installed_services
from iris_ray.errors import ServiceUnavailableError, UnknownNameError
from iris_ray.model.cluster_settings import OPERATORS, ClusterSetting

Fake: Any = SimpleNamespace


class Unfit(PoolPart):
    async def unfit(self, *_: Any) -> Any:
        raise UnknownNameError("a host that I don't know")

    async def prepared(self, request: Any) -> Any:
        return [object()]


class Files(HostPart):
    async def files_address(self) -> str:
        raise UnknownNameError("a directory that I don't know")

    async def died(self, task: DeadTask) -> str:
        raise UnknownNameError("a task that I don't know")


class Starts(HostPart):
    """Starts for long, as on a slow disk."""

    async def started(self) -> None:
        await asyncio.sleep(60.0)


class Serves(HostPart):
    async def files_address(self) -> str:
        return "10.0.0.1:80"

    async def died(self, task: DeadTask) -> str:
        return "see its log"


class Garbage(HostPart):
    async def files_address(self) -> Any:
        return [object()]

    async def died(self, task: DeadTask) -> Any:
        return [object()]


class Shows(ControllerPart):
    made: ClassVar[list["Shows"]] = []

    async def started(self) -> None:
        Shows.made.append(self)
        self.publish(Published(brings_slices=True))
        raise ValueError("after it was shown")


@contextlib.asynccontextmanager
async def work_of(parts: RunningParts[Any]) -> AsyncIterator[None]:
    works = [asyncio.ensure_future(work) for work, _ in parts.works()]
    yield
    for work in works:
        work.cancel()
    await asyncio.wait(works)


async def test_service_that_refuses_to_test_hosts_finds_nothing() -> None:
    parts = pool_parts(Fake(), [Service("unfit", pool=f"{__name__}:Unfit")])
    context = Fake(place=Fake(order=Fake(slices=[[Fake(node_id="a")]])))
    async with work_of(parts):
        assert await parts.unfit(context, {"a": "it was slow"}, asyncio.Event()) == {}


async def test_garbage_does_not_replace_a_request() -> None:
    parts = pool_parts(Fake(), [Service("unfit", pool=f"{__name__}:Unfit", admits=("image",))])
    request = Fake(spec=Fake(image="an image"))
    async with work_of(parts):
        with pytest.raises(ServiceUnavailableError, match="not a RunRequest"):
            await parts.prepared(request)


async def test_host_without_an_address_of_files_goes_on() -> None:
    parts = host_parts([Service("files", host=f"{__name__}:Files")], Fake())
    async with work_of(parts):
        assert await parts.files_address() == ""


async def test_address_of_files_is_due_in_time_although_other_services_are_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("iris_ray.actors.host.services.FILES_S", 0.3)
    kinds = [Starts, Starts, Starts, Garbage, Files, Serves]
    named = [Service(f"{kind.__name__} {n}", host=f"{__name__}:{kind.__name__}") for n, kind in enumerate(kinds)]
    parts = host_parts(named, Fake())
    async with work_of(parts):
        began = time.monotonic()
        assert await parts.files_address() == "10.0.0.1:80"
        assert time.monotonic() - began < 0.8


async def test_crash_is_told_in_time_although_other_services_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.actors.host.services.DIED_S", 0.3)
    kinds = [Starts, Garbage, Files, HostPart, Serves]
    named = [Service(f"{kind.__name__} {n}", host=f"{__name__}:{kind.__name__}") for n, kind in enumerate(kinds)]
    parts = host_parts(named, Fake())
    async with work_of(parts):
        began = time.monotonic()
        assert await parts.died(Fake()) == ["see its log"]
        assert time.monotonic() - began < 0.8


async def test_part_that_fails_in_its_start_shows_nothing_afterwards() -> None:
    board = ServiceBoard()
    places = [(Service("shows"), f"{__name__}:Shows")]
    parts = RunningParts[Any](places, lambda kind, running: kind(Fake(board=board), running))
    async with work_of(parts):
        async with asyncio.timeout(5):
            while not parts.health()[0].failures:
                await asyncio.sleep(0.01)
        assert not board.brings_slices
        Shows.made[-1].publish(Published(brings_slices=True))
        assert not board.brings_slices


@pytest.fixture
def other_services(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Exits(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise SystemExit(3)

    garbage = ModuleType("garbage.service")
    garbage.SERVICE = 5  # type: ignore[attr-defined]
    sound = ModuleType("sound.service")
    own, kernels = (ClusterSetting(name, "x", "a word", "…", str) for name in ("own", OPERATORS.name))
    sound.SERVICE = Service("sound", settings="sound.service:SETTINGS")  # type: ignore[attr-defined]
    sound.SETTINGS = (own, kernels)  # type: ignore[attr-defined]
    odd = ModuleType("odd.service")
    odd.SERVICE = Service("odd", settings="odd.service:SETTINGS")  # type: ignore[attr-defined]
    odd.SETTINGS = ("a text",)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "odd.service", odd)
    monkeypatch.setitem(sys.modules, "sound.service", sound)
    monkeypatch.setitem(sys.modules, "exits.service", Exits("exits.service"))
    monkeypatch.setitem(sys.modules, "garbage.service", garbage)
    monkeypatch.setattr(services, "SERVICES", ("exits", "garbage", "odd", "sound"))
    for cached in (installed_services, all_settings):
        cached.cache_clear()
    yield
    for cached in (installed_services, all_settings):
        cached.cache_clear()


def test_service_without_a_usable_description_is_left_out(other_services: None) -> None:
    assert [service.name for service in installed_services()] == ["odd", "sound"]


def test_service_adds_settings_and_replaces_none_of_the_kernels(other_services: None) -> None:
    assert {"own", OPERATORS.name} <= all_settings().keys()
    assert all_settings()[OPERATORS.name] is OPERATORS
