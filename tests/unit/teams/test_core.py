"""Files of teams as operators write them, and the chips of a quota's type."""

import pickle

import pytest

from iris_ray.errors import InvalidTeamsError
from iris_ray.model.teams import EVERYBODY, MOST_LEVELS, Quota, Team, Teams, chips_of
from iris_ray.teams.core import read_teams, to_toml

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
    return read_teams(TREE)[0]


def test_written_teams_are_read_back_the_same(teams: Teams) -> None:
    text = to_toml(teams)
    assert read_teams(text) == (teams, teams.version)
    assert Teams.from_tables(teams.to_tables()) == teams
    assert pickle.loads(pickle.dumps(teams)) == teams


def test_odd_numbers_and_names_survive_a_file() -> None:
    odd = Teams([Team("a.b-c_1", {"v4-32": Quota(1e22, lend=1e-9)}, 0.1, (EVERYBODY, "x+y@z.org"))])
    assert read_teams(to_toml(odd)) == (odd, odd.version)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[teams.a", "can't be read"),
        ("a = " + "9" * 5000, "can't be read"),
        ("a = " + "[" * 50_000, "can't be read"),
        ("[teams.a.b]", 'a part of it is [teams."a/b"]'),
        ('[teams."a/b"]', "is a part of a, which does not exist"),
        ("[teams.a]\nlimit = 3", "there are only quota, weight, users"),
        ("[teams.a]\nusers = 'ann'", "give users as a list of names"),
        ("[teams.a]\nusers = [3]", "which is not a user's name"),
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
        ("[team.a]", "the file has 'team' in addition to [teams.NAME]"),
        ("teams = 3", "in addition to [teams.NAME]"),
        ("version = 3", "leave it as `iris-ray team show --toml` has written it"),
    ],
)
def test_senseless_teams_are_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(InvalidTeamsError) as refused:
        read_teams(text)
    assert says in str(refused.value)


def test_chips_of_a_generation_are_those_of_its_types() -> None:
    fleet = {"v4-32": 64.0, "v4-8": 8.0, "v5p-8": 4.0, "GPU": 16.0}
    assert [chips_of(kind, fleet) for kind in ("v4-32", "v4", "GPU", "v6e")] == [64, 72, 16, 0]


def test_empty_file_has_no_teams() -> None:
    assert read_teams("") == (Teams(), None)
