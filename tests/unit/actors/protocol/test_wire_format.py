"""What processes send each other changes only on purpose: every call and every message is recorded in wire_format.txt.

``python -m tests.unit.actors.protocol.test_wire_format`` writes the record anew.
"""

import contextlib
import dataclasses
import inspect
import typing
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from iris_ray.actors.protocol import messages
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.actors.protocol.host_interface import HostInterface, TaskInterface
from iris_ray.actors.protocol.pool_interface import PoolInterface
from iris_ray.actors.protocol.services import SERVICE, installed_services
from iris_ray.actors.protocol.version import PROTOCOL_VERSION
from iris_ray.state import events

RECORD = Path(__file__).with_name("wire_format.txt")
ADVICE = """a call or a message is not as it is recorded. If processes of this version and of the one before could \
misunderstand each other (PROTOCOL_VERSION says when; a new method is no reason), raise PROTOCOL_VERSION. Then run \
python -m tests.unit.actors.protocol.test_wire_format"""
ADDED_BY_RAY = "_ray_trace_ctx"
"""A parameter of the methods of a class that Ray has made actors of."""
FOR_CHECKERS = {**vars(messages), **vars(events), "ray": ray, "ActorHandle": ActorHandle}
"""Names of annotations that a module imports for type checkers alone."""


def test_calls_and_messages_are_as_recorded() -> None:
    recorded, found = RECORD.read_text().splitlines(), wire_format()
    services = {line.split(".")[1] for line in recorded if ".calls." in line}
    if services <= {service.name for service in installed_services()}:
        assert found == recorded, ADVICE
    else:  # `make kernel` takes services out
        assert set(found) <= set(recorded), ADVICE


def test_every_annotation_of_a_call_was_followed() -> None:
    names = {line.partition(":")[0].rpartition(".")[2] for line in wire_format() if ":" in line}
    followed = {
        "PoolProcess",
        "GangProgress",
        "JobSpec",
        "AttemptId",
        "HostPlace",
        "WorkerDrainedEvent",
        "TpuProcess",
    }
    assert followed <= names  # of unions, lists, tuples, fields of fields, and names for checkers alone


def wire_format() -> list[str]:
    """Return a line for each call, with its parameters, and for each class that travels, with its fields or values."""
    lines, seen = [f"protocol {PROTOCOL_VERSION}"], set[type]()
    for interface in interfaces():
        for name, method in public_methods(interface):
            names = [one for one in inspect.signature(method).parameters if one not in ("self", ADDED_BY_RAY)]
            lines.append(f"{interface.__module__}.{interface.__name__}.{name}({', '.join(names)})")
            follow(hints_of(method), seen)
    return [lines[0], *sorted(lines[1:]), *sorted(map(description, seen))]


def interfaces() -> Iterator[type]:
    yield from (ControllerInterface, PoolInterface, HostInterface, TaskInterface)
    for service in installed_services():
        with contextlib.suppress(ModuleNotFoundError):
            for found in vars(import_module(f"iris_ray.{service.name}.calls")).values():
                if isinstance(found, type) and any(hasattr(method, SERVICE) for _, method in public_methods(found)):
                    yield found


def public_methods(of: type) -> Iterator[tuple[str, Any]]:
    return ((name, one) for name, one in inspect.getmembers(of, inspect.isfunction) if not name.startswith("_"))


def follow(hints: Iterable[Any], seen: set[type]) -> None:
    """Add the classes of iris_ray in these annotations, those of their fields, and so on."""
    for hint in hints:
        if isinstance(hint, type) and hint.__module__.startswith("iris_ray.") and hint not in seen:
            seen.add(hint)
            follow(hints_of(hint), seen)
        follow(typing.get_args(hint), seen)


def hints_of(what: Any) -> Iterable[Any]:
    return typing.get_type_hints(what, localns=FOR_CHECKERS).values()


def description(of: type) -> str:
    if dataclasses.is_dataclass(of):
        parts = [field.name for field in dataclasses.fields(of)]
    else:
        parts = [str(one) for one in getattr(of, "_fields", getattr(of, "__members__", ()))]
    return f"{of.__module__}.{of.__name__}: {', '.join(parts)}"


if __name__ == "__main__":
    RECORD.write_text("\n".join(wire_format()) + "\n")
