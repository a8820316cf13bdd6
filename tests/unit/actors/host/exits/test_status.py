"""How a process ended that is not our child."""

import os
import platform
import subprocess

import pytest

from iris_ray.actors.host.exit_status import exit_code_of, in_words

TELLS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)


@pytest.mark.parametrize(
    ("script", "code", "how"),
    [
        ("exit 0", 0, "exited with code 0"),
        ("exit 3", 3, "exited with code 3"),
        ("kill -KILL $$", -9, "was killed by SIGKILL"),
        ("kill -SEGV $$", -11, "was killed by SIGSEGV"),
        ("kill -ABRT $$", -6, "was killed by SIGABRT"),
        ("kill -40 $$", -40, "was killed by signal 40"),
    ],
)
def test_exit_status_is_known_to_process_other_than_parent(script: str, code: int, how: str) -> None:
    assert in_words(code) == how
    process = subprocess.Popen(["sh", "-c", f"ulimit -c 0; read wait; {script}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert exit_code_of(pidfd) is None  # it still runs
        process.communicate(b"\n", timeout=10)
        assert exit_code_of(pidfd) == (code if TELLS else None)
    finally:
        os.close(pidfd)
