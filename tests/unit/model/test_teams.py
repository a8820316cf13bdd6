"""Teams: the tree, the files of operators, and who belongs where."""

import pickle
import time

import pytest

from iris_ray.errors import InvalidTeamsError, NotPermittedError, UnknownNameError
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import EVERYBODY, MOST_LEVELS, NO_TEAM, Quota, Team, Teams, chips_of, read_teams

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


@pytest.fixture
def teams() -> Teams:
    return Teams.from_toml(TREE)


def test_file_of_teams_says_quotas_users_and_weights(teams: Teams) -> None:
    vision = teams.by_name["research/vision"]
    assert vision.users == ("ann", "bob")
    assert vision.weight == 2
    assert vision.quotas == {"v4-32": Quota(64, lend=32, by_band={PriorityBand.PRODUCTION: 32})}
    assert teams.by_name["research"].quotas["v4-32"] == Quota(128, borrow=64)
    assert teams.parts("research") == ("research/nlp", "research/vision")
    assert teams.parts(NO_TEAM) == ("ads", "research")


def test_written_teams_are_read_back_the_same(teams: Teams) -> None:
    text = teams.to_toml()
    assert read_teams(text) == (teams, teams.version)
    assert Teams.from_tables(teams.to_tables()) == teams
    assert pickle.loads(pickle.dumps(teams)) == teams


def test_odd_numbers_and_names_survive_a_file() -> None:
    odd = Teams([Team("a.b-c_1", {"v4-32": Quota(1e22, lend=1e-9)}, 0.1, (EVERYBODY, "x+y@z.org"))])
    assert read_teams(odd.to_toml()) == (odd, odd.version)


def test_version_is_of_the_tree_alone(teams: Teams) -> None:
    assert Teams.from_toml(TREE.replace("weight = 2", "weight = 2.0")).version == teams.version
    assert Teams(reversed(list(teams))).version == teams.version
    assert Teams.from_toml(TREE.replace("weight = 2", "weight = 3")).version != teams.version
    assert read_teams("") == (Teams(), None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[teams.a", "can't be read"),
        ("[teams.a.b]", 'a part of it is [teams."a/b"]'),
        ('[teams."a/b"]', "is a part of a, which does not exist"),
        ("[teams.a]\nlimit = 3", "there are only quota, weight, users"),
        ("[teams.a]\nusers = 'ann'", "give users as a list of names"),
        ("[teams.a]\nusers = [3]", "which is no user's name"),
        ("[teams.a]\nweight = 0", "give a number, more than 0"),
        ("[teams.a]\nweight = inf", "give a number, more than 0"),
        ("[teams.a]\nquota.v4-33 = 3", "a quota is for"),
        ("[teams.a]\nquota.v4-32 = -1", "give a number of chips, 0 or more"),
        ("[teams.a]\nquota.v4-32 = nan", "give a number of chips, 0 or more"),
        ("[teams.a]\nquota.v4-32 = true", "give a number of chips, 0 or more"),
        ("[teams.a]\nquota.v4-32 = { chips = 8, lend = 9 }", "lend is 9, more than the quota of 8 chips"),
        ("[teams.a]\nquota.v4-32 = { chips = 8, steal = 9 }", "there are only chips, lend, borrow"),
        ("[teams.a]\nquota.v4-32 = 8\nquota.v4 = 8", "there are quotas for v4 and for v4-32"),
        ("[teams.a]\nquota.v4 = 8\n[teams.'a/b']\nquota.v4 = 9", "its parts have 9 together"),
        ("[teams.'../a']", "give a path"),
        ("[teams.'a b']", "give a path"),
        ("[teams.'']", "give a path"),
        ("[teams.'a\\u001b[31m']", "give a path"),
        (f"[teams.'{'/'.join('a' * (MOST_LEVELS + 1))}']", "give a path"),
        ("[team.a]", "there is 'team' beside [teams.NAME]"),
        ("teams = 3", "beside [teams.NAME]"),
        ("version = 3", "leave it as `iris-ray team show --toml` has written it"),
    ],
)
def test_senseless_teams_are_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(InvalidTeamsError) as refused:
        read_teams(text)
    assert says in str(refused.value)


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


def test_chips_of_a_generation_are_those_of_its_types() -> None:
    fleet = {"v4-32": 64.0, "v4-8": 8.0, "v5p-8": 4.0, "GPU": 16.0}
    assert [chips_of(kind, fleet) for kind in ("v4-32", "v4", "GPU", "v6e")] == [64, 72, 16, 0]


def test_two_thousand_teams_are_read_and_written_quickly() -> None:
    names = [f"t{top}" for top in range(20)] + [f"t{top}/p{part}" for top in range(20) for part in range(99)]
    quotas = {name: {"v4-32": Quota(64 if "/" in name else 6400)} for name in names}
    teams = Teams(Team(name, quotas[name], users=("ann", f"u{at}")) for at, name in enumerate(names))
    began = time.process_time()
    assert read_teams(teams.to_toml())[0].version == teams.version
    assert time.process_time() - began < 2
    with pytest.raises(InvalidTeamsError, match="and 1995 more; say which"):
        teams.team_for("ann", None)
