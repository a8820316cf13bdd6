"""The documentation as a site: its navigation leads to pages, and to every page."""

from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.pages import REPOSITORY


def listed(entry: Any) -> Iterator[str]:
    """The pages of a navigation, however deep."""
    if isinstance(entry, str):
        yield entry
    for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from listed(below)


def test_every_entry_of_the_navigation_is_a_page_and_named_once() -> None:
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    entries = list(listed(config["nav"]))
    made = {"index.md": "README.md"}
    assert [page for page in entries if not (REPOSITORY / made.get(page, page)).is_file()] == []
    assert len(set(entries)) == len(entries)


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    pages = {
        str(page.relative_to(REPOSITORY))
        for folder in ("docs", "docs/design")
        for page in (REPOSITORY / folder).glob("*.md")
    }
    assert pages - set(listed(config["nav"])) == set()
