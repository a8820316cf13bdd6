"""Gathers the pages of the documentation's site in ``build/pages``; `make site` then builds them with zensical.

The pages are those of the repository as they are, so every link between them holds in both places. The reference is
made of the public names in ``iris_ray/__init__.pyi``, and those of `DOORS`; mkdocstrings fills in their docstrings.
"""

import ast
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = REPOSITORY / "build" / "pages"
FOLDERS = ("docs", "examples")
SECTIONS = {
    "Running jobs": ("client", "secrets", "dev", "docker", "remote"),
    "Inside a task": ("task", "endpoints"),
    "How jobs and tasks stand": ("actors", "logs"),
    "Serving models": ("slots",),
    "What jobs ask for, and how they end": ("model",),
    "Errors": ("errors",),
}
"""The titles of the reference's sections, and the packages whose public names each has."""


DOORS = {
    "slots/__init__.pyi": "More about slots",
    "jax.py": "JAX in a task",
    "outer/__init__.pyi": "Slices that train by themselves",
    "checkpoint/__init__.pyi": "Checkpoints in memory",
    "levanter/__init__.pyi": "For users of Levanter",
    "fray/__init__.pyi": "For users of Marin",
    "testing/__init__.py": "Simulated clusters",
    "study/__init__.pyi": "Studies in virtual time",
    "state/__init__.py": "Driving the core: the state",
    "scheduler/__init__.py": "Driving the core: the scheduler",
}
"""Other modules with public names, and the titles of what they have beside the names of `iris_ray`."""


def main() -> None:
    """Make ``build/pages`` anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, PAGES / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for page in (*REPOSITORY.glob("*.md"), REPOSITORY / "LICENSE"):
        shutil.copy(page, PAGES / page.name)
    (PAGES / "README.md").rename(PAGES / "index.md")
    (PAGES / "reference.md").write_text(reference(REPOSITORY / "iris_ray"))


def reference(package: Path) -> str:
    """Return the page of all public names, from the modules that list where each is defined."""
    by_package: dict[str, list[str]] = defaultdict(list)
    places = list(_places(package / "__init__.pyi", "iris_ray"))
    for place in places:
        by_package[place.split(".")[1]].append(place)
    page = ["# Reference", "", "All of these can be imported from `iris_ray`.", ""]
    for title, packages in SECTIONS.items():
        page += [f"## {title}", "", *_entries(place for one in packages for place in by_package.pop(one))]
    if by_package:
        raise SystemExit(f"tools/build_site.py: name a section that has the names of {', '.join(by_package)}")
    for file, title in DOORS.items():
        module = ".".join(["iris_ray", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
        more = [place for place in _places(package / file, module) if place not in places]
        page += [f"## {title}", "", f"From `{module}`.", "", *_entries(more)]
    return "\n".join(page)


def _places(file: Path, module: str) -> Iterator[str]:
    """Yield where the names are defined that a module imports and has in its ``__all__``."""
    text = ast.parse(file.read_text())
    (public,) = (
        ast.literal_eval(node.value)
        for node in text.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    for node in ast.walk(text):  # what is imported late stands under `if TYPE_CHECKING`
        if isinstance(node, ast.ImportFrom) and node.module:
            prefix = f"{module}." if node.level else ""
            yield from (f"{prefix}{node.module}.{alias.name}" for alias in node.names if alias.name in public)


def _entries(places: Iterable[str]) -> Iterator[str]:
    for place in sorted(places, key=lambda place: place.rpartition(".")[2].lower()):
        yield from (f"::: {place}", "")


if __name__ == "__main__":
    main()
