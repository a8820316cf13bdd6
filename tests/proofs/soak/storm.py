"""The Controller alone: thousands of jobs through a real one, with pools that have nothing to carry out.

`benchmarks/controller.py` measures how fast that is. A simulated cluster can't start as many processes in an hour.
"""

import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from iris_ray.testing import SimulatedCluster
from tests.proofs.soak.meter import Meter, Slope, Thing

TPU_TYPE, GANGS = "v4-8", 60
REPOSITORY = Path(__file__).parents[3]
LOOK_EVERY = 2
"""Storms between two looks."""


def storm(seconds: float) -> dict[Thing, Slope]:
    """Have storms of jobs pass for a while on a Ray cluster of its own; return how things grow."""
    paths = [str(REPOSITORY), str(REPOSITORY / "benchmarks")]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    benchmark: Any = importlib.import_module("controller")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes of the pools
    try:
        with SimulatedCluster(quiet=True):
            return _slopes(benchmark, seconds)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _slopes(benchmark: Any, seconds: float) -> dict[Thing, Slope]:
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        scale = benchmark.Scale(slices=GANGS, storms=0, queued=0, samples=0, kills=0, idle_s=0.0)
        benchmark.SMALL, benchmark.LARGE, benchmark.SMALL_SLICES = TPU_TYPE, "v4-16", GANGS
        subject = benchmark.Subject(scale, Path(directory))
        meter, end, done = Meter([Path(directory)]), time.monotonic() + seconds, 0
        while time.monotonic() < end:
            for _ in range(LOOK_EVERY):
                subject.on_all_pools("storm", [TPU_TYPE] * GANGS)
                done += GANGS
            meter.look(done, {}, {})
        return meter.slopes()
