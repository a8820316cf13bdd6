"""A file of models is read again while it is served: a good one, one that makes no sense, and the first one again."""

import asyncio
import pickle
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from iris_ray.errors import IrisError
from iris_ray.slots.actors.messages import Maker, ModelOrder
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.cli import _read_again
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.serving import GB, ServedFile, read
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario

FIRST = """
[[hosts]]
kind = "gpu"
devices = 2
memory_gb = 80
[models.llama]
command = "vllm serve org/llama --port {port}"
memory_gb = 70
aliases = ["gpt-4o"]
[models.kept]
command = "serve kept {port}"
memory_gb = 1
[keys.alice]
secret = "aaaaaaaaaaaaaaaaaaaaaaaa"
"""
SECOND = FIRST.replace("[models.llama]", "[models.qwen]").replace("memory_gb = 1", "memory_gb = 2")
SECOND = SECOND.replace("gpt-4o", "gpt-5").replace("[keys.alice]", "[keys.bob]").replace("aaaa", "bbbb")
FILES = {"first": FIRST, "second": SECOND, "wrong": SECOND.replace("devices = 2", "devices = 4")}
MEMORY = {
    name: {model: said["memory_gb"] for model, said in tomllib.loads(text)["models"].items()}
    for name, text in FILES.items()
}


def models() -> Scenario:
    return Scenario(
        "models",
        _prepare,
        _act,
        lambda place, said: None,
        (OSError, IrisError),
        {"keys change first": _access_first, "a failed change is not tried again": _believe},
    )


def _prepare(place: Path) -> None:
    for name, text in FILES.items():
        (place / f"{name}.toml").write_text(text)


class Client:
    """Asks a real SlotManager, which is in this process; each call is an operation."""

    def __init__(self, manager: SlotManager, loop: asyncio.AbstractEventLoop, operations: Operations) -> None:
        self._manager = manager
        self._loop = loop
        self._operations = operations

    def _change(self, orders: Sequence[ModelOrder], gone: Sequence[str] = ()) -> None:
        sent = pickle.loads(pickle.dumps((list(orders), list(gone))))
        self._operations.do("call", lambda: self._loop.run_until_complete(self._manager.change(*sent)))


def _state(manager: SlotManager, served: ServedFile) -> tuple[Mapping[str, ModelOrder], Any, Any]:
    """Return what the SlotManager serves, and the aliases and keys of the front."""
    assert manager._core.models.keys() == manager._orders.keys()
    return dict(manager._orders), dict(served.front._aliases), {use.key for use in served.front._keys._uses.values()}


def _act(place: Path, said: Said, operations: Operations) -> None:
    loop = asyncio.new_event_loop()
    try:
        _reload(place, said, operations, loop)
    finally:
        loop.close()


def _reload(place: Path, said: Said, operations: Operations, loop: asyncio.AbstractEventLoop) -> None:
    words: list[str] = []
    click.echo = lambda text, **_: words.append(text)

    async def made() -> SlotManager:
        return SlotManager(ServingPolicy(), Maker("ann", "job", "worker", "here"))

    manager = loop.run_until_complete(made())
    client: Any = Client(manager, loop, operations)
    served = ServedFile(client, read(place / "first.toml"))
    expected = {"first": _state(manager, served)}
    for name in ("second", "wrong", "first"):
        before = _state(manager, served)
        for _ in range(2):
            _read_again(served, place / f"{name}.toml")
            now, answer = _state(manager, served), words.pop()
            said(name, answer)
            if answer.startswith("nothing has changed: "):
                assert now == before, answer
                if name == "wrong":
                    break
            elif answer.startswith("perhaps not all is changed"):
                assert now[1:] == before[1:], "keys and aliases are as before"
                assert now[0] in (before[0], expected.get(name, now)[0])
            else:
                assert name != "wrong"
                assert {model: order.spec.memory[1] // GB for model, order in now[0].items()} == MEMORY[name]
                assert expected.setdefault(name, now) == now
                break
        else:
            raise AssertionError(f"{name} can't be read though only one operation has failed: {words}")
    served.front._parser.close()


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _access_first() -> None:
    change = ServedFile.change

    def changed(served: ServedFile, said: Any) -> list[str]:
        served.front.set_access(said.keys, said.aliases)
        return change(served, said)

    ServedFile.change = changed  # type: ignore[method-assign, assignment]


def _believe() -> None:
    change = ServedFile.change

    def changed(served: ServedFile, said: Any) -> list[str]:
        try:
            return change(served, said)
        except OSError:
            served._said = said
            served._unsure.clear()
            raise

    ServedFile.change = changed  # type: ignore[method-assign, assignment]
