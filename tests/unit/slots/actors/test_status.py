"""What people see of slots: `SlotStatus`, and what ``iris-ray slots`` makes of it."""

from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from iris_ray.slots import cli as command
from iris_ray.slots.actors.slot_processes import status_of
from iris_ray.slots.client.slot_client import SlotClient
from iris_ray.slots.core import events as ev
from tests.support.slot_world import SlotWorld
from tests.support.slots import GB, gpus, model

A = model("a", 50)


@pytest.fixture
def world() -> SlotWorld:
    """One runner, with room for one slot of the model."""
    world = SlotWorld()
    world.join(gpus("one", 1))
    world.settle()
    return world


@pytest.fixture
def iris(world: SlotWorld, monkeypatch: pytest.MonkeyPatch):
    """Runs a command of ``iris-ray slots`` on this world."""

    class Client:
        def status(self):
            return status_of(world.reconciler, {}, world.now, {"two": {0: 79 * GB, 1: 0}, "gone": {0: GB}, "one": {}})

    monkeypatch.setattr(SlotClient, "connect", lambda name: Client())
    monkeypatch.setattr(command, "cluster", nullcontext)
    return lambda *arguments: CliRunner().invoke(command.slots, arguments, catch_exceptions=False).output


def test_reason_for_missing_replicas_is_shown_without_requests(world: SlotWorld, iris) -> None:
    world.hear(ev.ModelRegistered(A, replicas=2))
    world.settle()
    assert iris("why", "a").startswith("a: 1 of 2 replicas is missing: all devices that could hold a are full")
    assert "all devices that could hold a are full" in iris("models")


def test_reason_disappears_once_all_replicas_are_there(world: SlotWorld, iris) -> None:
    world.hear(ev.ModelRegistered(A, replicas=3))
    world.join(gpus("two", 2))
    world.settle()
    assert iris("why", "a") == "a: nothing waits for it\n"
    assert "full" not in iris("models")


def test_reason_of_request_no_longer_waiting_is_not_shown(world: SlotWorld, iris) -> None:
    world.hear(ev.ModelRegistered(A))
    world.hear(ev.ModelRegistered(model("b", 60)))
    world.ask("a", A.name)
    world.settle(serve=False)
    world.ask("b", model("b", 60).name)
    assert "b: 1 request waits: all devices that could hold b are full" in iris("why", "b")
    world.hear(ev.RequestCancelled("b"))
    assert iris("why", "b") == "b: nothing waits for it\n"


def test_adapter_is_listed_under_requested_name(world: SlotWorld, iris) -> None:
    world.hear(ev.ModelRegistered(model("llama+legal", 50, lora="/adapters/legal")))
    (row,) = status_of(world.reconciler, {}, world.now).models
    assert row.model == "llama+legal"
    assert iris("why", "llama+legal") == "llama+legal: nothing waits for it\n"


def test_runners_show_what_is_free_on_each_device(world: SlotWorld, iris) -> None:
    world.join(gpus("two", 2))
    world.hear(ev.ModelRegistered(model("wide", memory={2: (60 * GB, 20 * GB)}), replicas=1))
    world.settle()
    assert [line.split() for line in iris("runners").splitlines()[1:]] == [
        ["one", "80,000", "80,000", "-", "0"],
        ["two", "80,000", "80,000", "20,000", "60,000", "79,000", "0", "1", "wide"],
    ]
    assert '"free": [' in iris("runners", "--json")
