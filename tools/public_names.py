"""What users can import, with signatures and defaults: ``python -m tools.public_names`` writes it down for its test."""

import enum
import inspect
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from iris_ray.events import Event
from iris_ray.model.options import OPTIONS, Option

RECORDED = Path(__file__).parents[1] / "tests" / "unit" / "public_names.txt"
PLACES = (
    "iris_ray", "iris_ray.slots", "iris_ray.jax", "iris_ray.outer", "iris_ray.checkpoint", "iris_ray.levanter",
    "iris_ray.fray",
    "iris_ray.testing", "iris_ray.study", "iris_ray.state", "iris_ray.scheduler", "iris_ray.events", "iris_ray.errors",
)  # fmt: skip
"""The modules that documents and examples import from; each name comes first from the first that has it."""


def names_of(place: str) -> list[str]:
    """Return the public names of a module: its ``__all__``, or all that it defines itself."""
    module = import_module(place)
    if place == "iris_ray.events":
        return sorted(name for name in vars(module) if name.endswith("Event"))
    if place == "iris_ray.errors":
        return sorted(name for name, what in vars(module).items() if inspect.isclass(what))
    return sorted(module.__all__)


def public() -> dict[str, Any]:
    """Return everything public by its full name, once."""
    found: dict[str, Any] = {}
    for place in PLACES:
        for name in names_of(place):
            what = getattr(import_module(place), name)
            if not any(what is known for known in found.values()):
                found[f"{place}.{name}"] = what
    return found


def plain(annotation: Any) -> str:
    """Return an annotation without the modules in which things happen to be defined."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace(str(Event), "Event")  # all thirty of them
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)  # typing's own classes, such as BinaryIO
    text = re.sub(r"Annotated\[(\w+), <object object at \w+>\]", r"\1", text)
    text = re.sub(r"Optional\[(.*)\]", r"\1 | None", text)  # up to Python 3.13
    return re.sub(r"\b[a-zA-Z_]\w*\.(?=[a-zA-Z_])", "", text)


def signature_of(function: Any) -> str:
    return str(shown_signature(function)).replace("'", '"')


def shown_signature(function: Any) -> inspect.Signature:
    """Return a signature whose annotations have no modules."""
    signature = inspect.signature(function)
    shown = []
    for parameter in signature.parameters.values():
        has_none = parameter.annotation is parameter.empty
        annotation = parameter.empty if has_none else _Shown(plain(parameter.annotation))
        default = parameter.default
        if default is os.environ:
            default = _Shown("os.environ")
        shown.append(parameter.replace(annotation=annotation, default=default))
    returns = signature.return_annotation
    returns = signature.empty if returns is signature.empty else _Shown(plain(returns))
    return signature.replace(parameters=shown, return_annotation=returns)


class _Shown(str):
    """A text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def lines_of(name: str, what: Any) -> Iterator[str]:
    """Yield what a user can rely on, a line each."""
    if isinstance(what, type) and issubclass(what, enum.Enum):
        yield f"{name}: {' '.join(f'{one.name}={one.value!r}' for one in what)}"
        return
    if isinstance(what, type):
        bases = ", ".join(base.__name__ for base in what.__bases__ if base is not object)
        own_init = not issubclass(what, BaseException) or "__init__" in vars(what)
        yield f"{name}({bases})" if bases else name
        if own_init and what.__init__ is not object.__init__:  # type: ignore[misc]
            yield f"    {signature_of(what)}"
        for member, value in sorted(members_of(what).items()):
            yield f"    .{member}{signature_of(value) if callable(value) else ''}"
        return
    if not callable(what):
        yield f"{name} = {plain(what)}"
        return
    yield f"{name}{signature_of(what)}"
    if not inspect.isroutine(what):
        yield from (f"    .{member}{signature_of(getattr(what, member))}" for member in sorted(members_of(type(what))))


def members_of(what: type) -> dict[str, Any]:
    """Return the public methods and properties of a class that iris_ray has written; fields are in its signature."""
    found: dict[str, Any] = {}
    for base in reversed(what.__mro__):
        if base.__module__.startswith("iris_ray"):
            methods = {name: value for name, value in vars(base).items() if not name.startswith("_")}
            found |= {
                name: value if isinstance(value, property) else getattr(what, name)
                for name, value in methods.items()
                if isinstance(value, property)
                or inspect.isroutine(value)
                or isinstance(value, (classmethod, staticmethod))
            }
    return found


def written() -> str:
    """Return everything public as text."""
    lines = [line for name, what in public().items() for line in lines_of(name, what)]
    lines += ["", "# options: defaults, flags"]
    lines += [
        f"{name}={option.default!r} {option.flag}{elsewhere(option)}".rstrip() for name, option in OPTIONS.items()
    ]
    lines += ["", "# again, where people look for them"]
    by_id = {id(what): name for name, what in public().items()}
    for place in PLACES:
        for name in names_of(place):
            first = by_id[id(getattr(import_module(place), name))]
            if first != f"{place}.{name}":
                lines.append(f"{place}.{name} is {first}")
    return "\n".join(lines) + "\n"


def elsewhere(option: Option) -> str:
    return "".join(f"; {other.value!r} in {', '.join(other.of)}" for other in option.elsewhere)


if __name__ == "__main__":
    RECORDED.write_text(written())
