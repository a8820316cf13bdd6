"""The figures are those of Google's library on the same recorded run."""

import json
from pathlib import Path
from typing import Any

import pytest

from iris_ray.model.goodput import AttemptTimes, JobTimes, Marks, StepTime, Totals, measure, settle, with_step

RUN = json.loads(Path(__file__).with_name("recorded_run.json").read_text())
THEIRS: dict[str, float] = RUN["by ml-goodput-measurement 0.2.3"]


def attempt(number: int, recorded: dict[str, Any], every: int) -> AttemptTimes:
    """An attempt of which every so manyth step was seen, as the pool sees them, besides the first two and the last."""
    steps: tuple[StepTime, ...] = ()
    last = len(recorded["steps"]) - 1
    for index, (step, at) in enumerate(recorded["steps"]):
        if index < 2 or index == last or index % every == 0:
            steps = with_step(steps, step, at - recorded["began"])
    before = {name: end - begin for name, (begin, end) in recorded["marks"].items()}
    during = {"checkpoint_save": sum(end - begin for _, begin, end in recorded["saves"])}
    return AttemptTimes(
        number, 8.0, recorded["began"], recorded["began"], recorded["ended"], Marks(steps, before, during)
    )


@pytest.mark.parametrize(("every", "tolerance"), [(1, 1e-3), (4, 0.5)], ids=["all steps", "every fourth step"])
@pytest.mark.parametrize("settled", [False, True])
def test_goodput_agrees_with_googles_library(every: int, tolerance: float, settled: bool) -> None:
    """Of which steps between two that were seen began when is not known exactly; they take about the same time."""
    attempts = [attempt(number, recorded, every) for number, recorded in enumerate(RUN["attempts"], 1)]
    times = JobTimes(attempts, ended_at=RUN["ended"], succeeded=True)
    if settled:
        settle(times, 0.0)
    ours = Totals.of(measure(times, 0.0, 1e9))
    assert {kind: ours.seconds.get(kind, 0.0) for kind in THEIRS if kind != "total"} == pytest.approx(
        {kind: amount for kind, amount in THEIRS.items() if kind != "total"}, abs=tolerance
    )
    assert sum(ours.seconds.values()) == pytest.approx(THEIRS["total"], abs=1e-3)
    assert ours.goodput == pytest.approx(THEIRS["productive"] / THEIRS["total"], abs=tolerance / THEIRS["total"])
