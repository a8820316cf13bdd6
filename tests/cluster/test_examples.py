"""The examples run, and do what the documents say they do."""

import re
from pathlib import Path

import pytest

from tests.support.command_line import EXAMPLES, run
from tests.support.containers import a_stand_in


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
    "train_levanter.py",  # these two by tests/cluster/marin/
    "marin_pipeline.py",
}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUN


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
