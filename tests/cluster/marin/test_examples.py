"""The examples that need Levanter or Fray run, and do what the documents say they do."""

import re
from pathlib import Path

import pytest

from tests.support.command_line import run

pytestmark = pytest.mark.proof


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
