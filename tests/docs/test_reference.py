"""The reference of all public names and commands is what the code says."""

from tools.public_names import PLACES, names_of
from tools.reference import DIRECTORY, pages

ANEW = "write it anew: python -m tools.reference"


def test_reference_is_made_from_the_code() -> None:
    now = pages()
    written = {page.name: page.read_text() for page in DIRECTORY.iterdir()}
    assert [name for name in now.keys() | written.keys() if now.get(name) != written.get(name)] == [], ANEW


def test_reference_has_every_public_name() -> None:
    lines = {line for page in DIRECTORY.iterdir() for line in page.read_text().splitlines()}
    headings = {line.lstrip("# ") for line in lines if line.startswith("#")}
    assert {name for place in PLACES for name in names_of(place)} - headings == set()
