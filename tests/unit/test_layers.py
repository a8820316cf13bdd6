"""What import-linter's contracts (pyproject.toml) can't say about imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import iris_ray

PACKAGE = Path(iris_ray.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

MAY_USE_PRIVATE_RAY = {
    PACKAGE / "actors" / "wire" / "ray_internals.py",
    *(PACKAGE / "testing" / "ray_node").glob("*.py"),
}


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


def test_private_ray_names_are_used_in_the_adapters_only() -> None:
    offenders = [
        where(path, line, name)
        for path in FILES
        if path not in MAY_USE_PRIVATE_RAY
        for line, name in (*imports(path), *dotted_names(path))
        if is_private_ray(name)
    ]
    assert not offenders


@pytest.mark.parametrize(
    "statement",
    [
        "import iris_ray",
        "from iris_ray.scheduler.scheduler import Scheduler",
        "from iris_ray.state.controller_state import ControllerState",
        "from iris_ray import Constraint, TaskState, TpuSuccess, get_job_info, get_tpu_config",
    ],
)
def test_core_import_in_a_fresh_interpreter_leaves_ray_alone(statement: str) -> None:
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
