"""Every operation of each scenario fails once, and once the process dies right after it: see `every_operation`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.every_operation.scenarios import SCENARIOS
from tests.support.proofs import a_seed, examples, in_proofs, in_test

DEFECTS = [(name, defect) for name, make in SCENARIOS.items() for defect in make().defects]


def found(file: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """Run a scenario in a process without threads, which can fork. Return the findings."""
    command = [sys.executable, "-m", "tests.proofs.every_operation", name, "--json", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert file.exists(), done.stderr
    findings: list[dict[str, Any]] = json.loads(file.read_text())[name]
    return findings


@pytest.mark.parametrize("share", [*in_test(0.1), *in_proofs(1.0)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_was_acknowledged_outlives_every_fault(tmp_path: Path, name: str, share: float) -> None:
    share = min(1.0, share * examples(10) / 10)
    assert found(tmp_path / "found", name, "--share", str(share), "--seed", str(a_seed(7))) == []


@pytest.mark.proof
@pytest.mark.parametrize(("name", "defect"), DEFECTS)
def test_defect_that_was_put_in_is_found(tmp_path: Path, name: str, defect: str) -> None:
    assert found(tmp_path / "found", name, "--defect", defect, "--first")
