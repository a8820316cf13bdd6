"""The diagram of task states in docs/design/recovery.md says exactly what the table of transitions says."""

import re
from pathlib import Path

import pytest

from iris_ray.model.lifecycle import TRANSITIONS, TaskState

PAGE = Path(__file__).parents[3] / "docs" / "design" / "recovery.md"
BEGIN, END = "<!-- task states -->", "<!-- end of task states -->"
ARROW = re.compile(r"(?P<old>\w+|\[\*\]) --> (?P<new>\w+|\[\*\])(: (?P<label>\S.*))?")
OUTSIDE = "[*]"


def read_diagram(text: str) -> list[tuple[str, str, str | None]]:
    """All arrows of the state diagram between the two marks: from, to, label.

    Raises:
        ValueError: the marks, the fences or a line are not as they should be.
    """
    _, begun, rest = text.partition(f"{BEGIN}\n")
    block, ended, _ = rest.partition(f"{END}\n")
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    if not begun or not ended or lines[:2] != ["```mermaid", "stateDiagram-v2"] or lines[-1] != "```":
        raise ValueError(f"no mermaid stateDiagram-v2 between {BEGIN} and {END}")
    arrows = []
    for line in lines[2:-1]:
        found = ARROW.fullmatch(line)
        if found is None:
            raise ValueError(f"{line!r} is no transition")
        arrows.append((found["old"], found["new"], found["label"]))
    return arrows


@pytest.fixture(scope="module")
def arrows() -> list[tuple[str, str, str | None]]:
    return read_diagram(PAGE.read_text(encoding="utf-8"))


def test_diagram_has_exactly_the_tables_transitions(arrows: list[tuple[str, str, str | None]]) -> None:
    drawn = [(old, new) for old, new, _ in arrows if OUTSIDE not in (old, new)]
    table = {(old.name, new.name) for old, targets in TRANSITIONS.items() for new in targets}
    assert set(drawn) == table
    assert len(drawn) == len(table), "a transition is drawn twice"


def test_diagram_begins_and_ends_as_tasks_do(arrows: list[tuple[str, str, str | None]]) -> None:
    assert [new for old, new, _ in arrows if old == OUTSIDE] == [TaskState.PENDING.name]
    drawn = [old for old, new, _ in arrows if new == OUTSIDE]
    assert sorted(drawn) == sorted(state.name for state, targets in TRANSITIONS.items() if not targets)


def test_diagram_names_cause_of_every_transition(arrows: list[tuple[str, str, str | None]]) -> None:
    assert [arrow for arrow in arrows if OUTSIDE not in arrow[:2] and not arrow[2]] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{BEGIN}\n{END}\n",
        f"{BEGIN}\n```mermaid\nstateDiagram-v2\nPENDING -> ASSIGNED\n```\n{END}\n",
        f"{BEGIN}\n```mermaid\nstateDiagram-v2\nPENDING --> ASSIGNED:\n```\n{END}\n",
        f"{BEGIN}\n```mermaid\nstateDiagram-v2\nPENDING --> ASSIGNED: placed\n```\n",
    ],
    ids=["nothing", "no diagram", "no arrow", "empty label", "no end"],
)
def test_diagram_reader_refuses_unknown_lines(text: str) -> None:
    with pytest.raises(ValueError, match="no "):
        read_diagram(text)
