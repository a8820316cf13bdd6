"""``iris-ray job goodput``: what it prints about the real Controller's jobs."""

import csv
import io

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.pool import progress_watch
from iris_ray.capacity.calls import CapacityCalls
from iris_ray.capacity.core import CapacityReport, SliceBatch
from iris_ray.cli.conventions import USAGE
from iris_ray.goodput import controller as goodput_in_controller
from iris_ray.goodput.sums import Sums
from iris_ray.model.teams import Team
from iris_ray.state import job_table
from iris_ray.teams.calls import TeamCalls
from tests.support.controller_in_process import ControllerInProcess
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _look_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(progress_watch, "LOOK_S", 0.05)
    monkeypatch.setattr(goodput_in_controller, "MEASURE_S", 0.05)
    monkeypatch.setattr(goodput_in_controller, "COUNT_CHIPS_S", 0.05)


def trained(world: ControllerInProcess, job: str) -> str:
    """A job that was seen to make steps, and succeeded."""
    world.start(job)
    for step in (0, 1, 2):
        make_step(world, job, step)
    world.succeed(job)
    return job


def make_step(world: ControllerInProcess, job: str, step: int) -> None:
    """Return when people see it."""
    world.says(job, step, "well")
    wait_until(lambda: world.status(job).step == step)


def test_goodput_shows_where_a_jobs_time_went(world: ControllerInProcess) -> None:
    found = world.json("job", "goodput", trained(world, "train"))
    assert (found["state"], found["attempts"]) == ("SUCCEEDED", 1)
    assert 0.0 < found["goodput"] <= 1.0
    assert found["measured"] == 1.0
    lived = found["ended_at"] - found["submitted_at"]
    assert sum(found["seconds"].values()) == pytest.approx(lived, abs=0.01)
    assert found["chip_seconds"]["productive"] == pytest.approx(8 * found["seconds"]["productive"])
    printed = world.iris("job", "goodput", "train").stdout
    assert "goodput:" in printed
    assert "productive" in printed
    assert "but:" not in printed


def test_goodput_of_job_without_steps_says_why_none(world: ControllerInProcess) -> None:
    world.succeed(world.start("silent"))
    printed = world.iris("job", "goodput", "silent").stdout
    assert "iris_ray.heartbeat(step)" in printed
    assert world.json("job", "goodput", "silent")["goodput"] is None


def test_goodput_says_what_last_failure_cost(world: ControllerInProcess) -> None:
    world.start("train", max_retries_failure=3)
    assert world.json("job", "goodput", "train")["last_failure"] is None
    make_step(world, "train", 0)
    world.fail("train", 0)
    world.wait_for_attempt("train", 2)
    found = world.json("job", "goodput", "train")["last_failure"]
    assert (found["attempt"], found["cause"], found["is_over"]) == (1, "CRASHED", False)
    printed = " ".join(world.iris("job", "goodput", "train").stdout.split())
    assert "last failure: the end of attempt 1 (crashed) cost" in printed
    assert " so far: " in printed


def test_goodput_is_summed_by_team(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(world, "before")
    teams = ControllerConnection().ask(TeamCalls.list_teams)
    ControllerConnection().ask(TeamCalls.set_teams, [Team("ads", users=("ann",))], teams.version, "ann")
    trained(world, "train")
    rows = [row.split()[:2] for row in world.iris("job", "goodput", "--by", "team").stdout.splitlines()]
    assert rows[:4] == [["TEAM", "JOBS"], ["(no", "team)"], ["ads", "1"], ["all", "2"]]
    assert world.json("job", "goodput", "train")["team"] == "ads"
    assert "--by team is for the table" in world.iris("job", "goodput", "train", "--by", "team", code=USAGE).stderr


def failed_and_on(world: ControllerInProcess, job: str) -> None:
    """A job that fails once after its second step, and makes its second step again."""
    world.start(job, max_retries_failure=3)
    for step in (0, 1):
        make_step(world, job, step)
    world.fail(job, 0)
    world.wait_for_attempt(job, 2)
    for step in (1, 2):
        world.says(job, step, "well")
    wait_until(lambda: world.json("job", "goodput", job)["time_lost"])


def test_time_lost_per_failure_is_shown_by_cause(world: ControllerInProcess) -> None:
    failed_and_on(world, "train")
    found = world.json("job", "goodput", "train")
    (cause, lost), *more = found["time_lost"].items()
    assert (cause, lost["count"], more) == ("CRASHED", 1, [])
    assert 0 < lost["median_s"] == lost["worst_s"] == lost["seconds"]
    assert found["last_failure"]["is_over"]
    assert found["elastic_seconds"].keys() == {"elastic_slice_down", "elastic_scale_up", "elastic_reinitialization"}
    lines = [line.split() for line in world.iris("job", "goodput").stdout.splitlines()]
    assert ["crashed", "1"] in [line[:2] for line in lines]
    assert world.json("job", "goodput")["time_lost"]["CRASHED"]["count"] == 1


def test_time_lost_outlives_controller(world: ControllerInProcess) -> None:
    failed_and_on(world, "train")
    before = world.json("job", "goodput", "train")["time_lost"]["CRASHED"]
    world.restart_controller()
    after = world.json("job", "goodput", "train")["time_lost"]["CRASHED"]
    assert after["count"] == 1
    assert after["seconds"] == pytest.approx(before["seconds"], abs=0.5)  # the excess of the first step may come late


def test_failures_csv_has_line_per_job_and_cause(world: ControllerInProcess) -> None:
    failed_and_on(world, "train")
    held = SliceBatch("v4-16", "us-a", "spot", joined=True, slices=2, chips=16, since=0.0, hourly=32.0)
    ControllerConnection().ask(CapacityCalls.report_capacity, CapacityReport("p", ("v4-16",), (held,)))
    (line,) = csv.DictReader(io.StringIO(world.iris("job", "goodput", "--csv", "--failures").stdout))
    assert (line["job_id"], line["cause"], line["failures"], line["currency"]) == ("train", "crashed", "1", "USD")
    assert float(line["cost"]) == pytest.approx(float(line["chip_seconds"]) / 3600 * 2.0, abs=1e-3)
    assert "USD" in world.iris("job", "goodput", "train").stdout
    assert "goes with --csv" in world.iris("job", "goodput", "--failures", code=USAGE).stderr


def test_goodput_sums_users_and_cluster_chips(world: ControllerInProcess) -> None:
    trained(world, "train")
    world.succeed(world.start("of-bob", user="bob"))
    wait_until(lambda: world.json("job", "goodput")["chip_seconds_by_day"])
    printed = world.iris("job", "goodput").stdout
    rows = [line.split() for line in printed.splitlines()]
    assert [row[:2] for row in rows[1:4]] == [["ann", "1"], ["bob", "1"], ["all", "2"]]
    assert "The chips of the cluster" in printed
    (states,) = world.json("job", "goodput")["chip_seconds_by_day"].values()
    assert states.keys() <= {"busy", "warm", "free"}
    assert states["free"] > 0.0


def test_goodput_lists_one_users_recent_jobs(world: ControllerInProcess) -> None:
    trained(world, "train")
    world.succeed(world.start("of-bob", user="bob"))
    assert [job["job_id"] for job in world.json("job", "goodput", "--user", "bob")["jobs"]] == ["of-bob"]
    assert "of-bob" in world.iris("job", "goodput", "--user", "bob").stdout
    assert len(world.json("job", "goodput", "--since", "1h")["jobs"]) == 2
    assert world.json("job", "goodput", "--since", "0m")["jobs"] == []
    assert "no jobs of carl" in world.iris("job", "goodput", "--user", "carl").stderr


def test_goodput_of_one_job_is_a_share_of_its_seconds_in_both_views(world: ControllerInProcess) -> None:
    """A second quick end makes it pause for a second, in which it holds no chips."""
    world.start("train", max_retries_failure=3)
    for attempt in (1, 2):
        make_step(world, "train", attempt)
        world.fail("train", 0)
        world.wait_for_attempt("train", attempt + 1)
    for step in (5, 6, 7):
        make_step(world, "train", step)
    world.succeed("train")
    found = world.json("job", "goodput", "train")
    by_seconds, by_chips = (f"{100 * share:.1f} %" for share in (found["goodput"], _share(found["chip_seconds"])))
    assert by_seconds != by_chips
    assert f" {by_seconds} " in world.iris("job", "goodput", "train").stdout.replace("\n", " ")
    assert f" {by_seconds} " in world.iris("job", "goodput", "--user", "ann").stdout
    assert f" {by_chips} " in world.iris("job", "goodput").stdout


def _share(chip_seconds: dict[str, float]) -> float:
    return chip_seconds["productive"] / sum(n for kind, n in chip_seconds.items() if kind not in ("queueing", "launch"))


def test_sums_of_forgotten_jobs_survive_restart(world: ControllerInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "FINISHED_JOBS_KEPT", 1)
    monkeypatch.setattr(goodput_in_controller, "RECORD_S", 0.0)
    world.succeed(world.start("of-bob", user="bob"))
    for number in range(3):
        trained(world, f"train-{number}")
    found = world.json("job", "goodput", "--user", "ann")
    assert [job["job_id"] for job in found["jobs"]] == ["train-2"]
    (sums,) = found["forgotten"]
    assert (sums["user"], sums["jobs"]) == ("ann", 2)
    assert sums["chip_seconds"]["productive"] == pytest.approx(8 * sums["seconds"]["productive"])
    lines = world.iris("job", "goodput").stdout.splitlines()[1:3]
    assert [line.split()[:2] for line in lines] == [["ann", "3"], ["bob", "1"]]
    world.succeed(world.start("another"))

    def recorded() -> dict[str, int]:
        value = world.recorded().get("service/1/goodput")
        return {day.user: day.jobs for day in Sums.read(value).users.since(0.0)} if value else {}

    wait_until(lambda: recorded().get("ann") == 3)
    world.restart_controller()
    (again,) = world.json("job", "goodput", "--user", "ann")["forgotten"]
    assert again["jobs"] == 3
    assert "forgotten" in world.iris("job", "goodput", "--user", "ann").stdout


def test_csv_has_line_per_job_and_kind_of_time(world: ControllerInProcess) -> None:
    trained(world, "train")
    lines = list(csv.DictReader(io.StringIO(world.iris("job", "goodput", "--csv").stdout)))
    assert {line["job_id"] for line in lines} == {"train"}
    assert "productive" in {line["kind"] for line in lines}


def test_unanswerable_questions_are_refused(world: ControllerInProcess) -> None:
    world.start("train")
    assert "did you mean train" in world.iris("job", "goodput", "trian", code=USAGE).stderr
    assert "is not a time" in world.iris("job", "goodput", "--since", "soon", code=USAGE).stderr
    assert "not both" in world.iris("job", "goodput", "--csv", "--json", code=USAGE).stderr


def test_restarted_controller_knows_where_time_went(world: ControllerInProcess) -> None:
    before = world.json("job", "goodput", trained(world, "train"))
    running = world.start("again")
    world.says(running, 0, "well")
    world.restart_controller()
    assert world.json("job", "goodput", "train") == before
    make_step(world, running, 1)
    world.fail(running, 0)
    assert world.json("job", "goodput", running)["seconds"]["productive"] > 0.0
