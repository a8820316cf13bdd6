"""Output of commands that is not shown on a terminal: in pipes that nobody reads to their end, and in files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from iris_ray.cli.conventions import FAILED, OK, UNREAD, USAGE
from tests.support.command_line import command_line
from tests.support.waiting import wait_until

FULL = Path("/dev/full")
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}


def ends(stdout: int | IO[str] | None, *words: str, cwd: Path, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """Run a command of ``iris-ray``. Return its exit code and what it says on stderr."""
    done = subprocess.run(
        command_line(*words), stdout=stdout, stderr=stderr, text=True, cwd=cwd, env=ENVIRON, timeout=120, check=False
    )
    return done.returncode, done.stderr


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    yield writes
    os.close(writes)


@pytest.mark.parametrize("words", [("job", "--help"), ("completion", "bash"), ("study", "study.toml", "--json")])
def test_unread_command_ends_without_a_word(tmp_path: Path, words: tuple[str, ...], unread: int) -> None:
    (tmp_path / "study.toml").write_text('days = 0.01\n[[slices]]\ntype = "v4-16"\ncount = 1\n')
    assert ends(unread, *words, cwd=tmp_path) == (UNREAD, "")
    assert ends(unread, *words, cwd=tmp_path, stderr=subprocess.STDOUT)[0] == UNREAD


def test_error_that_nobody_reads_ends_as_usual(tmp_path: Path, unread: int) -> None:
    """Only stdout's reader counts: a job goes on if its diagnostics are cut off."""
    assert ends(subprocess.DEVNULL, "study", "no.toml", cwd=tmp_path, stderr=unread)[0] == USAGE


def test_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        code, said = ends(full, "job", "--help", cwd=tmp_path)
    assert (code, said) == (FAILED, "iris-ray: stdout can't be written: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_stream_is_no_error(tmp_path: Path, closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command_line("job", "--help")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRON, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (OK, "")


def test_unread_local_run_is_cancelled(tmp_path: Path, unread: int) -> None:
    """As at Ctrl-C: `run` ends its job when it ends."""
    script = "import time\nprint('a line', flush=True)\ntime.sleep(600)\nopen('done', 'w').close()\n"
    (tmp_path / "train.py").write_text(script)
    code, said = ends(unread, "run", "train.py", "v4-8", "--mode", "simple", cwd=tmp_path)
    assert code == UNREAD
    assert said.splitlines() == [said.strip()], "one line says what is run"
    assert not (tmp_path / "done").exists()


def test_local_run_outlives_a_full_disk(tmp_path: Path) -> None:
    """Its lines are lost, not its work; the line about that comes once."""
    (tmp_path / "train.py").write_text("for n in range(3000): print('line', n)\nopen('done', 'w').close()\n")
    with FULL.open("w") as full:
        code, said = ends(full, "run", "train.py", "v4-8", "--mode", "simple", cwd=tmp_path)
    assert code == OK
    assert said.count("stdout can't be written: No space left on device; lines are lost\n") == 1
    assert "Traceback" not in said
    assert (tmp_path / "done").exists()


def test_lines_of_a_run_arrive_in_a_file_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('step 0')\ntime.sleep(600)\n")
    command = command_line("run", "train.py", "v4-8", "--mode", "simple")
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, cwd=tmp_path, env=ENVIRON) as running:
        try:
            wait_until(lambda: "step 0" in log.read_text(), 60)
        finally:
            running.kill()
