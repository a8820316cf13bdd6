"""``iris-ray study``: a description in, tables, JSON and a picture out. No cluster."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from iris_ray.cli.conventions import INTERRUPTED, OK, USAGE
from iris_ray.cli.main import main
from iris_ray.study import Simulation

FLEET = """
days = 1
[[slices]]
type = "v4-16"
count = 4
preempted_every_h = 12
notice_s = 30
[[jobs]]
users = ["ann", "bob"]
per_day = 40
type = "v4-16"
run_h = 2
[[policies]]
name = "usual"
[[policies]]
name = "one spare"
spares = 1
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    return path


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["study", *map(str, arguments)])


def test_study_tables_compare_policies(fleet: Path) -> None:
    result = simulate(fleet)
    assert result.exit_code == OK, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["POLICY", "JOBS", "WAITING"]
    assert lines[1].startswith("usual  ")
    assert lines[2].startswith("one spare  ")
    assert any(line.split()[:2] == ["bob", "usual"] for line in lines)
    assert "decisions and" in result.stderr


def test_study_json_is_complete(fleet: Path) -> None:
    usual, spare = json.loads(simulate(fleet, "--json").stdout)
    assert (usual["policy"], spare["policy"]) == ("usual", "one spare")
    assert usual["waits"]["jobs"] == sum(waits["jobs"] for waits in usual["waits_by_user"].values())
    assert set(usual["waits_by_size"]) == {"8.0"}
    assert set(usual["waits_by_band"]) == {"interactive"}
    assert sum(usual["use"].values()) == pytest.approx(1.0)
    assert spare["use"]["spare"] > 100 * usual["use"]["spare"]  # which has replacements for slices that are to go
    assert usual["decisions_per_s"] > 0


def test_study_options_choose_days_seed_and_policy(fleet: Path) -> None:
    (usual,) = json.loads(simulate(fleet, "--json", "--policy", "usual", "--duration", "12h").stdout)
    assert usual["seconds"] == 43_200.0
    (other,) = json.loads(simulate(fleet, "--json", "--policy", "usual", "--duration", "12h", "--seed", "7").stdout)
    assert other["waits"] != usual["waits"]


def test_trace_is_found_beside_description(fleet: Path) -> None:
    fleet.write_text(FLEET + '[[traces]]\nfile = "trace.csv"\nformat = "csv"\ntype = "v4-16"\nname = "old"\n')
    trace = fleet.with_name("trace.csv")
    assert f"the trace {trace} can't be read" in simulate(fleet).stderr
    trace.write_text("user,submit_time,gpu_num,duration\nzoe,0,8,600\nzoe,1,8,0\nzoe,2,800,60\nzoe,3,800,60\n")
    result = simulate(fleet, "--json", "--policy", "usual")
    (usual,) = json.loads(result.stdout)
    assert usual["waits_by_user"]["zoe"]["jobs"] == 1
    assert result.stderr.splitlines()[:3] == [
        "trace.csv: 1 of 4 rows make jobs",
        "  left out 2: it needs more slices of v4-16 than there are (line 4, …)",
        "  left out 1: it did not run (line 3)",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FLEET.replace("count = 4", "count = 0"), "[[slices]] number 1: count is 0; give an int of 1 or more"),
        ("days = ", "is not valid TOML"),
    ],
)
def test_impossible_study_is_refused_in_one_line(fleet: Path, text: str, says: str) -> None:
    fleet.write_text(text)
    result = simulate(fleet)
    assert result.exit_code == USAGE
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"iris-ray: {fleet}")
    assert says in line


def test_interrupted_study_shows_its_results_until_then(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until = Simulation.run_until

    def interrupted(simulation: Simulation, end: float) -> None:
        run_until(simulation, min(end, 7200.0))
        if end > 7200.0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Simulation, "run_until", interrupted)
    result = simulate(fleet, "--json")
    assert result.exit_code == INTERRUPTED
    (usual,) = json.loads(result.stdout)
    assert (usual["policy"], usual["seconds"]) == ("usual", 7200.0)
    assert "usual was interrupted" in result.stderr


def test_progress_is_told_off_a_terminal(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_ray.study.cli.TELL_S", 0.0)
    assert "usual: day 0.5\n" in simulate(fleet).stderr


@pytest.mark.parametrize("days", ["nan", "inf", "0", "1e305", "9999999d"])
def test_endless_or_missing_days_are_refused(fleet: Path, days: str) -> None:
    result = simulate(fleet, "--duration", days)
    assert result.exit_code == USAGE
    assert result.stderr.startswith("iris-ray: Invalid value for '--duration': ")


def test_unknown_files_and_policies_are_refused(fleet: Path) -> None:
    assert "no such policy" not in simulate(fleet, "--policy", "usuall").stderr
    assert "did you mean usual?" in simulate(fleet, "--policy", "usuall").stderr
    assert "No such file" in simulate(fleet.with_name("other.toml")).stderr


def test_picture_without_matplotlib_is_refused(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = simulate(fleet, "--picture", fleet.with_suffix(".png"))
    assert result.exit_code == USAGE
    assert "pip install matplotlib" in result.stderr


def test_picture_is_drawn(fleet: Path) -> None:
    picture = fleet.with_suffix(".png")
    assert simulate(fleet, "--duration", "4.8h", "--picture", picture).exit_code == OK
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_results_are_shown_although_picture_cannot_be_written(fleet: Path) -> None:
    result = simulate(fleet, "--duration", "4.8h", "--picture", fleet.with_suffix(".nonsense"))
    assert result.exit_code == USAGE
    assert "can't be written" in result.stderr
    assert result.stdout.startswith("POLICY")
