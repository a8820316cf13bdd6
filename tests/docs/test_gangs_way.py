"""A gang's way from `run_on_pod` to user code, as docs/design/processes.md lists it: few files, and no gap."""

import ast
import re
from pathlib import Path

from tests.docs.pages import REPOSITORY

PACKAGE = REPOSITORY / "iris_ray"
MOST_FILES = 40
ENTRANCES = {
    "client/run_on_pod.py",
    "actors/controller/pool_calls.py",  # the pool calls these methods by their names
    "actors/controller/event_processor.py",  # `ControllerProcess` hands it to them
    "actors/pool/slice_pool_manager.py",  # `actors/pool/actor.py` names it, and imports it in its own process only
    "actors/host/zygote.py",  # the host runs it as a script
}
"""Files that need not be imported by another one on the way."""


def way() -> list[str]:
    page = (REPOSITORY / "docs" / "design" / "processes.md").read_text()
    section = page.partition("## The files on a gang's way")[2].partition("\n## ")[0]
    rows = (line for line in section.splitlines() if line.startswith("| "))
    return [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]


def imported_by(name: str) -> set[str]:
    """Return the files from which a file imports something, relative to the package."""
    nodes = ast.walk(ast.parse((PACKAGE / name).read_text()))
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("iris_ray."):
            inner = node.module.removeprefix("iris_ray.").replace(".", "/")
            found |= {f"{inner}.py", *(f"{inner}/{alias.name}.py" for alias in node.names)}
    return {path for path in found if Path(PACKAGE, path).is_file()}


def test_gangs_way_is_short_and_without_gaps() -> None:
    files = way()
    assert len(files) == len(set(files)) <= MOST_FILES
    reachable = set[str]().union(*map(imported_by, files))
    assert set(files) - reachable - ENTRANCES == set()
