"""Every Python block of the documents is executed.

A comment before a block, which readers don't see, says how: ``<!-- test: HOW -->``. Further lines of the comment are
code that runs before the block.

- Without such a comment: as a script on a simulated cluster, in a process of its own, as a reader would run it.
- ``same as examples/X.py``: the block is a part of that example, which `tests/cluster/test_examples.py` runs.
- ``alone``: as a script in a process of its own, without a cluster.
- ``notice``: as a script of a task that has had a notice; it must say that it has saved.
- ``on its day``: by `tests/cluster/test_day_on_tpus.py`, which goes through the whole page.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.test_day_on_tpus import PAGE as DAY
from tests.cluster.test_examples import RUN
from tests.docs.pages import REPOSITORY, Block, blocks
from tests.support.proofs import in_proofs

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster

PYTHON = blocks("python")
SAME_AS = re.compile(r"same as (?P<example>examples/\w+\.py)")
ADDRESS = "10.0.0.2:6379"
"""The address that stands in the documents for that of the reader's cluster."""


def those(how: str) -> list[Block]:
    return [block for block in PYTHON if re.fullmatch(how, block.how)]


ON_A_CLUSTER = [block if block.page == "README.md" else in_proofs(block)[0] for block in those("")]


def write_script(block: Block, directory: Path) -> Path:
    script = directory / "script.py"
    script.write_text(f"{block.setup}\n{block.text}")
    return script


def test_every_block_has_a_test() -> None:
    assert PYTHON, "no document was found"
    known = [*those(""), *those("alone"), *those("notice"), *those(SAME_AS.pattern), *those("on its day")]
    assert {block.page for block in those("on its day")} == {DAY}
    assert [f"{block}: {block.how}" for block in PYTHON if block not in known] == []


@pytest.mark.parametrize("block", those(SAME_AS.pattern), ids=str)
def test_block_is_a_part_of_an_example_that_is_run(block: Block) -> None:
    found = SAME_AS.fullmatch(block.how)
    assert found is not None
    assert block.text in (REPOSITORY / found["example"]).read_text()
    assert Path(found["example"]).name in RUN


@pytest.mark.cluster
@pytest.mark.parametrize("block", ON_A_CLUSTER, ids=str)
def test_block_runs_on_a_cluster(block: Block, cluster: "SimulatedCluster", tmp_path: Path) -> None:
    script = write_script(block, tmp_path)
    script.write_text(script.read_text().replace(ADDRESS, cluster.address))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,  # the test machine may be busy
        env=os.environ | {"RAY_ADDRESS": cluster.address, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", those("alone"), ids=str)
def test_block_runs_without_a_cluster(block: Block, tmp_path: Path) -> None:
    script = [sys.executable, str(write_script(block, tmp_path))]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", those("notice"), ids=str)
def test_block_says_that_it_has_saved_when_there_is_a_notice(block: Block, tmp_path: Path) -> None:
    from iris_ray.actors.protocol.task_files import TaskFiles

    files = TaskFiles(str(tmp_path / "task"))
    notice = {"kind": "preemption", "reason": "the slice goes", "deadline": time.time() + 60.0}
    files.notice.write_text(json.dumps(notice))
    environment = os.environ | {TaskFiles.VARIABLE: files.prefix, "JAX_PLATFORMS": "cpu"}
    with (tmp_path / "output").open("w+") as output:
        task = subprocess.Popen(
            [sys.executable, str(write_script(block, tmp_path))], stdout=output, stderr=output, env=environment
        )
        try:
            until = time.monotonic() + 60.0
            while not files.saved.exists() and task.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            assert files.saved.exists(), (tmp_path / "output").read_text()
            assert task.poll() is None, "saved() does not return"
        finally:
            task.kill()
            task.wait()
