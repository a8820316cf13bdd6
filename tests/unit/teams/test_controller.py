"""What is said of the quotas of teams: used, borrowed, lent, and to whom."""

import asyncio
import time
from unittest import mock

import pytest

from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import NO_TEAM, Quota, Team, Teams
from iris_ray.model.workers import TPU_TOPOLOGY
from iris_ray.state.events import TeamsSetEvent
from iris_ray.teams.calls import TeamChips, TeamsStatus
from iris_ray.teams.controller import JobsByTeam, TeamsUse, teams_status
from iris_ray.teams.quotas import about_team, fleet_chips, team_chips, team_sentence
from tests.support.worlds import World, host, tagged

KIND = "v4-32"


def quota(chips: float, **limits: float) -> dict[str, Quota]:
    return {KIND: Quota(chips, **limits)}  # type: ignore[arg-type]


TREE = Teams([
    Team("research", quota(128)),
    Team("research/vision", quota(64, lend=32)),
    Team("research/nlp", quota(64)),
    Team("ads", {KIND: Quota(64, by_band={PriorityBand.PRODUCTION: 48})}),
    Team("sales"),
])  # fmt: skip


def usage(**chips: float) -> dict[str, dict[str, float]]:
    """What teams and the cluster hold, given what each itself holds; ``__`` is ``/``, and ``none`` no team."""
    found: dict[str, dict[str, float]] = {}
    for name, amount in chips.items():
        team = NO_TEAM if name == "none" else name.replace("__", "/")
        for one in {team, team.rpartition("/")[0], NO_TEAM}:
            found[one] = {KIND: found.get(one, {}).get(KIND, 0.0) + amount}
    return found


@pytest.mark.parametrize(
    ("held", "fleet", "borrowed", "lent"),
    [
        ({}, 192, {}, {}),
        ({"ads": 64, "research__nlp": 64, "research__vision": 64}, 192, {}, {}),
        ({"ads": 96}, 192, {"ads": 32}, {"research": 32, "research/nlp": 21.333, "research/vision": 10.667}),
        ({"ads": 96}, 256, {"ads": 32}, {}),
        ({"none": 64}, 192, {}, {"ads": 21.333, "research": 42.667, "research/nlp": 28.444, "research/vision": 14.222}),
        ({"none": 64}, 256, {}, {}),
        ({"research__nlp": 96}, 192, {"research/nlp": 32}, {"research/vision": 32}),
        ({"research__nlp": 128, "ads": 64}, 192, {"research/nlp": 64}, {"research/vision": 32}),
        ({"research": 96}, 192, {}, {"research/nlp": 64, "research/vision": 32}),
        (
            {"sales": 16, "ads": 16},
            192,
            {"sales": 16},
            {"ads": 4.364, "research": 11.636, "research/nlp": 7.758, "research/vision": 3.879},
        ),
        ({"ads": 36}, 100, {}, {}),
    ],
    ids=str,
)
def test_unused_quota_that_others_use_counts_as_lent(
    held: dict[str, float], fleet: float, borrowed: dict[str, float], lent: dict[str, float]
) -> None:
    found = team_chips(TREE, usage(**held), KIND, fleet)
    assert {name: chips.borrowed for name, chips in found.items() if chips.borrowed} == borrowed
    assert {name: chips.lent for name, chips in found.items() if chips.lent} == lent


@pytest.mark.parametrize(
    ("team", "held", "says"),
    [
        ("ads", {"ads": 64}, "its team ads holds 64 of its 64 v4-32 chips"),
        (
            "research/vision",
            {"research__vision": 32, "research__nlp": 96},
            "its team research/vision holds 32 of its 64 v4-32 chips, and 32 are lent to research/nlp until it needs",
        ),
        (
            "ads",
            {"ads": 16, "research__nlp": 176},
            "its team ads holds 16 of its 64 v4-32 chips, and 48 are lent to research until it needs them",
        ),
        (
            "ads",
            {"sales": 100, "none": 92},
            "holds 0 of its 64 v4-32 chips, and 64 are lent to sales and jobs without a team until it needs them",
        ),
        (
            "ads",
            {"ads": 96},
            "its team ads holds 96 v4-32 chips, 32 more than its quota of 64: the others get those back when they need"
            " them",
        ),
        ("sales", {"sales": 16}, "its team sales has no quota of v4-32 chips and holds 16 of them"),
    ],
)
def test_sentence_says_what_a_team_holds_and_who_has_the_rest(team: str, held: dict[str, float], says: str) -> None:
    said = team_sentence(TREE, usage(**held), team, KIND, 192, PriorityBand.BATCH)
    assert says in said


def test_sentence_says_the_right_of_the_jobs_band() -> None:
    said = team_sentence(TREE, usage(ads=16), "ads", KIND, 192, PriorityBand.PRODUCTION)
    assert said.endswith("holds 16 of its 64 v4-32 chips; production jobs have a right to 48 of them")


def test_part_without_quota_is_told_of_the_team_above() -> None:
    tree = Teams([Team("research", quota(64)), Team("research/audio")])
    said = team_sentence(tree, usage(research__audio=16), "research/audio", KIND, 64, PriorityBand.BATCH)
    assert said == (
        "its team research/audio has no quota of v4-32 chips and holds 16 of them; the team above it, research,"
        " holds 16 of its 64 v4-32 chips"
    )


# -- of a state --------------------------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    """Two slices of eight chips each."""
    return World("v4-16-0", "v4-16-1")


def set_teams(world: World, *teams: Team) -> None:
    world.do(TeamsSetEvent(teams))


def counts(jobs: JobsByTeam) -> dict[tuple[str, bool], int]:
    return asyncio.run(jobs.counts())


def status_of(world: World) -> TeamsStatus:
    return teams_status(TeamsUse.of(world.state, world.now, counts(JobsByTeam(world.state))))


def test_without_teams_nothing_is_said(world: World) -> None:
    job = world.submit("train", user="ann")
    assert about_team(world.state, job) is None
    found = status_of(world)
    assert (found.teams, found.fleet, found.tree()) == ((), {"v4-16": 16.0}, Teams())


def test_jobs_count_for_the_nearest_team_that_exists(world: World) -> None:
    set_teams(world, Team("research", {"v4-16": Quota(8)}), Team("research/audio"))
    runs, waits = world.start("runs", team="research/audio"), world.submit("waits", team="research", slices=(2,))
    set_teams(world, Team("research", {"v4-16": Quota(8)}))
    without, research = status_of(world).teams
    assert (without.name, research.name) == (NO_TEAM, "research")
    assert (research.running, research.waiting) == (1, 1)
    assert research.chips == {"v4-16": TeamChips(8, 8, 0, 0, {PriorityBand.INTERACTIVE: 8})}
    assert (research.share, without.share) == (0.5, 0)
    set_teams(world)
    assert [about_team(world.state, job) for job in (runs, waits)] == [None, None]


def test_jobs_without_team_hold_what_no_team_needs(world: World) -> None:
    set_teams(world, Team("research", {"v4-16": Quota(8)}), Team("research/audio"))
    world.start("runs", slices=(2,))
    waits = world.submit("waits", team="research/audio")
    without, research, _ = status_of(world).teams
    assert without.chips == {"v4-16": TeamChips(0, 16, 0, 0, {PriorityBand.INTERACTIVE: 16})}
    assert research.chips == {"v4-16": TeamChips(8, 0, 0, 8, {})}
    assert about_team(world.state, waits) == (
        "its team research/audio has no quota of v4-16 chips and holds 0 of them; the team above it, research,"
        " holds 0 of its 8 v4-16 chips, and 8 are lent to jobs without a team until it needs them"
    )


def test_spares_count_for_the_team_of_their_job(world: World) -> None:
    set_teams(world, Team("ads"))
    world.start("train", team="ads", spares=1)
    assert {job.spec.team for job in world.state.jobs.values()} == {"ads"}
    assert len(world.state.jobs) == 2


@pytest.mark.parametrize(
    ("teams", "team", "says"),
    [
        ([Team("ads", {"v4": Quota(8)})], "ads", "of its 8 v4 chips"),
        (
            [Team("ads", {"v4-16": Quota(8)})],
            "",
            "it belongs to no team, so v4-16 chips within the quotas of teams are only lent to it",
        ),
        ([Team("ads", {"v5p": Quota(8)})], "ads", "its team is ads, and no team has a quota for what it uses"),
        ([Team("ads", {"v5p": Quota(8)})], "", None),
    ],
)
def test_sentence_depends_on_the_types_with_quotas(
    world: World, teams: list[Team], team: str, says: str | None
) -> None:
    set_teams(world, *teams)
    said = about_team(world.state, world.submit("train", team=team))
    assert said is None if says is None else says in (said or "")


def test_slices_of_made_up_types_are_no_chips(world: World) -> None:
    world.do(tagged(host("odd", 0), {TPU_TOPOLOGY: "made-up"}))
    assert fleet_chips(world.state.fleet) == {"v4-16": 16.0}


def test_jobs_are_counted_anew_only_where_they_have_changed(world: World) -> None:
    jobs = JobsByTeam(world.state)
    runs = world.start("runs", team="ads")
    world.submit("waits", team="ads", slices=(2,))
    world.start("spared", team="sales", slices=(1,))
    assert counts(jobs) == {("ads", True): 1, ("ads", False): 1, ("sales", True): 1}
    world.finish(runs)
    with mock.patch.object(jobs, "_kind", wraps=jobs._kind) as looks:
        assert counts(jobs) == {("ads", False): 1, ("sales", True): 1}
    assert [call.args for call in looks.call_args_list] == [("runs",)]
    for _ in range(3000):
        world.state.show_anew("waits")
    assert counts(jobs) == counts(JobsByTeam(world.state)) == {("ads", False): 1, ("sales", True): 1}


def test_two_thousand_teams_are_shown_quickly(world: World) -> None:
    tops = [Team(f"t{top}", {"v4-16": Quota(99), "v5p-8": Quota(99)}) for top in range(20)]
    parts = [Team(f"t{top}/p{part}", {"v4-16": Quota(1)}) for top in range(20) for part in range(99)]
    set_teams(world, *tops, *parts)
    began = time.process_time()
    assert len(status_of(world).teams) == 2001
    assert about_team(world.state, world.submit("train", team="t7/p7")) is not None
    assert time.process_time() - began < 1
