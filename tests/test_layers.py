"""The layers of the package: imports point downwards only, and the pure core stays pure."""

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

# From the top down. The core is every other module directly in the package.
CLI, PUBLIC, TESTING, ACTORS, CORE = range(5)
PUBLIC_MODULES = {
    "launcher",
    "client",
    "endpoints",
    "submission",
    "connection",
    "log_stream",
    "remote_options",
    "jax",
    "preemption",
}
IMPURE = {"time", "datetime", "asyncio", "threading", "socket", "subprocess", "random"}
READS_ENVIRONMENT = PACKAGE / "job_info.py"
MAY_USE_PRIVATE_RAY = {PACKAGE / "actors" / "ray_internals.py"}


def layer(module: str) -> int | None:
    """The layer of a module by its dotted name; None if it is not ours, or the package itself."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if package != "iris_ray" or not first:
        return None
    by_name = {"cli": CLI, "__main__": CLI, "testing": TESTING, "actors": ACTORS} | dict.fromkeys(
        PUBLIC_MODULES, PUBLIC
    )
    return by_name.get(first, CORE)


def layer_of(path: Path) -> int:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    found = layer(".".join(("iris_ray", *parts)))
    assert found is not None
    return found


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


CORE_FILES = [path for path in FILES if layer_of(path) == CORE]


def test_layers_each_has_files() -> None:
    assert {layer_of(path) for path in FILES} == {CLI, TESTING, PUBLIC, ACTORS, CORE}


def test_imports_point_downwards_only() -> None:
    upwards = [
        where(path, line, f"imports {name} from a layer above")
        for path in FILES
        for line, name in imports(path)
        if (imported := layer(name)) is not None and imported < layer_of(path)
    ]
    assert not upwards


def test_core_imports_neither_ray_nor_clock_nor_io() -> None:
    forbidden = {"ray", "jax", *IMPURE}
    offenders = [
        where(path, line, name)
        for path in CORE_FILES
        for line, name in imports(path)
        if name.partition(".")[0] in forbidden or (name.partition(".")[0] == "os" and path != READS_ENVIRONMENT)
    ]
    assert not offenders


def test_core_reads_the_environment_and_nothing_else_of_os() -> None:
    used = {name for _, name in dotted_names(READS_ENVIRONMENT) if name.startswith("os.")}
    assert used <= {"os.environ"}


def test_private_ray_names_are_used_in_one_place() -> None:
    offenders = [
        where(path, line, name)
        for path in FILES
        if path not in MAY_USE_PRIVATE_RAY and layer_of(path) != TESTING
        for line, name in (*imports(path), *dotted_names(path))
        if is_private_ray(name)
    ]
    assert not offenders


@pytest.mark.parametrize(
    "statement",
    [
        "import iris_ray",
        "from iris_ray.scheduler import Scheduler",
        "from iris_ray.state import ControllerState",
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
        iris_ray.run_on_pods  # noqa: B018
