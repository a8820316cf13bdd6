"""The page of teams shows a file that works, and the difference that it makes."""

from iris_ray.model.teams import Teams
from iris_ray.teams.calls import TeamsStatus
from iris_ray.teams.cli import differences
from iris_ray.teams.core import read_teams
from tests.docs.pages import blocks


def test_file_of_the_page_makes_the_difference_that_it_shows() -> None:
    toml, shown = (
        next(block.text for block in blocks(language) if block.page == "docs/teams.md") for language in ("toml", "text")
    )
    nothing = TeamsStatus(Teams().version, (), {})
    assert "\n".join(differences(nothing, read_teams(toml)[0])) == shown.strip()
