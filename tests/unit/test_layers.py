"""What import-linter's contracts (pyproject.toml) can't say about imports."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import iris_ray

PACKAGE = Path(iris_ray.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_USE_PRIVATE_RAY = {
    PACKAGE / "actors" / "calls" / "ray_internals.py",
    *(PACKAGE / "testing" / "ray_node").glob("*.py"),
}
CORE = {"model", "state", "scheduler", "slots.core", "errors"}
MAY_IMPORT = re.compile(r"May import: (.*?)\.(?=\s|$)", re.DOTALL)
ROW = re.compile(r"^\| `iris_ray/([\w/]+)/` \| ([^|]+) \|", re.MULTILINE)
"""A package in the table of ARCHITECTURE.md, and what it may import."""
WORDS = {name: f"actors.{name}" for name in ("protocol", "calls")}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All that a file is made of."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of all that a file imports, inside functions and type checks too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every chain such as ``ray._private.state``."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.replace(".", "").replace("_", "").isalnum():
                yield node.lineno, text


def is_private_ray(name: str) -> bool:
    top, *rest = name.split(".")
    return top == "ray" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def where(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{line}: {what}"


@cache
def docstrings() -> dict[str, str]:
    """Return the docstring of each package, by its dotted name without "iris_ray"."""
    found = {path: ast.get_docstring(ast.parse(path.read_text())) for path in FILES if path.stem == "__init__"}
    return {".".join(path.parent.relative_to(PACKAGE).parts): text or "" for path, text in found.items()}


@cache
def rooms() -> dict[str, str]:
    """Return what each package may import that says so, by its dotted name."""
    return {name: match[1] for name, text in docstrings().items() if (match := MAY_IMPORT.search(text))}


def room_of(name: str) -> str | None:
    """Return the room that a dotted name without "iris_ray" is in; None for what stands beside the packages."""
    return max((room for room in (*rooms(), "errors") if is_in(name, room)), key=len, default=None)


def is_in(name: str, room: str) -> bool:
    return f"{name}.".startswith(f"{room}.")


@cache
def imported_rooms() -> dict[str, set[str]]:
    """Return the other rooms that the modules of each room import."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in FILES:
        room = room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        for _, name in imports(path):
            if room and name.startswith("iris_ray.") and (other := room_of(name.removeprefix("iris_ray."))):
                found[room].add(other)
    return {room: others - {room} for room, others in found.items()}


def not_allowed(room: str, named: set[str]) -> list[str]:
    """Return the rooms that a room imports, though neither they nor packages around them are named."""
    return sorted(
        other for other in imported_rooms().get(room, ()) if not any(is_in(other, name) for name in {room, *named})
    )


def test_private_ray_names_are_used_only_in_adapters() -> None:
    offenders = [
        where(path, line, name)
        for path in FILES
        if path not in MAY_USE_PRIVATE_RAY
        for line, name in (*imports(path), *dotted_names(path))
        if is_private_ray(name)
    ]
    assert not offenders


@pytest.mark.parametrize("room", sorted(rooms()))
def test_room_imports_only_what_its_docstring_says(room: str) -> None:
    text = rooms()[room].partition("never")[0]
    if text != "everything":
        named = set(re.findall(r"`([\w.]+)`", text)) | (CORE if "the pure core" in text else set())
        assert not not_allowed(room, named)


def test_every_room_says_what_it_may_import() -> None:
    tops = {name for name in docstrings() if name and name.count(".") <= name.startswith(("actors.", "slots."))}
    assert tops - rooms().keys() == set()


def test_architecture_names_what_each_package_imports() -> None:
    rows = ROW.findall((PACKAGE.parent / "ARCHITECTURE.md").read_text())
    assert rows
    for path, text in rows:
        if "below" not in text and text != "everything":
            words = {WORDS.get(word, word) for word in text.split(", ")}
            named = words | {"errors"} | (CORE if "the core" in words else set())
            assert not not_allowed(path.replace("/", "."), named), path


@pytest.mark.parametrize(
    "statement",
    [
        "import iris_ray",
        "from iris_ray.scheduler.scheduler import Scheduler",
        "from iris_ray.state.controller_state import ControllerState",
        "from iris_ray import Constraint, TaskState, TpuSuccess, get_job_info, get_tpu_config",
    ],
)
def test_core_import_does_not_import_ray(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint(sorted({{'ray', 'jax', 'asyncio'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names_can_all_be_imported() -> None:
    missing = [name for name in iris_ray.__all__ if getattr(iris_ray, name, None) is None]
    assert not missing
    assert set(iris_ray.__all__) <= set(dir(iris_ray))


def test_public_name_that_does_not_exist_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="run_on_pods"):
        iris_ray.run_on_pods  # type: ignore[attr-defined]  # noqa: B018
