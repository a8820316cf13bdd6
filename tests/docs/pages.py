"""The project's documents, read as Markdown: their code blocks, the names in backticks, their links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).parents[2]
FOLDERS = (REPOSITORY / "docs", REPOSITORY / ".github")
PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        REPOSITORY / "tests" / "README.md",
        REPOSITORY / "examples" / "README.md",
        *(page for folder in FOLDERS for page in folder.rglob("*.md")),
    ]
)

_TEST = re.compile(r"<!-- test: (?P<how>[^\n]*?)(?:\n(?P<setup>.*?))?\s*-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block.

    Attributes:
        page: the document, relative to the repository.
        line: the line of its fence, from 1.
        language: what stands behind the fence, such as "python".
        text: the code.
        how: what the comment ``<!-- test: … -->`` before it says about its test; "" without such a comment.
        setup: code in that comment, to be run before the block.
    """

    page: str
    line: int
    language: str
    text: str
    how: str
    setup: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def _blocks(page: Path) -> Iterator[Block]:
    before: Token | None = None
    for token in tokens(page):
        if token.type == "fence":
            comment = _TEST.fullmatch(before.content.strip()) if before and before.type == "html_block" else None
            assert token.map is not None
            how, setup = (comment["how"].strip(), comment["setup"] or "") if comment else ("", "")
            name = str(page.relative_to(REPOSITORY))
            yield Block(name, token.map[0] + 1, token.info.strip(), token.content, how, setup)
        before = token


def blocks(*languages: str) -> list[Block]:
    """All code blocks of these languages."""
    return [block for page in PAGES for block in _blocks(page) if block.language in languages]


def inline_code(page: Path) -> Iterator[str]:
    """What stands in backticks outside code blocks."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield child.content


def links(page: Path) -> Iterator[str]:
    """The targets of all links and pictures."""
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") if child.type == "link_open" else child.attrGet("src")
            if target is not None:
                yield str(target)


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    titles = [
        inline.content
        for heading, inline in zip(tokens(page), tokens(page)[1:], strict=False)
        if heading.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
