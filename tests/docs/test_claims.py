"""What README.md, docs/comparison.md and docs/tested-on.md claim about iris_ray names what shows it, and that exists.

A claim carries a comment that readers don't see: ``<!-- shown by: tests/unit/test_errors.py, iris-ray why -->``. It
names test files, single tests (``file.py::test_name``), benchmarks, pages (with ``#heading`` or without), commands.
"""

import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import PAGES, REPOSITORY, anchors
from tests.support.command_line import COMMANDS

SHOWN_BY = re.compile(r"<!--\s*shown by:\s*(?P<what>.*?)\s*-->", re.DOTALL)
CLAIMS = {
    "README.md": r"^- \*\*[^*:]+\.\*\*.*?(?=^- |^$)",
    "docs/comparison.md": r"^\| \*\*iris_ray.*?$|^- \*\*What iris_ray adds.*?(?=^- |^$)|^\| .* \| (?:has|part) .*?$",
    "docs/tested-on.md": r"^\| .*?\| no\b.*?$",
}
"""Where each page makes claims about iris_ray."""


def shown_by(text: str) -> Iterator[str]:
    """Yield each thing that the comments of a text name."""
    for comment in SHOWN_BY.finditer(text):
        yield from (re.sub(r"\s+", " ", one.strip()) for one in comment["what"].split(","))


def exists(evidence: str) -> bool:
    if evidence.startswith("iris-ray "):
        return evidence.removeprefix("iris-ray ") in COMMANDS
    path, _, test = evidence.partition("::")
    path, _, heading = path.partition("#")
    file = REPOSITORY / path
    if not file.exists():
        return False
    if heading:
        return heading in anchors(file)
    return not test or re.search(rf"^(async )?def {re.escape(test)}\(", file.read_text(), re.MULTILINE) is not None


EVIDENCE = [(page.relative_to(REPOSITORY).as_posix(), one) for page in PAGES for one in shown_by(page.read_text())]


@pytest.mark.parametrize(("page", "evidence"), EVIDENCE)
def test_evidence_of_a_claim_exists(page: str, evidence: str) -> None:
    assert exists(evidence), f"{page} says that {evidence} shows what it claims, and there is no such thing"


@pytest.mark.parametrize("page", CLAIMS)
def test_every_claim_names_its_evidence(page: str) -> None:
    claims = re.findall(CLAIMS[page], (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)
    assert claims
    assert [claim for claim in claims if not SHOWN_BY.search(claim)] == []


@pytest.mark.parametrize(
    "evidence",
    [
        "tests/no_such_file.py",
        "tests/docs/test_claims.py::test_nothing",
        "docs/no-such-page.md",
        "docs/tested-on.md#no-such-heading",
        "iris-ray no-such-command",
    ],
)
def test_evidence_that_does_not_exist_is_found(evidence: str) -> None:
    assert not exists(evidence)


def test_figures_in_the_readme_are_those_of_the_benchmark() -> None:
    readme, page = (REPOSITORY / name for name in ("README.md", "docs/recovery-times.md"))
    lost = re.findall(r"^\| (memory|Orbax), slice killed \|.*\| ([\d.]+) \|$", page.read_text(), re.MULTILINE)
    claimed = re.search(r"lost ([\d.]+) s; with Orbax it lost ([\d.]+) s", " ".join(readme.read_text().split()))
    assert claimed is not None
    assert claimed.groups() == (dict(lost)["memory"], dict(lost)["Orbax"])
