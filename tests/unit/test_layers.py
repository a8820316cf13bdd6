"""What import-linter's contracts (pyproject.toml) can't say about imports."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import iris_ray
from iris_ray import services

PACKAGE = Path(iris_ray.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_USE_PRIVATE_RAY = {
    PACKAGE / "actors" / "calls" / "ray_internals.py",
    PACKAGE / "capacity" / "ray_internals.py",
    *(PACKAGE / "testing" / "ray_node").glob("*.py"),
}
SERVICES = {name.removeprefix("iris_ray.") for name in services.SERVICES}
KERNEL = {"model", "state", "scheduler", "actors", "client", "task"}
FRAMES = {"cli", "dashboard", "testing"}
ROW = re.compile(r"^\| (`iris_ray/[^|]+) \|", re.MULTILINE)
"""The first cell of a row of ARCHITECTURE.md that is about packages."""


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


def room_of(path: Path) -> str:
    """Return the package, or the module beside the packages, that a file is in."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_while_imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file imports while it is imported: not in functions, nor for types only."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from ((statement.lineno, f"{statement.module}.{alias.name}") for alias in statement.names)


def runtime_imports(path: Path) -> Iterator[tuple[int, str]]:
    """As `imports`, without those for types only: a public method of the kernel may name a service's type."""
    for_types = {
        inner.lineno
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    }
    yield from ((line, name) for line, name in imports(path) if line not in for_types)


def service_in(name: str) -> str | None:
    """Return the service that a dotted name is in."""
    top, _, rest = name.partition(".")
    room = rest.partition(".")[0]
    return room if top == "iris_ray" and room in SERVICES else None


def test_private_ray_names_are_used_only_in_adapters() -> None:
    offenders = [
        where(path, line, name)
        for path in FILES
        if path not in MAY_USE_PRIVATE_RAY
        for line, name in (*imports(path), *dotted_names(path))
        if is_private_ray(name)
    ]
    assert not offenders


@pytest.mark.parametrize("room", sorted(KERNEL | FRAMES))
def test_kernel_or_frame_imports_no_service(room: str) -> None:
    offenders = [
        where(path, line, name)
        for path in FILES
        if room_of(path) == room
        for line, name in runtime_imports(path)
        if service_in(name)
    ]
    assert not offenders


@pytest.mark.parametrize("room", sorted(SERVICES))
def test_service_imports_no_other_service_while_it_is_imported(room: str) -> None:
    offenders = [
        where(path, line, name)
        for path in FILES
        if room_of(path) == room
        for line, name in imports_while_imported(path)
        if service_in(name) not in (None, room)
    ]
    assert not offenders


def test_every_folder_is_kernel_frame_floor_or_listed_service() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == KERNEL | FRAMES | SERVICES | {"processes"}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_service_says_its_own_name(name: str) -> None:
    assert import_module(f"iris_ray.{name}.service").SERVICE.name == name


def test_architecture_has_a_row_for_each_package() -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    named = {name for row in ROW.findall(text) for name in re.findall(r"`iris_ray/(\w+)/", row)}
    assert named == KERNEL | FRAMES | SERVICES | {"processes"}


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
