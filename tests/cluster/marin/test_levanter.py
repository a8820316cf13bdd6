"""Levanter really trains on a gang, through a lost slice and a notice, where it is installed."""

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import iris_ray.levanter
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.goodput.calls import GoodputCalls
from iris_ray.model.goodput import TimeKind
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import EXAMPLES
from tests.support.waiting import wait_until

pytest.importorskip("levanter", reason="needs Levanter: make marin")
pytestmark = pytest.mark.proof

STEPS = 60
PATIENCE_S = 120.0


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example's function, which the hosts can't import."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("train_levanter")
    ray.cloudpickle.register_pickle_by_value(example)
    return example.train


def record(path: Path) -> Callable[[Any], None]:
    """A hook that writes down what each step came to. Levanter runs its own, that of the checkpoints, before it."""

    def write(info: Any) -> None:
        import json
        import time

        import jax

        from iris_ray import get_job_info

        me = get_job_info()
        assert me is not None
        if me.task_index == 0:
            line = {"step": info.step, "loss": info.loss.hex(), "attempt": me.attempt, "slice": me.slice_name}
            with path.open("a") as lines:
                lines.write(json.dumps({**line, "processes": jax.process_count()}) + "\n")
        time.sleep(0.1)

    return write


def steps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(lines: list[dict[str, Any]]) -> dict[int, str]:
    """By step; those of a step that was done again must be the same, to the bit."""
    found: dict[int, str] = {}
    for line in lines:
        assert found.setdefault(line["step"], line["loss"]) == line["loss"], line
    return found


def test_disrupted_run_has_losses_of_undisrupted_run(
    cluster: SimulatedCluster, tmp_path: Path, train: Callable[..., Any]
) -> None:
    def start(run_id: str) -> Any:
        hook = record(tmp_path / run_id)
        function = functools.partial(train, str(tmp_path / "runs"), STEPS, hook, id=run_id)
        preload = iris_ray.levanter.PRELOAD
        return iris_ray.levanter.run_on_pod_ray.remote(function, "v4-16", 1, 2, 0, spares=1, preload=preload)

    def wait_for(run_id: str, step: int, attempt: int) -> list[dict[str, Any]]:
        def there() -> Any:
            lines = steps(tmp_path / run_id)
            return lines and lines[-1]["step"] >= step and lines[-1]["attempt"] == attempt and lines

        return wait_until(there, PATIENCE_S)

    results = ray.get(start("quiet"))
    quiet = steps(tmp_path / "quiet")
    assert results[0] == results[1] == float.fromhex(quiet[-1]["loss"])
    assert {line["processes"] for line in quiet} == {2}
    assert (tmp_path / "runs" / "quiet" / f"step-{STEPS - 1}" / "metadata.json").exists()

    run = start("faults")
    lost = wait_for("faults", 24, attempt=1)[-1]["slice"]
    cluster.preempt_slice(lost)
    noticed = wait_for("faults", 30, attempt=2)[-1]["slice"]
    cluster.preempt_slice(noticed, notice_s=30)
    assert ray.get(run) == results
    faults = steps(tmp_path / "faults")
    first, second, third = ([line["step"] for line in faults if line["attempt"] == n] for n in (1, 2, 3))
    assert second[0] == 21, "after the newest checkpoint"
    assert third[0] == second[-1] + 2, "no step is done again; hooks of the user's miss the one at which it moved"
    assert {line["step"] for line in quiet} - {line["step"] for line in faults} == {second[-1] + 1}
    assert losses(faults).items() <= losses(quiet).items()
    assert first[-1] >= 24

    goodput = max(ControllerConnection().ask_all(GoodputCalls.list_goodput), key=lambda job: job.attempts)
    assert goodput.attempts == 3
    for kind in (TimeKind.UNPRODUCTIVE_CHECKPOINT_SAVE_TIME, TimeKind.UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME):
        assert goodput.seconds[kind.value] > 0, goodput

    assert ray.get(start("faults")) == [None, None], "it is complete"
    assert steps(tmp_path / "faults") == faults


def test_run_on_two_slices_goes_on_from_memory(
    cluster: SimulatedCluster, tmp_path: Path, train: Callable[..., Any]
) -> None:
    """The loss of a slice costs less than ten steps, though the last checkpoint is further back."""
    path = tmp_path / "memory"
    function = functools.partial(train, str(tmp_path / "runs"), STEPS, record(path), id="memory")
    run = iris_ray.levanter.run_on_pod_ray.remote(function, "v4-16", 2, 1, 0, preload=iris_ray.levanter.PRELOAD)
    at = wait_until(lambda: next((line for line in steps(path) if line["step"] >= 36), None), PATIENCE_S)
    cluster.preempt_slice(at["slice"])
    ray.get(run)
    first, second = ([line["step"] for line in steps(path) if line["attempt"] == n] for n in (1, 2))
    assert second[0] > first[-1] - 11, (first, second)
    assert second[0] % 20 != 1, "that is where the checkpoints of the config are"
    assert second[-1] == STEPS - 1
    assert losses(steps(path))
