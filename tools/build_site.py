"""Gathers the pages of the documentation's site in ``build/pages``; `make site` then builds them with zensical.

The pages are those of the repository as they are, so every link between them holds in both places. The reference is
made of the public names in ``iris_ray/__init__.pyi``; mkdocstrings fills in their docstrings.
"""

import ast
import shutil
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = REPOSITORY / "build" / "pages"
FOLDERS = ("docs", "examples")
SECTIONS = {
    "client": "Running jobs",
    "task": "Inside a task",
    "actors": "How jobs and tasks stand",
    "slots": "Serving models",
    "model": "What jobs ask for, and how they end",
    "errors": "Errors",
}


def main() -> None:
    """Make ``build/pages`` anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, PAGES / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for page in (*REPOSITORY.glob("*.md"), REPOSITORY / "LICENSE"):
        shutil.copy(page, PAGES / page.name)
    (PAGES / "README.md").rename(PAGES / "index.md")
    (PAGES / "reference.md").write_text(reference((REPOSITORY / "iris_ray" / "__init__.pyi").read_text()))


def reference(stub: str) -> str:
    """Return the page of all public names, from the stub that lists where each is defined."""
    by_section: dict[str, list[str]] = defaultdict(list)
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            section = node.module.split(".")[0]
            by_section[section] += [f"iris_ray.{node.module}.{alias.name}" for alias in node.names]
    page = ["# Reference", "All of these can be imported from `iris_ray`.", ""]
    for section, title in SECTIONS.items():
        page += [f"## {title}", ""]
        for name in sorted(by_section.pop(section), key=lambda name: name.rpartition(".")[2].lower()):
            page += [f"::: {name}", ""]
    if by_section:
        raise SystemExit(f"tools/build_site.py: give a title to the section of {', '.join(by_section)}")
    return "\n".join(page)


if __name__ == "__main__":
    main()
