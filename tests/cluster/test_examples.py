"""The examples run, and do what the documents say they do."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.command_line import EXAMPLES, REPOSITORY, run
from tests.support.containers import a_stand_in
from tests.support.notebooks import Notebook


def test_hello_says_hello_from_every_host() -> None:
    output = run("hello.py")
    for index, (slice_id, worker) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert f"task {index} of 4: slice {slice_id} (v4-16-{slice_id}), worker {worker}" in output


@pytest.mark.proof
@pytest.mark.way_in
def test_docker_prints_from_every_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_stand_in(tmp_path) as engine:
        monkeypatch.setenv("IRIS_RAY_CONTAINER_ENGINE", str(engine.path))
        output = run("docker.py")
        for index in range(4):
            assert f'task {index} of 4 on slice {index // 2} says: it\'s "hello"' in output
        assert output.count("in two lines") == 4
        assert engine.containers() == []


@pytest.mark.proof
@pytest.mark.way_in
def test_group_outlasts_a_lost_slice_of_its_samplers() -> None:
    output = run("rl_group.py")
    lost = re.search(r"lost: (v4-8-\d)", output)
    assert lost is not None
    assert "trainer: {'attempt': 1," in output, "the trainer has never stopped"
    assert re.search(r"'sampler \d, attempt 2': 3", output), "the sampler has come back, and found it"
    assert "trainer: succeeded, no error" in output
    for name in ("samplers", "prepare"):
        assert f"{name}: killed, the main jobs of its group rl have succeeded: trainer" in output


@pytest.mark.long
def test_three_users_see_each_others_jobs() -> None:
    rows = [line.split() for line in run("three_users.py").splitlines() if line.startswith("train-")]
    meanwhile, afterwards = rows[:3], rows[3:]
    for table in (meanwhile, afterwards):
        assert sorted(row[1] for row in table) == ["ann", "ben", "cleo"]
    assert [row[2] for row in afterwards] == ["succeeded"] * 3


@pytest.mark.long
def test_demo_survives_noticed_and_sudden_slice_losses() -> None:
    output = run("demo.py")
    assert "process 3 of 4 on v4-16-1 worker 1, attempt 1: starts at step 0" in output
    stopped = {int(step) for step in re.findall(r"stops after step (\d+)", output)}
    assert len(stopped) == 1, "all processes save the same step"
    started = re.findall(r"process \d of 4 on \S+ worker \d, attempt 2: starts at step (\d+)", output)
    assert [int(step) for step in started] == [*stopped] * 4, "and lose none"
    assert "TpuPreempted" in output
    assert "TpuFailed" in output
    assert "step  300 of 300" in output
    assert "attempt 3 " in output[output.index("=== done") :]


def test_training_script_also_runs_alone_and_resumes(tmp_path: Path) -> None:
    assert "step   40 of 40" in run("train_digits.py", "--checkpoints", str(tmp_path), "--steps", "40")
    output = run("train_digits.py", "--checkpoints", str(tmp_path), "--steps", "60")
    assert "starts at step 40" in output
    assert "accuracy on unseen images" in output


@pytest.mark.proof
def test_slices_that_train_by_themselves_agree_after_a_loss() -> None:
    alone = run("local_sgd.py", "--rounds", "30")
    output = run(
        *("local_sgd.py", "--tpu", "v4-8", "--num-slices", "3", "--rounds", "30", "--step-s", "0.1"),
        *("--mode", "simulate: kill slice 1 after 25s"),
    )
    calm, disturbed = (float(re.findall(r"after 30 rounds: (\S+)", said)[0]) for said in (alone, output))
    assert "attempt 2: ready" in output
    assert disturbed < 1.3 * calm


RUN = {
    "docker.py",
    "hello.py",
    "three_users.py",
    "preempt.py",
    "rl_group.py",
    "gke_in_a_box.py",
    "demo.py",
    "train_digits.py",
    "local_sgd.py",
    "serve_models.py",
    "notebook.ipynb",
    "sweep.py",
    "flax_lm.py",  # these by tests/cluster/marin/
    "grain_data.py",
    "marin_pipeline.py",
    "levanter_yaml.py",
    "metrics.py",
    "train_levanter.py",
}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")} == RUN


def test_index_lists_every_example() -> None:
    listed = re.findall(r"\]\(([\w./]+)\)", (EXAMPLES / "README.md").read_text())
    files = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.*") if "__pycache__" not in path.parts}
    assert {name for name in files if not name.startswith("clusters/")} == {*listed} - {"clusters"} | {"README.md"}


@pytest.mark.proof
@pytest.mark.way_in
def test_sweep_repeats_its_best_settings_with_priority() -> None:
    output = run("sweep.py")
    rows = [line.split() for line in output[output.index("\njob ") :].splitlines() if line.endswith("%")]
    assert [row[1] for row in rows].count("BATCH") == 6
    again = [row[2:5] for row in rows if row[1] == "INTERACTIVE"]
    assert sorted(seed for *_, seed in again) == ["1", "2"]
    assert again[0][:2] == again[1][:2], "with the same settings"


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # Jupyter's are not ours
def test_cells_of_the_notebook_run_in_order(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    printed = {}
    with Notebook.opened(tmp_path, tmp_path, environ) as notebook:
        for cell in cells:
            if cell["cell_type"] == "code":
                is_well, out, err = notebook.run("".join(cell["source"]))
                assert is_well, f"{cell['id']}: {out}{err}"
                printed[cell["id"]] = out
    assert re.findall(r"task (\d) on \S+, attempt 2", printed["lose"]) == list("0123")
    assert sorted(re.findall(r"process (\d) of 2", printed["join"])) == ["0", "1"]
    assert printed["sum"].count("28.0") == 2


@pytest.mark.proof
@pytest.mark.way_in
def test_more_models_are_served_than_fit() -> None:
    output = run("serve_models.py")
    assert "24 answers from 3 models" in output
    assert "statistics says: " in output
    (loaded,) = re.findall(r"still loaded: (.*)", output)
    assert 1 <= len(loaded.split(", ")) <= 2


@pytest.mark.long
def test_preempted_gang_returns_results_of_its_second_attempt() -> None:
    assert "[2, 2, 2, 2]" in run("preempt.py").splitlines()


@pytest.mark.long
def test_job_in_the_box_moves_to_another_slice() -> None:
    lines = run("gke_in_a_box.py").splitlines()
    assert "[2]" in lines
    assert sum(line.startswith("CreatedWorkerPod") for line in lines) >= 2
