"""How fast `iris-ray logs --grep` reads the files of hosts.

python benchmarks/log_search.py                 # one attempt with all that is kept of it, 320 MB
python benchmarks/log_search.py --cluster       # what eight simulated hosts keep of 4 attempts, 10 GB; five minutes
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import row
from iris_ray import IrisClient, run_on_pod
from iris_ray.logs.files import FILE_BYTES, FILES_KEPT, AttemptLog, LogWriter
from iris_ray.logs.search import MOST_FOUND_BYTES, LogSearch, search
from iris_ray.testing import SimulatedCluster

PATTERNS = "Traceback", "Traceback|Error", r"worker \d+ failed", "(?i)out of memory"
TPU_TYPE, HOSTS, ATTEMPTS = "v4-64", 8, 4
LINES = b"".join(
    b"2026-11-27 05:30:00 worker %d step %d loss=%f lr=0.0003\n" % (n % 16, n, 1 / n) for n in range(1, 20_000)
)
SAID = b"Traceback (most recent call last):\n"


def one_host() -> None:
    """Search what is kept of one attempt."""
    with tempfile.TemporaryDirectory() as directory:
        log = AttemptLog(Path(directory), "job", 0, 1)
        writer = LogWriter(log)
        for _ in range(FILE_BYTES * FILES_KEPT // len(LINES)):
            writer.write(LINES)
        writer.write(SAID)
        writer.close()
        size = sum(path.stat().st_size for _, path in log.files())
        for pattern in PATTERNS:
            began = time.perf_counter()
            search(log, LogSearch(pattern), MOST_FOUND_BYTES)
            row(pattern, f"{size / 1e6 / (time.perf_counter() - began):,.0f} MB/s")


def talking(lines: bytes, times: int, last: bytes, attempts: int, directory: str) -> Callable[[], None]:
    """A function whose every attempt prints so much, and fails up to the last one once all its tasks have printed."""

    def talk() -> None:
        from iris_ray import get_job_info

        me = get_job_info()
        assert me is not None
        for _ in range(times):
            sys.stdout.buffer.write(lines)
        sys.stdout.buffer.write(last)
        sys.stdout.buffer.flush()
        (Path(directory) / f"{me.attempt}-{me.task_index}").touch()
        while len(list(Path(directory).glob(f"{me.attempt}-*"))) < me.num_tasks:
            time.sleep(0.1)
        if me.attempt < attempts:
            raise RuntimeError("it tries again")

    return talk


def cluster() -> None:
    """Search what all hosts of a gang keep, with the command that people use."""
    with tempfile.TemporaryDirectory() as directory, SimulatedCluster({TPU_TYPE: 1}, quiet=True) as hosts:
        times = FILE_BYTES * FILES_KEPT // len(LINES)
        talk = talking(LINES, times, SAID, ATTEMPTS, directory)
        run_on_pod(talk, TPU_TYPE, max_retries_failure=ATTEMPTS)
        row("printed", f"{ATTEMPTS * HOSTS * times * len(LINES) / 1e9:.1f} GB")
        job_id = IrisClient().list_jobs()[-1].job_id
        for pattern in (PATTERNS[0], PATTERNS[2]):
            words = [sys.executable, "-m", "iris_ray", "logs", job_id, "--all-tasks", "--grep", pattern]
            began = time.perf_counter()
            found = subprocess.run(words, env={**os.environ, "RAY_ADDRESS": hosts.address}, capture_output=True)
            seconds = time.perf_counter() - began
            row(pattern, f"{seconds:.1f} s, {found.stdout.count(SAID)} found, exit code {found.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", action="store_true", help="eight simulated hosts, which share the cores of one")
    (cluster if parser.parse_args().cluster else one_host)()


if __name__ == "__main__":
    main()
