"""How a process ended that is not our child."""

import os
import platform
import subprocess

import pytest

from iris_ray.actors.host.exit_status import how_it_ended

TELLS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("exit 0", "exited with code 0"),
        ("exit 3", "exited with code 3"),
        ("kill -KILL $$", "was killed by SIGKILL"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("kill -ABRT $$", "was killed by SIGABRT"),
        ("kill -40 $$", "was killed by signal 40"),
    ],
)
def test_how_it_ended_tells_code_or_signal_to_a_process_that_is_not_the_parent(script: str, how: str) -> None:
    process = subprocess.Popen(["sh", "-c", f"ulimit -c 0; read wait; {script}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert how_it_ended(pidfd) is None  # it still runs
        process.communicate(b"\n", timeout=10)
        assert how_it_ended(pidfd) == (how if TELLS else None)
    finally:
        os.close(pidfd)
