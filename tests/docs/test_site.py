"""The documentation as a site: its navigation leads to pages, and the reference has all public names."""

from collections.abc import Iterator
from typing import Any

import yaml

from tests.docs.pages import REPOSITORY
from tests.unit.test_public_names import PLACES, names_of
from tools.build_site import reference


def listed(entry: Any) -> Iterator[str]:
    """The pages of a navigation, however deep."""
    if isinstance(entry, str):
        yield entry
    for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from listed(below)


def test_every_entry_of_the_navigation_is_a_page_and_named_once() -> None:
    config = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    entries = list(listed(config["nav"]))
    made = {"index.md": "README.md", "reference.md": "iris_ray/__init__.pyi"}
    assert [page for page in entries if not (REPOSITORY / made.get(page, page)).is_file()] == []
    assert len(set(entries)) == len(entries)


def test_reference_has_every_public_name() -> None:
    shown = {line.rpartition(".")[2] for line in reference(REPOSITORY / "iris_ray").splitlines() if line[:3] == ":::"}
    places = [place for place in PLACES if place not in ("iris_ray.events", "iris_ray.errors")]
    assert shown == {name for place in places for name in names_of(place)}
