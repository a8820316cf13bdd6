"""Measures the way from an edited file to the first line of user code on all hosts of held slices.

python benchmarks/dev.py --runs 20    # needs nothing but this machine; about a minute
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from iris_ray.testing import SimulatedCluster

TYPE, HOSTS = "v4-32", 4
PROGRAM = """
import time
print(time.time(), flush=True)
import jax
print("imported", time.time(), flush=True)
# edited {number} times
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as here, SimulatedCluster({TYPE: 1}, quiet=True) as cluster:
        environ = {**os.environ, "RAY_ADDRESS": cluster.address, "XDG_CACHE_HOME": here}
        environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        work = Path(here, "work")
        work.mkdir()

        def iris_ray(*words: str) -> str:
            command = [sys.executable, "-m", "iris_ray", *words]
            done = subprocess.run(command, cwd=work, env=environ, stdout=subprocess.PIPE, text=True, check=True)
            return done.stdout

        def edit_and_run(number: int) -> tuple[float, float]:
            """Return the seconds to the first line, and to the end of ``import jax``, on the last host."""
            began = time.time()
            (work / "train.py").write_text(PROGRAM.format(number=number))
            printed = iris_ray("dev", "run", "mine", "--", "python", "train.py").splitlines()
            first, imported = ([float(line.split()[-1]) for line in printed if ("imp" in line) == is_import]
                               for is_import in (False, True))  # fmt: skip
            assert len(first) == len(imported) == HOSTS
            return max(first) - began, max(imported) - began

        began = time.time()
        iris_ray("dev", TYPE, "--name", "mine")
        print(f"hold a {TYPE}, {HOSTS} simulated hosts, with JAX imported: {time.time() - began:.1f} s")
        edit_and_run(0)
        print(f"edit → …, {runs} runs      median   worst")
        times = zip(*(edit_and_run(number) for number in range(1, runs + 1)), strict=True)
        for what, found in zip(("first line of user code", "after its import jax"), times, strict=True):
            print(f"{what:23}  {statistics.median(found):5.2f} s  {max(found):5.2f} s")
        iris_ray("dev", "stop", "mine")


if __name__ == "__main__":
    main()
