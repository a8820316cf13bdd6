"""Output of commands that is not shown on a terminal: in pipes that nobody reads to their end, and in files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import command_line
from tests.support.waiting import wait_until


def unread(*command: str, cwd: Path) -> tuple[int, str]:
    """Run a command whose stdout is closed at once. Return its exit code and what it says on stderr."""
    reads, writes = os.pipe()
    os.close(reads)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command, stdout=writes, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environ, timeout=120, check=False
    )
    os.close(writes)
    return done.returncode, done.stderr


def test_what_is_left_for_a_broken_pipe_is_dropped_at_the_end(tmp_path: Path) -> None:
    code = "from iris_ray.terminal import close_broken_pipes\nprint('left')\n"
    ends, said = unread(sys.executable, "-c", code, cwd=tmp_path)
    assert ends == 120, "the code of Python for this"
    assert "BrokenPipeError" in said
    assert unread(sys.executable, "-c", f"{code}close_broken_pipes()", cwd=tmp_path) == (0, "")


@pytest.mark.parametrize("words", [("job", "--help"), ("completion", "bash"), ("study", "study.toml", "--json")])
def test_unread_command_ends_without_a_word(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "study.toml").write_text('days = 0.01\n[[slices]]\ntype = "v4-16"\ncount = 1\n')
    code, said = unread(*command_line(*words), cwd=tmp_path)
    assert "Error" not in said
    assert code in (0, 1)


def test_tasks_of_an_unread_local_run_go_on(tmp_path: Path) -> None:
    script = "for n in range(3000): print('line', n, 'x' * 100, flush=True)\nopen('done', 'w').close()\n"
    (tmp_path / "train.py").write_text(script)
    code, said = unread(*command_line("run", "train.py", "v4-8", "--mode", "simple"), cwd=tmp_path)
    assert code == 0
    assert "Traceback" not in said
    assert (tmp_path / "done").exists()


def test_lines_of_a_run_arrive_in_a_file_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('step 0')\ntime.sleep(600)\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    command = command_line("run", "train.py", "v4-8", "--mode", "simple")
    log = tmp_path / "log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, cwd=tmp_path, env=environ) as running:
        try:
            wait_until(lambda: "step 0" in log.read_text(), 60)
        finally:
            running.kill()
