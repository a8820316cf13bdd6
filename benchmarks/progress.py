"""Time lost by a fault: the steps that are done again, and the seconds until the next new step; by fault and program.

    python benchmarks/progress.py [--samples 3] [--fault "slice killed"] [--program memory] [--json FILE]

Each program runs as one job on two of three simulated v4-16 slices: four processes of JAX on CPU. The third slice is
its spare, and is ready before each fault. A new slice comes after it. The programs:

- memory: the demo's training run with `iris_ray.checkpoint.MemoryCheckpointer`, and random numbers as further state.
- orbax: the same with Orbax's asynchronous saves to a directory that all hosts share.
- none: the same without any restore.
- levanter: `examples/train_levanter.py`, if Levanter is installed.

A fault comes in the middle between two saves. Between two saves are √(2·c·m) seconds, which loses the least: a save
holds the program up for c seconds, which is measured before, and m seconds (`--loss-every`) are between two losses.

Time lost = steps done again × seconds of a step + seconds from the fault until the first step of the next attempt. With
a notice the run goes on until it has saved; the seconds count from its last step. The seconds by phase, each until the
slowest process is through:

- detect: from the fault until the tasks that it did not hit are stopped.
- restart: until all tasks of the next attempt run user code.
- import, join, restore, compile: of JAX and the program; `iris_ray.jax.initialize()` and JAX's first look for devices;
  the state; the training step.
- first step: the first call of the training step.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray

from faults import freeze_host, kill_host, kill_task, sound_slices, spare_is_ready, take_slice
from iris_ray import run_on_pod_ray
from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.state.attempt_ends import QUICK_S
from iris_ray.testing import SimulatedCluster
from progress_programs import KEEPERS, PHASES, PRELOAD, train, train_with_levanter

TPU_TYPE, TASKS = "v4-16", 4
COLUMNS = ("detect", "restart", "import", "join", "restore", "compile", "first step")
QUIET_S = 3.0
"""Seconds in which nothing happens, before and after a run is measured."""
BETWEEN_S = QUICK_S + 1.0
"""From the moment when the spare is ready to the fault: the Controller pauses after attempts that end sooner."""
PATIENCE_S = 180.0
CALIBRATION_EVERY, CALIBRATION_SAVES = 100, 8
"""So many steps that what goes on in the background ends before the next save."""
NOTICE_S = 30.0
LEVANTER_EVERY = 10
"""As iris_ray.levanter keeps steps in memory."""


@dataclass
class Sample:
    """What one fault cost.

    Attributes:
        seconds: of each phase of `COLUMNS`.
        again: steps done again.
        step_s: seconds of one step.
    """

    seconds: list[float]
    again: int
    step_s: float

    @property
    def away(self) -> float:
        return sum(self.seconds)

    @property
    def lost(self) -> float:
        return self.away + self.again * self.step_s


@dataclass
class Pace:
    """How often a program saves, and what that costs; seconds."""

    every: int
    step_s: float = math.nan
    stall_s: float = 0.0

    @property
    def share(self) -> float:
        """The share of time in which saves hold the program up."""
        return self.stall_s / (self.every * self.step_s + self.stall_s)


class Run:
    """A job that runs on through faults.

    Args:
        cluster: where it runs.
        program: its name.
        every: steps from one save to the next.
        state_mb: MB of further state.
        directory: an empty one for its notes.
    """

    def __init__(
        self, cluster: SimulatedCluster, program: str, every: int, state_mb: float, directory: Path, spares: int = 1
    ) -> None:
        self.cluster = cluster
        self.number = 0
        self._saves = program != "none"
        self._every = every
        self._directory = directory
        self._attempt = 1
        if program == "levanter":
            import iris_ray.levanter

            function: Callable[[], None] = functools.partial(train_with_levanter, str(directory), every)
            preload: list[str] = list(iris_ray.levanter.PRELOAD)
        else:
            own_mb = state_mb if self._saves else 0.0  # it would make it anew
            function = functools.partial(train, str(directory), program, every, own_mb)
            preload = PRELOAD[program]
        self._ref = run_on_pod_ray.remote(
            function, TPU_TYPE, num_slices=2, spares=spares, preload=preload, max_retries_failure=1000
        )
        self._until(lambda: self._stepped(1))

    def pace(self, saves: int) -> Pace:
        """Return how long a step and a save take, once there were so many saves in every task."""
        if not self._saves:
            saves = 0
            time.sleep(QUIET_S)
        found = self._until(lambda: [s for s in self._stalls() if len(s) > saves] if saves else [[0.0, 0.0]])
        stalls = [statistics.median(of_task[1:]) for of_task in found]
        return Pace(self._every, self._step_s(), max(stalls))

    def hit(self, fault: Callable[["Run"], set[int]], announced: bool) -> Sample:
        """Have a fault happen between two saves; return what it cost."""
        self._until(spare_is_ready)
        time.sleep(BETWEEN_S)
        if self._saves:
            middle = self._until(lambda: self._last_save() + 1) - 1 + self._every // 2
            middle += max(0, math.ceil((self._last_step() - middle) / self._every)) * self._every
            self._until(lambda: self._last_step() >= middle)
        before, step_s, at = self._attempt, self._step_s(), time.time()
        hit = fault(self)
        self._until(lambda: self._latest() > before and self._stepped(self._latest()))
        self._attempt, self.number = self._latest(), self.number + 1
        last_step, last_time = max((n["step"], n["time"]) for n in self._steps(before))
        ticks = [float(self._path("tick", before, i).read_text()) for i in range(TASKS) if i not in hit]
        at = last_time if announced else at
        times = [at, max(at, *ticks)]
        times += [max(self._phase(i, phase) for i in range(TASKS)) for phase in PHASES]
        first_step = min(n["step"] for n in self._steps(self._attempt))
        again = max(0, last_step + 1 - first_step) if self._saves else 0  # of its last step Levanter does not tell
        return Sample([max(0.0, then - now) for now, then in pairwise(times)], again, step_s)

    def end(self) -> None:
        ray.cancel(self._ref)
        assert ray.wait([self._ref], timeout=PATIENCE_S)[0]
        time.sleep(QUIET_S)

    # -- for faults ------------------------------------------------------------------------------------------------

    def task(self, index: int) -> tuple[int, str]:
        """The process of a task, and its slice."""
        (found,) = (note for note in self._notes(self._attempt, index) if "pid" in note)
        return found["pid"], found["slice"]

    # -- notes -----------------------------------------------------------------------------------------------------

    def _path(self, kind: str, attempt: int, index: int) -> Path:
        return self._directory / f"{kind}-{attempt}-{index}"

    def _notes(self, attempt: int, index: int) -> list[dict[str, Any]]:
        path = self._path("notes", attempt, index)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _latest(self) -> int:
        return max(int(path.name.split("-")[1]) for path in self._directory.glob("notes-*"))

    def _stepped(self, attempt: int) -> bool:
        return all(any(n.get("phase") == "stepped" for n in self._notes(attempt, i)) for i in range(TASKS))

    def _phase(self, index: int, phase: str) -> float:
        times = (note["time"] for note in self._notes(self._attempt, index) if note.get("phase") == phase)
        return float(next(times))

    def _steps(self, attempt: int) -> Iterator[dict[str, Any]]:
        yield from (note for i in range(TASKS) for note in self._notes(attempt, i) if "step" in note)

    def _last_step(self) -> int:
        return max((int(note["step"]) for note in self._notes(self._attempt, 0) if "step" in note), default=-1)

    def _last_save(self) -> int:
        return max((int(note["saved"]) for note in self._notes(self._attempt, 0) if "saved" in note), default=-1)

    def _stalls(self) -> list[list[float]]:
        return [[n["stall"] for n in self._notes(self._attempt, i) if "stall" in n] for i in range(TASKS)]

    def _step_s(self) -> float:
        times = [note["time"] for note in self._notes(self._attempt, 0) if "step" in note][-200:]
        return float(statistics.median(then - now for now, then in pairwise(times)))

    def _until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if ray.wait([self._ref], timeout=0)[0]:
                raise AssertionError(f"the run ended with {ray.get(self._ref)}")
            assert time.monotonic() < deadline, f"nothing happened for {PATIENCE_S:g} s"
            time.sleep(0.05)
        return found


# -- faults ------------------------------------------------------------------------------------------------------------


def announce(run: Run) -> set[int]:
    run.cluster.preempt_slice(run.task(3)[1], notice_s=NOTICE_S)
    return set()


def kill_controller_and_slice(run: Run) -> set[int]:
    os.kill(ControllerConnection().ask(ControllerInterface.about)["pid"], signal.SIGKILL)
    return take_slice(run)


def kill_first_host(run: Run) -> set[int]:
    run.cluster.kill_host(run.task(0)[1], 0)
    return {0}


FAULTS: dict[str, Callable[[Run], set[int]]] = {
    "slice taken with notice": announce,
    "slice killed": take_slice,
    "host killed": kill_host,
    "host frozen": freeze_host,
    "task process killed": kill_task,
    "Controller and slice killed": kill_controller_and_slice,
    "coordinator's host killed": kill_first_host,
}
OF_ALL = ("slice taken with notice", "slice killed")
"""The faults of the programs that memory is compared with; it has all."""


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """What was measured of one program."""

    program: str
    pace: Pace
    samples: dict[str, list[Sample]] = field(default_factory=dict)


def measure(
    cluster: SimulatedCluster, program: str, faults: list[str], samples: int, loss_every_s: float, state_mb: float
) -> Figures:
    """Measure one program: first what a save costs, then the faults."""
    with tempfile.TemporaryDirectory(prefix="progress-") as directory:
        pace = Pace(LEVANTER_EVERY if program == "levanter" else CALIBRATION_EVERY)
        if program in KEEPERS and program != "none":
            first = Path(directory) / "pace"
            first.mkdir()
            run = Run(cluster, program, CALIBRATION_EVERY, state_mb, first, spares=0)
            pace = run.pace(CALIBRATION_SAVES)
            run.end()
            pace.every = max(1, round(math.sqrt(2 * pace.stall_s * loss_every_s) / pace.step_s))
            print(f"{program}: a save takes {pace.stall_s * 1e3:.0f} ms; one every {pace.every} steps", flush=True)
        figures = Figures(program, pace, {name: [] for name in faults})
        then = Path(directory) / "faults"
        then.mkdir()
        run = Run(cluster, program, pace.every, state_mb, then)
        for name in (name for _ in range(samples) for name in faults):
            sample = run.hit(FAULTS[name], announced=FAULTS[name] is announce)
            figures.samples[name].append(sample)
            pace.step_s = sample.step_s
            phases = ", ".join(f"{c} {s:.2f}" for c, s in zip(COLUMNS, sample.seconds, strict=True))
            print(f"{program}, {name}: {sample.again} steps again, {phases}; lost {sample.lost:.2f} s", flush=True)
            while sound_slices(cluster) < 3:
                cluster.add_slice(TPU_TYPE)
                time.sleep(1.0)
        run.end()
    return figures


def table(all_figures: list[Figures]) -> str:
    lines = ["| program | fault | again, steps | " + " | ".join(COLUMNS) + " | away, s | lost, s |"]
    lines.append("|---|---|" + "---:|" * (len(COLUMNS) + 3))
    for figures in all_figures:
        for name, samples in figures.samples.items():
            phases = [f"{statistics.median(column):.2f}" for column in zip(*(s.seconds for s in samples), strict=True)]
            again = f"{statistics.median(s.again for s in samples):g}"
            cells = [figures.program, name, again, *phases, spread([s.away for s in samples])]
            lines.append("| " + " | ".join([*cells, spread([s.lost for s in samples])]) + " |")
    lines += ["", "| program | a step, ms | a save, ms | every, steps | of the time, % |", "|---|---:|---:|---:|---:|"]
    for figures in all_figures:
        pace = figures.pace
        numbers = f"{pace.step_s * 1e3:.0f} | {pace.stall_s * 1e3:.1f} | {pace.every} | {pace.share * 100:.2f}"
        lines.append(f"| {figures.program} | {numbers} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    installed = [*KEEPERS, *(["levanter"] if importlib.util.find_spec("levanter") else [])]
    if importlib.util.find_spec("orbax") is None:
        installed.remove("orbax")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--program", choices=installed, action="append", help="this one; may be repeated")
    parser.add_argument("--fault", choices=list(FAULTS), action="append", help="this one; may be repeated")
    parser.add_argument("--loss-every", type=float, default=3600.0, help="seconds between two losses, for the interval")
    parser.add_argument("--state-mb", type=float, default=100.0, help="MB of further state over all processes")
    parser.add_argument("--json", type=Path, help="a file for the samples")
    args = parser.parse_args()
    with SimulatedCluster({TPU_TYPE: 3}, quiet=True) as cluster:
        found = []
        for program in args.program or installed:
            faults = args.fault or (list(FAULTS) if program == installed[0] else list(OF_ALL))
            found.append(measure(cluster, program, faults, args.samples, args.loss_every, args.state_mb))
            if args.json:
                args.json.write_text(json.dumps([asdict(figures) for figures in found], indent=1))
    print("\n" + table(found))


if __name__ == "__main__":
    main()
