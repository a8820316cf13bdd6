"""What users can import, with signatures and defaults, is what is written down in public_names.txt beside this test.

After a change that is meant: ``python -m tools.public_names`` writes the file anew.
"""

import enum
import inspect
import typing
from collections.abc import Iterator
from types import GenericAlias, ModuleType, UnionType
from typing import Any

import iris_ray
from tools.public_names import RECORDED, members_of, public, written

FOR_US = {"Actor", "ClientKeeper", "SlotManager", "InTaskOf", "InProcess", "Runner", "TaskAttemptId", "Transport"}
"""What constructors take, and properties return, that only iris_ray uses."""


def test_public_names_signatures_and_defaults_are_those_that_are_written_down() -> None:
    now, before = written().splitlines(), RECORDED.read_text().splitlines()
    assert now == before, "if that is meant: python -m tools.public_names"


def test_what_public_functions_take_and_return_is_public() -> None:
    known = {id(what) for what in public().values()}
    missing = set()
    for name, what in public().items():
        if name.startswith(("iris_ray.state", "iris_ray.scheduler", "iris_ray.events", "iris_ray.study")):
            continue  # for those who drive the core, whose modules ARCHITECTURE.md names
        for mentioned in mentioned_by(what):
            if id(mentioned) not in known and mentioned.__name__ not in FOR_US:
                missing.add((name, mentioned.__name__))
    assert sorted(missing) == []


def mentioned_by(what: Any) -> Iterator[type]:
    if not callable(what) or (isinstance(what, type) and issubclass(what, (enum.Enum, BaseException))):
        return
    kind = what if isinstance(what, type) else type(what)
    functions = [what] if inspect.isroutine(what) else [vars(kind).get("__init__"), *members_of(kind).values()]
    for function in filter(None, functions):
        try:
            hints = typing.get_type_hints(function.fget if isinstance(function, property) else function)
        except NameError:  # what only type checkers import, such as Fray
            continue
        for hint in hints.values():
            yield from classes_in(hint)


def classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and not isinstance(hint, GenericAlias):
        if hint.__module__.startswith("iris_ray") and not typing.is_typeddict(hint):
            yield hint
    elif isinstance(hint, (UnionType, GenericAlias)) or typing.get_origin(hint) is not None:
        for part in typing.get_args(hint):
            for each in part if isinstance(part, list) else [part]:
                yield from classes_in(each)


def test_names_of_the_stub_are_those_of_the_package() -> None:
    for name in iris_ray.__all__:
        assert not isinstance(getattr(iris_ray, name), ModuleType), name
