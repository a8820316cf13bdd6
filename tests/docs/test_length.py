"""Pages for users stay short enough to be read."""

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, REPOSITORY

MOST_WORDS = {"README.md": 600, "CHANGELOG.md": 600}
AS_LONG_AS_THEIR_SUBJECT = {"ARCHITECTURE.md", "CONTRIBUTING.md"}
PAGE_WORDS = 1500
DECISION_LINES = 25


@pytest.mark.parametrize(
    "page", sorted({str(page.relative_to(REPOSITORY)) for page in PAGES} - AS_LONG_AS_THEIR_SUBJECT)
)
def test_page_is_short(page: str) -> None:
    assert len((REPOSITORY / page).read_text().split()) <= MOST_WORDS.get(page, PAGE_WORDS)


@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs" / "decisions").glob("0*.md")), ids=lambda page: page.name)
def test_decision_is_a_short_record(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= DECISION_LINES
    assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Consequences"]
    assert lines[0].startswith(f"# {page.name[:3]}. ")
    assert f"]({page.name})" in (page.parent / "README.md").read_text()
