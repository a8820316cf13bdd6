"""The examples that need Levanter, Fray, Flax or other frameworks run, and do what the documents say they do."""

import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iris_ray.testing import SimulatedCluster
from tests.support.command_line import EXAMPLES, environment, run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def slices() -> Iterator[SimulatedCluster]:
    """A cluster for the examples that are run by `run_through_a_loss`; no process of pytest joins it."""
    with SimulatedCluster({"v4-8": 2}, connect=False, quiet=True) as cluster:
        yield cluster


def run_through_a_loss(cluster: SimulatedCluster, tmp_path: Path, script: str, *arguments: str, at: str) -> str:
    """Run an example on two slices to its end, and return what it printed.

    Once it has printed what ``at`` matches, another slice comes, and that of its process 0 goes, with notice.
    """
    printed = tmp_path / "printed"
    command = [sys.executable, str(EXAMPLES / script), *arguments, "--tpu", "v4-8", "--num-slices", "2"]
    with printed.open("w") as output:
        example = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment(cluster), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
        )
    try:
        found = wait_until(lambda: re.search(at, printed.read_text()) or example.poll() is not None, PATIENCE_S)
        assert found is not True, printed.read_text()
        on = re.search(r"attempt 1 on (v4-8-\d+), v4-8-\d+", printed.read_text())
        assert on, printed.read_text()
        cluster.add_slice("v4-8")
        cluster.preempt_slice(on[1], notice_s=30)
        assert example.wait(timeout=400) == 0, printed.read_text()
    finally:
        example.kill()
        example.wait()
    return printed.read_text()


def starts(output: str) -> list[tuple[str, int]]:
    """The attempts and the steps at which the processes of a gang of two have started, in order."""
    found = re.findall(r"process \d of 2 on \S+, attempt (\d): starts at step (\d+)", output)
    return sorted((attempt, int(step)) for attempt, step in found)


@pytest.mark.way_in
def test_flax_model_loses_a_slice_and_no_step(slices: SimulatedCluster, tmp_path: Path) -> None:
    pytest.importorskip("flax", reason="needs Flax and Orbax: make marin")
    small = ("--steps", "60", "--width", "16", "--layers", "1", "--step-s", "0.1", "--folder", str(tmp_path / "lm"))
    output = run_through_a_loss(slices, tmp_path, "flax_lm.py", *small, at="step 20 of 60")
    first, second, third, fourth = starts(output)
    assert [first, second] == [("1", 0), ("1", 0)]
    assert third == fourth
    saved = [int(step) for step in re.findall(r"step (\d+) of 60: loss", output)]
    assert third[1] in saved, "the step at which it moved was saved"
    assert output.count(" from memory") == 2
    assert saved == sorted(set(saved)), "no step was done twice"
    assert (tmp_path / "lm" / "60" / "_CHECKPOINT_METADATA").exists(), "Orbax has saved the last step"


def test_grain_pipeline_reads_each_record_once_through_a_loss(slices: SimulatedCluster, tmp_path: Path) -> None:
    pytest.importorskip("grain", reason="needs Grain: make marin")
    output = run_through_a_loss(slices, tmp_path, "grain_data.py", "--step-s", "0.05", at="step 30 of 128")
    assert starts(output)[2][1] > 30
    assert "in 2 epochs, each of 2048 records was read 2 to 2 times" in output


def test_metrics_of_all_attempts_are_one_run(slices: SimulatedCluster, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="needs tensorboardX and W&B: make marin")
    pytest.importorskip("wandb", reason="needs tensorboardX and W&B: make marin")
    folder = tmp_path / "metrics"
    folder.mkdir()
    run_through_a_loss(slices, tmp_path, "metrics.py", "--step-s", "0.05", "--folder", str(folder), at="Run data")
    offline = [path.name.rpartition("Z-")[2] for path in (folder / "wandb").glob("offline-run-*")]
    assert len(offline) == 2
    (logs,) = (path for path in folder.iterdir() if path.name != "wandb")
    assert all(name.endswith(logs.name) for name in offline), "the job's id is the run's"
    first, second = ([*steps_of(path)] for path in sorted(logs.iterdir(), key=lambda path: path.suffix))
    assert [*first, *second] == list(range(100))


def steps_of(events: Path) -> Iterator[int]:
    """The steps of the losses in a file of TensorBoard's."""
    from tensorboardX.proto.event_pb2 import Event

    data = events.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])  # its checksums are before it and behind it
        data = data[16 + length :]
        if event.summary.value:
            yield event.step


@pytest.mark.way_in
def test_levanter_trains_from_its_yaml_file_through_a_loss(slices: SimulatedCluster, tmp_path: Path) -> None:
    pytest.importorskip("levanter", reason="needs Levanter: make marin")
    config = tmp_path / "lm.yaml"
    config.write_text((EXAMPLES / "levanter/lm.yaml").read_text().replace("/tmp/levanter-lm", str(tmp_path)))
    flags = ("--write-data", "--config_path", str(config), "--trainer.num_train_steps", "60")
    output = run_through_a_loss(slices, tmp_path, "levanter_yaml.py", *flags, at=r'"step": ?2\d')
    assert "is saved, because the gang moves" in output
    assert any((tmp_path / "checkpoints").glob("*/step-59/metadata.json"))


@pytest.mark.way_in
def test_levanter_loses_a_slice_and_no_step(tmp_path: Path) -> None:
    pytest.importorskip("levanter", reason="needs Levanter: make marin")
    output = run("train_levanter.py", "--checkpoints", str(tmp_path))
    (saved,) = set(re.findall(r"Step (\d+) is saved, because the gang moves", output))
    started = re.findall(r"process \d of 2 starts at step (\d+)", output)
    assert started == ["0", "0", *[str(int(saved) + 1)] * 2]
    assert "step 100: loss" in output
    assert "last losses, one for each task: " in output


@pytest.mark.way_in
def test_marins_pipeline_loses_a_slice_and_learns(tmp_path: Path) -> None:
    pytest.importorskip("fray.client", reason="needs Fray: make marin")
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
