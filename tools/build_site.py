"""Gathers the pages of the documentation's site in ``build/pages``; `make site` then builds them with zensical.

The pages are those of the repository as they are, so every link between them holds in both places.
"""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = REPOSITORY / "build" / "pages"
FOLDERS = ("docs", "examples")


def main() -> None:
    """Make ``build/pages`` anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, PAGES / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for page in (*REPOSITORY.glob("*.md"), REPOSITORY / "LICENSE"):
        shutil.copy(page, PAGES / page.name)
    (PAGES / "tests").mkdir()
    shutil.copy(REPOSITORY / "tests" / "README.md", PAGES / "tests")
    (PAGES / "README.md").rename(PAGES / "index.md")


if __name__ == "__main__":
    main()
