"""The examples run, and do what the documents say they do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.containers import a_stand_in

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_hello_says_hello_from_every_host() -> None:
    output = run("hello.py")
    for index, (slice_id, worker) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        assert f"task {index} of 4: slice {slice_id} (v4-16-{slice_id}), worker {worker}" in output


@pytest.mark.proof
def test_docker_prints_from_every_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_stand_in(tmp_path) as engine:
        monkeypatch.setenv("IRIS_RAY_CONTAINER_ENGINE", str(engine.path))
        output = run("docker.py")
        for index in range(4):
            assert f'task {index} of 4 on slice {index // 2} says: it\'s "hello"' in output
        assert output.count("in two lines") == 4
        assert engine.containers() == []


@pytest.mark.proof
def test_three_users_share_a_cluster_and_see_each_others_jobs() -> None:
    rows = [line.split() for line in run("three_users.py").splitlines() if line.startswith("train-")]
    meanwhile, afterwards = rows[:3], rows[3:]
    for table in (meanwhile, afterwards):
        assert sorted(row[1] for row in table) == ["ann", "ben", "cleo"]
    assert [row[2] for row in afterwards] == ["succeeded"] * 3


@pytest.mark.proof
def test_demo_loses_one_slice_with_notice_and_one_without_and_finishes() -> None:
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
def test_levanter_loses_a_slice_and_no_step(tmp_path: Path) -> None:
    pytest.importorskip("levanter", reason="needs Levanter: make levanter")
    output = run("train_levanter.py", "--checkpoints", str(tmp_path))
    (saved,) = set(re.findall(r"Step (\d+) is saved, because the gang moves", output))
    started = re.findall(r"process \d of 2 starts at step (\d+)", output)
    assert started == ["0", "0", *[str(int(saved) + 1)] * 2]
    assert "step 100: loss" in output
    assert "last losses, one for each task: " in output


@pytest.mark.proof
def test_marins_pipeline_loses_a_slice_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("fray.client", reason="needs Fray: make fray")
    output = run("marin_pipeline.py", "--folder", str(tmp_path))
    assert output.index("=== tokenise: ") < output.index("=== train: ")
    assert "shard 2 of 3: " in output
    assert "=== slice v4-8-0 is preempted" in output
    started = re.findall(r"process \d of 2 on \S+, attempt (\d): starts at step (\d+)", output)
    assert [attempt for attempt, _ in started] == ["1", "1", "2", "2"]
    assert all(int(step) >= 20 for attempt, step in started if attempt == "2")
    found = re.search(r"bits for a letter: (\S+), of 4\.75", output)
    assert found
    assert 1.0 < float(found[1]) < 3.2


RUN_HERE = {
    "docker.py",
    "hello.py",
    "three_users.py",
    "preempt.py",
    "demo.py",
    "train_digits.py",
    "train_levanter.py",
    "marin_pipeline.py",
    "serve_models.py",
}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUN_HERE


@pytest.mark.proof
def test_more_models_are_served_than_fit() -> None:
    output = run("serve_models.py")
    assert "24 answers from 3 models" in output
    assert "statistics says: " in output
    (loaded,) = re.findall(r"still loaded: (.*)", output)
    assert 1 <= len(loaded.split(", ")) <= 2


@pytest.mark.proof
def test_preempted_gang_returns_results_of_its_second_attempt() -> None:
    assert "[2, 2, 2, 2]" in run("preempt.py").splitlines()
