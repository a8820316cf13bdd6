"""The messages that the page on troubleshooting explains are those that iris_ray prints."""

import ast
import re

import pytest

from tests.docs.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
WITH_MESSAGES = ("message", "reason")
NOT_OURS = ("your own exception",)
LEAST = 8
"""Shorter pieces between the names and numbers of a message say nothing."""


def explained() -> list[str]:
    """The messages of the page, without what stands in parentheses behind them."""
    found, shown = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            shown = False
        elif cells[0] in WITH_MESSAGES:
            shown = True
        elif shown and set(cells[0]) != {"-"} and cells[0] not in NOT_OURS:
            found.append(re.sub(r" \(a signal.*\)$", "", cells[0]))
    return found


def printed() -> list[str]:
    """All texts in iris_ray's code."""
    return [
        " ".join(node.value.split())
        for path in (REPOSITORY / "iris_ray").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


TEXTS = printed()


def test_page_explains_messages() -> None:
    assert len(explained()) > 30


@pytest.mark.parametrize("message", explained())
def test_message_is_printed(message: str) -> None:
    pieces = [piece.strip(" ,") for piece in message.split("…")]
    telling = [piece for piece in pieces if len(piece) >= LEAST]
    assert telling, "nothing of it can be looked up"
    assert [piece for piece in telling if not any(piece in text for text in TEXTS)] == []
