"""One soak: callers beside chaos, a meter, and then plain Ray on the same cluster."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import ray

from iris_ray.actors.controller.write_ahead_log import MOST_ENTRIES
from iris_ray.settings import GCS_BOUNDS
from iris_ray.state.job_table import FINISHED_JOBS_KEPT
from iris_ray.testing import SimulatedCluster
from tests.proofs.chaos.run import Chaos
from tests.proofs.soak.caller import TPU_TYPE
from tests.proofs.soak.meter import OUR_ACTORS, SIGMAS, Meter, Slope, Thing
from tests.proofs.soak.storm import storm

STAYING: tuple[str, ...] = ("warm", "gang", "cpu")
SLICES = 4
"""One for the warm caller, two for the gangs, and one for callers that come and go."""
VISIT_S = 45.0
END_S = 240.0
"""The time in which a caller ends: its last job may wait for slices, and cold ones start on a busy machine."""
LOOKS = 150
"""How often the meter looks, in the whole run; but not more often than each second, nor less than each 20 s."""
GCS_BOUND = 100
"""How many dead actors, dead workers and tasks the GCS remembers here: few, so that the warm-up has more."""
PHASES = JOBS, TASKS, ACTORS, STORM = "jobs", "plain tasks", "plain actors", "storm"
PARTS = {JOBS: 0.7, TASKS: 0.05, ACTORS: 0.15, STORM: 0.1}
"""Which part of the time each phase has."""
OURS = (*OUR_ACTORS, "GCS", "raylet", "actors ", "placement groups CREATED", "keys iris_ray", "files of hosts")
"""What may not grow, by the beginning of its name."""
BOUNDED = {"keys iris_ray/log": 2 * MOST_ENTRIES, "keys iris_ray/job": 1.2 * FINISHED_JOBS_KEPT}
"""What grows until there is as much of it as the Controller keeps, and how much there may be at last."""
RAYS_OWN = {
    Thing("GCS", "MB"): Thing("GCS", "MB"),
    **{Thing(name, "MB"): Thing("driver", "MB") for name in ("SlicePoolManager", "SliceActor", "TPUHostActor")},
}
"""What is due to Ray's own memory of actors, and where that is measured with plain ones: each task of a job is one."""


class Caller:
    """A driver in a process of its own; see `caller`.

    Args:
        address: of the cluster.
        kind: of its jobs.
        count: takes the id of its Ray job, its pid, and how many jobs were done more.
    """

    def __init__(self, address: str, kind: str, count: Callable[[str, int, int], None]) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.proofs.soak.caller", address, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = count
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def tell_to_end(self) -> None:
        """Have it end after its job; return at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self, within_s: float = END_S) -> None:
        """Have it end after its job.

        Raises:
            AssertionError: it ended with an error, before or now.
        """
        self.tell_to_end()
        try:
            code = self._process.wait(within_s)
        finally:
            self._process.kill()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
        assert code == 0, f"the caller {self.kind} ended with {code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            ray_job, _, number = line.strip().rpartition(" ")
            if ray_job and number.isdecimal():
                self._count(ray_job, self.pid, int(number))


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of one thing.

    Attributes:
        phase: what ran: one of `PHASES`.
        limit: what it may grow by with 1,000 jobs; None: it is told only.
    """

    phase: str
    thing: Thing
    slope: Slope
    limit: float | None

    @property
    def fails(self) -> bool:
        if (most := BOUNDED.get(self.thing.name)) is not None:
            return self.slope.last > most
        return self.limit is not None and self.slope.exceeds(self.limit)

    def __str__(self) -> str:
        s = self.slope
        what = f"{self.thing.name}, {self.thing.unit}" if self.thing.unit else self.thing.name
        limit = "" if self.limit is None else f"{self.limit:.1f}"
        cells = f"{s.value:+.2f} ± {s.error:.2f} | {limit} | {s.last:.1f} | {s.series} | {s.jobs:.0f}"
        return f"| {self.phase} | {what} | {cells} |"


HEAD = "| phase | what | per 1,000 jobs | limit | at last | processes | jobs |\n|---|---|---|---|---|---|---|"


class Soak:
    """One run.

    Args:
        seconds: how long it goes on in all, without the start and the end of the cluster.
        directory: for the traces of chaos's jobs.
        say: takes a line about what is going on.

    Attributes:
        done: how many jobs each Ray job has done.
        drivers: the process of each Ray job's driver.
        slopes: what was found, by phase.
        troubles: callers that ended with an error, or did not end.
    """

    def __init__(self, seconds: float, directory: Path, seed: int, say: Callable[[str], None] = print) -> None:
        self.done: Counter[str] = Counter()
        self.drivers: dict[str, int] = {}
        self.slopes: dict[str, dict[Thing, Slope]] = {}
        self.troubles: list[str] = []
        self._seconds, self._say = seconds, say
        self._lock = threading.Lock()
        self._chaos = Chaos(
            seed, directory, say, slices=2, jobs=1, states=False, others={TPU_TYPE: SLICES}, beside=self._beside
        )

    def run(self, mean_gap_s: float) -> None:
        """Raises AssertionError if a job went wrong, or something is left in the end.

        Args:
            mean_gap_s: between two faults; 0 for none.
        """
        with mock.patch.dict(os.environ, dict.fromkeys(GCS_BOUNDS, str(GCS_BOUND))):
            self._chaos.run(self._seconds * PARTS[JOBS], mean_gap_s)
            self._found(STORM, storm(self._seconds * PARTS[STORM]))

    def _found(self, phase: str, slopes: dict[Thing, Slope]) -> None:
        """Keep what a phase has shown, and tell it: the next phase may go wrong."""
        self.slopes[phase] = slopes
        self._say("\n".join(str(row) for row in self.rows if row.phase == phase))

    @property
    def rows(self) -> list[Row]:
        """What was found, as lines of a table."""
        return [
            Row(phase, thing, found, self._limit(phase, thing))
            for phase, slopes in self.slopes.items()
            for thing, found in slopes.items()
        ]

    def _limit(self, phase: str, thing: Thing) -> float | None:
        """Return 1 for what is ours, and beside that what plain actors cost in its place."""
        if phase not in (JOBS, STORM) or not thing.name.startswith(OURS) or thing.name in BOUNDED:
            return None
        rays = self.slopes.get(ACTORS, {}).get(RAYS_OWN.get(thing, thing)) if phase == JOBS else None
        return 1.0 + (0.0 if rays is None or thing not in RAYS_OWN else max(0.0, rays.value + SIGMAS * rays.error))

    @property
    def chaos(self) -> Chaos:
        return self._chaos

    @contextlib.contextmanager
    def _beside(self, cluster: SimulatedCluster) -> Iterator[None]:
        meter = Meter(self._host_directories(cluster))
        callers = [Caller(cluster.address, kind, self._count) for kind in STAYING]
        over = threading.Event()
        visitors = threading.Thread(target=self._visit, args=(cluster.address, over, callers))
        watch = threading.Thread(target=self._watch, args=(meter, over))
        visitors.start()
        watch.start()
        try:
            yield
        finally:
            over.set()
            visitors.join()
            watch.join()
            self._found(JOBS, meter.slopes())
            self._end(callers)
        for kind in (TASKS, ACTORS):
            self._plain(cluster, kind)

    def _visit(self, address: str, over: threading.Event, callers: Sequence[Caller]) -> None:
        """Have one caller come after the other."""
        while not over.is_set():
            visitor = Caller(address, "visit", self._count)
            over.wait(VISIT_S)
            self._end([visitor])
            for caller in callers:
                if not caller.runs:
                    self._say(f"the caller {caller.kind} has ended")

    def _watch(self, meter: Meter, over: threading.Event) -> None:
        gap = min(20.0, max(1.0, self._seconds * PARTS[JOBS] / LOOKS))
        said = time.monotonic()
        while not over.wait(gap):
            self._look(meter)
            if time.monotonic() - said > 60:
                said = time.monotonic()
                self._say(f"{self._total()} jobs")

    def _look(self, meter: Meter) -> None:
        with self._lock:
            done, drivers = dict(self.done), dict(self.drivers)
        me = ray.get_runtime_context().get_job_id()
        meter.look(sum(done.values()) + self._chaos.jobs_done, {**done, me: self._chaos.jobs_done}, drivers)

    def _plain(self, cluster: SimulatedCluster, kind: str) -> None:
        """Measure what Ray itself does, without iris_ray."""
        before, meter = self._total(), Meter(self._host_directories(cluster))
        callers = [Caller(cluster.address, kind, self._count) for _ in range(2)]
        seconds = self._seconds * PARTS[kind]
        end, gap = time.monotonic() + seconds, max(1.0, seconds / 50)
        while time.monotonic() < end:
            time.sleep(gap)
            self._look(meter)
        self._end(callers)
        self._found(kind, meter.slopes())
        self._say(f"{self._total() - before} {kind}")

    def _end(self, callers: Sequence[Caller]) -> None:
        for caller in callers:
            caller.tell_to_end()
        for caller in callers:
            try:
                caller.end()
            except (AssertionError, subprocess.TimeoutExpired) as error:
                self.troubles.append(str(error))

    def _count(self, ray_job: str, pid: int, number: int) -> None:
        with self._lock:
            self.drivers[ray_job] = pid
            self.done[ray_job] += number

    def _total(self) -> int:
        with self._lock:
            return sum(self.done.values())

    @staticmethod
    def _host_directories(cluster: SimulatedCluster) -> list[Path]:
        return [cluster.host_dir(name, id) for name in cluster.slice_names for id in cluster.worker_ids(name)]
