"""Teams: the tree, and which users belong to which team."""

import tomllib

import pytest

from iris_ray.errors import InvalidTeamsError, NotPermittedError, UnknownNameError
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import EVERYBODY, NO_TEAM, Quota, Team, Teams

TREE = """
[teams.research]
quota.v4-32 = { chips = 128, borrow = 64 }
quota.GPU = 16

[teams."research/vision"]
users = ["ann", "bob"]
weight = 2
quota.v4-32 = { chips = 64, lend = 32, production = 32 }

[teams."research/nlp"]
users = ["bob"]
quota.v4-32 = 32.5

[teams.ads]
users = ["eve"]
"""


def tree(text: str) -> Teams:
    return Teams.from_tables(tomllib.loads(text)["teams"])


@pytest.fixture
def teams() -> Teams:
    return tree(TREE)


def test_file_of_teams_says_quotas_users_and_weights(teams: Teams) -> None:
    vision = teams.by_name["research/vision"]
    assert vision.users == ("ann", "bob")
    assert vision.weight == 2
    assert vision.quotas == {"v4-32": Quota(64, lend=32, by_band={PriorityBand.PRODUCTION: 32})}
    assert teams.by_name["research"].quotas["v4-32"] == Quota(128, borrow=64)
    assert teams.parts("research") == ("research/nlp", "research/vision")
    assert teams.parts(NO_TEAM) == ("ads", "research")


def test_version_is_of_the_tree_alone(teams: Teams) -> None:
    assert tree(TREE.replace("weight = 2", "weight = 2.0")).version == teams.version
    assert Teams(reversed(list(teams))).version == teams.version
    assert tree(TREE.replace("weight = 2", "weight = 3")).version != teams.version


@pytest.mark.parametrize(
    ("user", "wanted", "team"),
    [
        ("ann", None, "research/vision"),
        ("ann", "research/vision", "research/vision"),
        ("bob", "research/nlp", "research/nlp"),
        ("dan", None, NO_TEAM),
    ],
)
def test_job_gets_the_team_it_names_or_its_users(teams: Teams, user: str, wanted: str | None, team: str) -> None:
    assert teams.team_for(user, wanted) == team


@pytest.mark.parametrize(
    ("user", "wanted", "error", "says"),
    [
        ("bob", None, InvalidTeamsError, "say which, as in --team research/nlp or IRIS_TEAM=research/nlp"),
        ("ann", "research/nlp", NotPermittedError, "but to research/vision; an operator can add ann"),
        ("ann", "research", NotPermittedError, "does not belong to team research"),
        ("dan", "ads", NotPermittedError, "but to none"),
        ("ann", "research/vison", UnknownNameError, "did you mean research/vision"),
    ],
)
def test_job_without_a_clear_team_is_refused_with_advice(
    teams: Teams, user: str, wanted: str | None, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as refused:
        teams.team_for(user, wanted)
    assert says in str(refused.value)


def test_only_team_open_to_everybody_takes_all_others() -> None:
    teams = Teams([Team("all", users=(EVERYBODY,)), Team("ads", users=("eve",))])
    assert [teams.team_for(user, None) for user in ("dan", "eve")] == ["all", "ads"]
    assert teams.team_for("eve", "all") == "all"


def test_without_teams_only_jobs_that_name_one_are_refused() -> None:
    assert Teams().team_for("ann", None) == NO_TEAM
    with pytest.raises(InvalidTeamsError, match="this cluster has no teams; leave --team and IRIS_TEAM out"):
        Teams().team_for("ann", "ads")


def test_removed_team_counts_for_the_nearest_above(teams: Teams) -> None:
    assert teams.nearest("research/audio/tts") == "research"
    assert teams.nearest("sales/eu") == NO_TEAM
