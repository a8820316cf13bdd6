"""``iris-ray team``: what it shows and sets at the real Controller, and what becomes of jobs of teams."""

import time
from pathlib import Path
from typing import Any

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.errors import InvalidMessageError, InvalidTeamsError, NotPermittedError
from iris_ray.model.teams import Quota, Team, Teams
from iris_ray.teams.calls import TeamCalls
from iris_ray.teams.controller import TeamsInController
from iris_ray.teams.core import read_teams, to_toml
from tests.support.controller_in_process import ControllerInProcess

TREE = """
[teams.research]
quota.v4-16 = 16

[teams."research/vision"]
users = ["ann", "bob"]
quota.v4-16 = { chips = 8, borrow = 8 }

[teams.ads]
users = ["bob"]
quota.v4-16 = 8
"""


class Site:
    """A cluster with an operator's file of teams."""

    def __init__(self, world: ControllerInProcess, file: Path) -> None:
        self.world = world
        self.file = file

    def apply(self, text: str, *options: str, code: int = 0, user: str = "ann") -> list[str]:
        """Apply a file; return the lines that are printed."""
        self.file.write_text(text)
        done = self.world.iris("team", "apply", str(self.file), *options, code=code, user=user, quotes=True)
        return done.output.splitlines()

    def tree(self) -> Teams:
        return read_teams(self.toml())[0]

    def toml(self) -> str:
        return self.world.iris("team", "show", "--toml").stdout


@pytest.fixture
def site(world: ControllerInProcess, tmp_path: Path) -> Site:
    return Site(world, tmp_path / "teams.toml")


def test_tree_is_applied_and_shown_with_its_jobs(site: Site) -> None:
    assert "there are no teams" in site.world.iris("team", "show").stderr
    said = site.apply(TREE)
    assert said[:3] == [
        "+ ads: quota v4-16 8; + user bob",
        "+ research: quota v4-16 16",
        "+ research/vision: quota v4-16 8 (borrow 8); + user ann; + user bob",
    ]
    assert f"3 teams set, version {site.tree().version}" in said
    site.world.start("train")
    site.world.submit("waits", slices=(3,), user="bob", team="ads")
    rows = {row.split()[0]: row.split() for row in site.world.iris("team", "show").stdout.splitlines()}
    assert rows["research"][1:6] == ["v4-16", "16", "8", "-", "-"]
    assert rows["research/vision"][-1] == "ann,bob"
    found = {one["name"]: one for one in site.world.json("team", "show")["teams"]}
    assert (found["research/vision"]["running"], found["research"]["running"], found["ads"]["waiting"]) == (1, 0, 1)
    assert [one["name"] for one in site.world.json("team", "show", "research")["teams"]] == [
        "research",
        "research/vision",
    ]
    assert "v4-16: uses 0 of 8 chips" in " ".join(site.world.iris("team", "show", "ads").stdout.split())
    assert "did you mean ads?" in site.world.iris("team", "show", "add", code=USAGE).stderr


def test_jobs_are_listed_and_explained_by_team(site: Site) -> None:
    site.world.submit("before")
    assert "TEAM" not in site.world.iris("ls").stdout
    site.apply(TREE)
    site.world.submit("train", slices=(3,))
    assert "research/vision" in site.world.iris("ls").stdout
    for team, jobs in (("research", ["train"]), ("research/vision", ["train"]), ("ads", []), ("res", [])):
        assert [job["job_id"] for job in site.world.json("ls", "--team", team)] == jobs
    for command in (("why", "train"), ("job", "status", "train")):
        assert "its team research/vision holds" in site.world.iris(*command).stdout
    assert "it belongs to no team" in site.world.iris("why", "before").stdout
    assert "of its 8 v4-16 chips" in site.world.json("why", "train")["about_team"]


def test_difference_is_shown_and_a_dry_run_changes_nothing(site: Site) -> None:
    site.apply(TREE)
    changed = TREE.replace("quota.v4-16 = 8", "weight = 2").replace('["ann", "bob"]', '["ann", "eve"]')
    changed = changed.replace("chips = 8", "chips = 4") + "[teams.'research/nlp']\n"
    said = site.apply(changed, "--dry-run")
    assert said == [
        "ads: quota v4-16 8 → none; weight 1 → 2",
        "+ research/nlp: no quota, no users",
        "research/vision: quota v4-16 8 (borrow 8) → 4 (borrow 8); + user eve; - user bob",
    ]
    assert site.tree() == read_teams(TREE)[0]
    assert site.apply(TREE)[0] == "nothing changes"


def test_quota_below_use_is_said_and_what_runs_goes_on(site: Site) -> None:
    site.apply(TREE)
    site.world.start("train", slices=(2,))
    said = site.apply(TREE.replace("chips = 8", "chips = 4"))
    assert said[0].endswith("quota v4-16 8 (borrow 8) → 4 (borrow 8), and 16 are in use; running jobs continue")
    assert "16 v4-16 chips, 12 more than its quota of 4" in site.world.iris("why", "train").stdout
    site.world.succeed("train")


def test_removed_teams_jobs_count_for_the_team_above(site: Site) -> None:
    site.apply(TREE)
    site.world.start("train")
    site.world.submit("waits", slices=(3,), user="bob", team="ads")
    said = site.apply("[teams.research]\nquota.v4-16 = 16")
    assert "- research/vision: removed, its 1 job counts for research" in said
    assert "- ads: removed, its 1 job counts for no team" in said
    assert (site.world.status("train").team, site.world.status("waits").team) == ("research", "")
    assert site.apply("")[0] == "- research: removed, its 1 job counts for no team"
    assert site.world.status("train").about_team is None
    site.world.succeed("train")


def test_quotas_beyond_the_fleet_and_users_of_several_teams_are_noted(site: Site) -> None:
    said = site.apply(TREE + "[teams.big]\nquota.v5p = 64\n[teams.more]\nquota.v4-16 = 99\n", "--dry-run")
    assert (
        "note: the quotas of v4-16 are 123 chips together, and the cluster has 24: not every team can have"
        in " ".join(said)
    )
    assert "note: the quotas of v5p are 64 chips together, and the cluster has none" in " ".join(said)
    assert "note: in several teams, so that their jobs must name one (--team, or IRIS_TEAM): bob" in said


def test_second_of_two_operators_notices_the_first(site: Site) -> None:
    site.apply(TREE)
    mine = theirs = site.toml()
    site.apply(theirs + "[teams.sales]\n")
    said = site.apply(mine + "[teams.eng]\n", code=USAGE)
    assert "is made from version" in said[0]
    assert "they have changed since" in said[0]
    assert "sales" in site.tree()
    without = "".join(line for line in mine.splitlines(keepends=True) if not line.startswith("version"))
    assert "- sales: removed" in site.apply(without + "[teams.eng]\n")
    assert "nothing changes" in site.apply(site.toml())


def test_change_between_difference_and_apply_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second operator answers the question while the first one's tree is set."""
    really = TeamsInController.set_teams

    async def late(self: TeamsInController, teams: list[Team], instead_of: str, user: str) -> object:
        await really(self, [Team("sales")], Teams().version, "olga")
        return await really(self, teams, instead_of, user)

    monkeypatch.setattr(TeamsInController, "set_teams", late)
    said = site.apply(TREE, code=USAGE)
    assert "the teams have changed meanwhile" in said[-1]
    assert site.tree() == Teams([Team("sales")])


def test_only_operators_may_apply(site: Site) -> None:
    site.world.iris("cluster", "settings", "set", "operators=olga", user="olga")
    assert "only operators may set teams" in site.apply(TREE, code=FAILED, user="ann")[-1]
    assert len(site.tree()) == 0
    site.apply(TREE, user="olga")
    assert len(site.tree()) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[teams.a", "teams.toml: the teams can't be read"),
        ("[teams.'a/b']", "teams.toml: team a/b is a part of a, which does not exist"),
        ("[teams.a]\nquota.v4-16 = -8", "the quota for v4-16: chips is -8"),
    ],
)
def test_senseless_file_is_refused_with_the_place(site: Site, text: str, says: str) -> None:
    assert says in site.apply(text, code=USAGE)[0]
    assert "No such file" in site.world.iris("team", "apply", str(site.file.parent / "none"), code=USAGE).stderr


def test_teams_outlast_the_controller(site: Site) -> None:
    site.apply(TREE)
    site.world.start("train")
    for _ in range(2):
        site.world.iris("cluster", "controller", "upgrade")
        assert site.tree() == read_teams(TREE)[0]
        assert site.world.status("train").team == "research/vision"
    assert len([key for key in site.world.store.values if key.startswith("teams/")]) == 1
    site.world.succeed("train")


def test_job_gets_its_users_team_and_others_are_refused(site: Site) -> None:
    with pytest.raises(InvalidTeamsError, match="this cluster has no teams"):
        site.world.submit("early", team="ads")
    site.apply(TREE)
    site.world.submit("own")
    site.world.submit("named", user="bob", team="ads")
    site.world.submit("outsider", user="dan")
    assert [site.world.spec(job).team for job in ("own", "named", "outsider")] == ["research/vision", "ads", ""]
    with pytest.raises(InvalidTeamsError, match="bob belongs to the teams ads and research/vision; say which"):
        site.world.submit("unclear", user="bob")
    with pytest.raises(NotPermittedError, match="ann does not belong to team ads, but to research/vision"):
        site.world.submit("other", team="ads")
    assert site.world.jobs() == ["own", "named", "outsider"]


def test_team_is_given_by_flag_or_variable(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.apply(TREE.replace('users = ["bob"]', 'users = ["ann"]'))
    script = tmp_path / "work.py"
    script.write_text("pass")
    submit = "submit", str(script), "--tpu", "v4-16"
    assert "say which" in site.world.iris(*submit, code=USAGE).stderr
    monkeypatch.setenv("IRIS_TEAM", "ads")
    by_variable = site.world.json(*submit)["job_id"]
    by_flag = site.world.json(*submit, "--team", "research/vision")["job_id"]
    assert [site.world.spec(job).team for job in (by_variable, by_flag)] == ["ads", "research/vision"]
    monkeypatch.setenv("IRIS_TEAM", "a b")
    assert "give the name of a team" in site.world.iris(*submit, code=USAGE).stderr


def test_two_thousand_teams_are_applied_and_shown_quickly(site: Site) -> None:
    tops = [Team(f"t{top}", {"v4-16": Quota(99)}) for top in range(20)]
    parts = [Team(f"t{top}/p{part}", {"v4-16": Quota(1)}, users=("ann",)) for top in range(20) for part in range(99)]
    began = time.process_time()
    assert "2000 teams set" in site.apply(to_toml(Teams([*tops, *parts])))[-1]
    assert len(site.world.iris("team", "show").stdout.splitlines()) == 2001
    assert time.process_time() - began < 10
    with pytest.raises(InvalidTeamsError, match="and 1975 more; say which"):
        site.world.submit("unclear")


@pytest.mark.parametrize(
    ("method", "args"),
    [
        (TeamCalls.set_limits, ("ann", [0], None, False, "ann")),
        (TeamCalls.set_teams, ([None], "", "ann")),
        (TeamCalls.set_teams, ([Team("ads")], None, "ann")),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_senseless_call_is_refused(site: Site, method: Any, args: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidMessageError):
        ControllerConnection().ask(method, *args)
    assert len(site.tree()) == 0
