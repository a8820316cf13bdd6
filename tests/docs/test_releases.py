"""The files that a release needs have the form that tools and docs/releasing.md expect."""

import re

import yaml

from iris_ray import __version__
from tests.docs.pages import REPOSITORY
from tools.release import STATED, disagreeing

KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_changelog_has_the_form_of_keep_a_changelog() -> None:
    sections = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    assert [one for one in sections[1:] if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one)] == []
    kinds = re.findall(r"^### (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert set(kinds) <= KINDS


def test_files_agree_on_the_version_that_comes_next() -> None:
    assert set(disagreeing(__version__)) <= {"CHANGELOG.md"}, "its section is still called Unreleased"
    assert disagreeing("999.0.0") == list(STATED)


def test_citation_and_workflow_are_valid() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    assert ".ci/run" in [step.get("run") for step in workflow["jobs"]["test"]["steps"]]
