"""Slices that a person holds, as they type it: they run what was edited, lose a slice, and give it back."""

import re
import subprocess
from pathlib import Path

import pytest

from iris_ray.cli.conventions import FAILED, USAGE
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import Done, command_line, environment
from tests.support.gangs import all_jobs
from tests.support.notebooks import Notebook
from tests.support.waiting import wait_until

JOINS_ALL = """
import jax
import iris_ray.jax
from iris_ray import get_job_info, report_status

iris_ray.jax.initialize()
print("process", jax.process_index(), "of", jax.process_count(), get_job_info().slice_name)
report_status("edited")
"""
SLICE_OF = re.compile(r"v4-16-\d+")


class Person:
    """A person in a directory of theirs."""

    def __init__(self, cluster: SimulatedCluster, home: Path) -> None:
        self.here = home / "work"
        self.here.mkdir()
        self.environ = environment(cluster, "ann") | {"XDG_CACHE_HOME": str(home), "JAX_PLATFORMS": "cpu"}

    def start(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command_line("dev", *words), cwd=self.here, env=self.environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def types(self, *words: str, code: int = 0) -> Done:
        with self.start(*words) as typed:
            out, err = typed.communicate(timeout=120)
        assert typed.returncode == code, out + err
        return subprocess.CompletedProcess(words, code, out, err)


@pytest.mark.proof
def test_held_slice_runs_edits_survives_loss_and_goes_back(cluster: SimulatedCluster, tmp_path: Path) -> None:
    person = Person(cluster, tmp_path)
    held = person.types("v4-16", "--name", "mine", "--env", "JAX_PLATFORMS=cpu").stdout
    assert "iris-ray dev run mine" in held
    again = person.types("v4-16", "--name", "mine", code=USAGE)
    assert "you hold mine already: dev-mine-" in again.stderr
    assert "did you mean mine" in person.types("run", "nime", "--", "true", code=USAGE).stderr

    (person.here / "train.py").write_text(JOINS_ALL)
    ran = person.types("run", "mine", "--", "python", "train.py")
    (slice_name,) = set(SLICE_OF.findall(held))
    assert sorted(line.partition("| ")[2] for line in ran.stdout.splitlines()) == [
        f"process {index} of 2 {slice_name}" for index in (0, 1)
    ]
    (job,) = (job for job in all_jobs() if job.name == "dev-mine")
    wait_until(lambda: [one.status for one in all_jobs() if one.job_id == job.job_id] == ["edited"])
    assert "sent" not in person.types("run", "mine", "--", "python", "train.py").stderr

    (person.here / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    with person.start("run", "mine", "--", "python", "train.py") as run:
        assert run.stdout is not None
        assert "begun" in run.stdout.readline()
        cluster.preempt_slice(slice_name)
        _, err = run.communicate(timeout=120)
    assert run.returncode == FAILED
    assert re.search(r"is lost, and the run has ended with it .* iris-ray dev run mine", err)
    (person.here / "train.py").write_text(JOINS_ALL)
    ran = person.types("run", "mine", "--", "python", "train.py")
    assert "sent 1 of 1 file" in ran.stderr
    assert not set(SLICE_OF.findall(ran.stdout)) & {slice_name}

    person.types("stop", "mine")
    assert "there is no held job of yours 'mine'" in person.types("run", "mine", "--", "true", code=USAGE).stderr


@pytest.mark.proof
def test_held_slice_that_nobody_uses_is_given_back(cluster: SimulatedCluster, tmp_path: Path) -> None:
    person = Person(cluster, tmp_path)
    person.types("v4-16", "--at-most", "36s", "--preload", "no_such_module")
    with person.start("run", "v4-16", "--", "sleep", "600") as run:
        _, err = run.communicate(timeout=120)
    assert run.returncode == FAILED
    assert "is given back: it was held for 0.01 hours, as long as it may be" in err


@pytest.mark.proof
@pytest.mark.filterwarnings("default")  # Jupyter's
def test_notebook_goes_on_after_loss_of_slice(cluster: SimulatedCluster, tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    person = Person(cluster, tmp_path)
    held = person.types("v4-16", "--name", "mine", "--env", "JAX_PLATFORMS=cpu").stdout
    (slice_name,) = set(SLICE_OF.findall(held))
    for file in (tmp_path / "iris_ray/dev").iterdir():
        file.unlink()  # so that the kernel has to ask the cluster
    cell = "%%slice mine\nimport jax, iris_ray.jax\niris_ray.jax.initialize()\nprint(jax.process_count())"
    with Notebook.opened(person.here, tmp_path, person.environ) as notebook:
        is_well, out, err = notebook.run(cell)
        assert is_well, err
        assert sorted(out.splitlines()) == [f"{slice_name}/0| 2", f"{slice_name}/1| 2"]
        cluster.preempt_slice(slice_name)
        is_well, _, err = notebook.run("%%slice mine\nimport time\ntime.sleep(60)")
        assert not is_well
        assert "if you need them, run these cells again: In [2], In [3]" in err
        is_well, out, err = notebook.run(cell)
        assert is_well, err
        assert out.count("| 2\n") == 2
        assert slice_name not in out
    person.types("stop", "mine")
