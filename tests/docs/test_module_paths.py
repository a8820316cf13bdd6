"""Where the maps name a module, it is there: a path leads to it, from the repository, iris_ray/ or its own room."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import REPOSITORY

PACKAGE = REPOSITORY / "iris_ray"
ROOMS = sorted(PACKAGE.rglob("__init__.py"))
MODULE = re.compile(r"`([\w./-]+\.py)`")
ROOM = re.compile(r"\| `(iris_ray/[\w/]+/)`")
"""The first cell of a row that is about one package."""
OF_THE_READER = {"train.py", "prepare.py"}


def lost_modules(text: str, *roots: Path) -> list[str]:
    """Return the modules that a text names and that are under none of these roots."""
    named = set(MODULE.findall(text)) - OF_THE_READER
    return sorted(name for name in named if not any((root / name).is_file() for root in roots))


def lines_and_rooms(text: str) -> Iterator[tuple[str, Path]]:
    """Yield each line with the package that it is about: the repository, unless it is a row about one."""
    for line in text.splitlines():
        row = ROOM.match(line)
        yield line, REPOSITORY / row[1] if row else REPOSITORY


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/developing.md"])
def test_page_names_modules_by_paths_that_lead_there(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    assert not [lost for line, room in lines_and_rooms(text) for lost in lost_modules(line, REPOSITORY, PACKAGE, room)]


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.parent.relative_to(REPOSITORY)))
def test_room_docstring_names_modules_by_paths_that_lead_there(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse(room.read_text())) or ""
    assert not lost_modules(docstring, REPOSITORY, PACKAGE, room.parent)


@pytest.mark.parametrize("named", ["`failure_detector.py`", "`actors/pool/failure_detector.py`"])
def test_a_bare_or_wrong_path_is_found(named: str) -> None:
    assert lost_modules(f"Start with {named}.", REPOSITORY, PACKAGE, PACKAGE / "actors" / "pool")
