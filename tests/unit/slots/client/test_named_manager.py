"""Who may use the name of a SlotManager. Ray stands aside."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from iris_ray.errors import InvalidSlotError, SlotNameTakenError
from iris_ray.slots.actors.messages import Maker
from iris_ray.slots.client import named_manager
from iris_ray.slots.client.named_manager import Found, make_or_find
from iris_ray.slots.core.policy import ServingPolicy

ME = Maker("ann", "01", "w1", "process 1 on 10.0.0.1")
POLICY = ServingPolicy()
NEW: Any = "new"


class World:
    """The named actors, and the drivers that live."""

    def __init__(self) -> None:
        self.by_name: dict[str, Maker | None] = {}
        self.drivers: set[str] = {"01"}
        self.looks = 0

    def get_actor(self, name: str, namespace: str) -> Any:
        self.looks += 1
        if self.looks == 4:
            self.by_name = {name: maker for name, maker in self.by_name.items() if maker and maker.ray_job == "01"}
        if name not in self.by_name:
            raise ValueError("no such actor")
        return SimpleNamespace(maker=SimpleNamespace(remote=lambda: self.by_name[name]))

    def get(self, maker: Maker | None, timeout: float) -> Maker:
        if maker is None:
            raise ActorDiedError()
        return maker


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr("ray.get_actor", made.get_actor)
    monkeypatch.setattr("ray.get", made.get)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    monkeypatch.setattr(named_manager, "driver_lives", made.drivers.__contains__)
    monkeypatch.setattr(named_manager, "_this_process", lambda: ME)
    monkeypatch.setattr(named_manager, "_made", lambda policy, name, maker: NEW)
    monkeypatch.setattr(named_manager, "LOOK_S", 0.0)
    return made


@pytest.mark.parametrize("name", [None, "slots"])
def test_first_client_makes_the_manager(world: World, name: str | None) -> None:
    assert make_or_find(POLICY, name) == Found(NEW, True, True)


def test_name_of_another_driver_is_refused_with_its_holder(world: World) -> None:
    world.by_name["slots"] = Maker("ben", "02", "w2", "process 2 on 10.0.0.2")
    world.drivers.add("02")
    with pytest.raises(SlotNameTakenError, match=r"ben serves .*process 2 on 10.0.0.2, Ray job 02.*connect\('slots'\)"):
        make_or_find(POLICY, "slots")


def test_ray_jobs_processes_share_name_ended_by_its_maker(world: World) -> None:
    world.by_name["slots"] = ME
    found = make_or_find(POLICY, "slots")
    assert (found.is_new, found.is_ours) == (False, True)
    world.by_name["slots"] = Maker("ann", "01", "w2", "process 2 on 10.0.0.1")
    found = make_or_find(POLICY, "slots")
    assert (found.is_new, found.is_ours) == (False, False)


@pytest.mark.parametrize("maker", [Maker("ann", "00", "w0", "process 0 on 10.0.0.1"), None])
def test_restarted_driver_waits_for_earlier_manager_to_end(world: World, maker: Maker | None) -> None:
    world.by_name["slots"] = maker
    assert make_or_find(POLICY, "slots") == Found(NEW, True, True)
    assert world.looks == 4


def test_one_of_two_simultaneous_processes_attaches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(policy: Any, name: str, maker: Maker) -> Any:
        world.by_name[name] = Maker("ann", "01", "w2", "process 2 on 10.0.0.1")
        raise ValueError("the name is taken")

    monkeypatch.setattr(named_manager, "_made", taken)
    assert make_or_find(POLICY, "slots").is_new is False


def test_invalid_name_is_refused(world: World) -> None:
    with pytest.raises(InvalidSlotError, match="name is ''"):
        make_or_find(POLICY, "")


def test_attached_client_ends_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from iris_ray import SlotClient

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.kill", lambda actor: pytest.fail("it was killed"))
    world.by_name["slots"] = ME
    with SlotClient.connect("slots"):
        pass
