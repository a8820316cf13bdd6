"""One soak: callers beside chaos, a meter, and then plain Ray on the same cluster."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from iris_ray.testing import SimulatedCluster
from tests.proofs.chaos.run import Chaos
from tests.proofs.soak.caller import TPU_TYPE
from tests.proofs.soak.meter import Meter, Slope, Thing

STAYING: tuple[str, ...] = ("warm", "warm", "gang", "cpu")
SLICES = 5
"""One for each warm caller, two for the gangs, and one for who comes and goes."""
VISIT_S = 45.0
LOOKS = 150
"""How often the meter looks, in the whole run; but not more often than each second, nor less than each 20 s."""
PLAIN_PART = 0.1
"""Which part of the time each of the two kinds of plain Ray has."""
LIMITED: tuple[str, ...] = ("actors ", "placement groups ", "keys iris_ray", "files of hosts")


class Caller:
    """A driver in a process of its own; see `caller`.

    Args:
        address: of the cluster.
        kind: of its jobs.
        count: takes the id of its Ray job and how many jobs were done more.
    """

    def __init__(self, address: str, kind: str, count: Callable[[str, int], None]) -> None:
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
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self, within_s: float = 120.0) -> None:
        """Have it end after its job.

        Raises:
            AssertionError: it ended with an error, before or now.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            code = self._process.wait(within_s)
        finally:
            self._process.kill()
            self._reader.join()
        assert code == 0, f"the caller {self.kind} ended with {code}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            ray_job, _, number = line.strip().rpartition(" ")
            if ray_job and number.isdecimal():
                self._count(ray_job, int(number))


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of one thing.

    Attributes:
        phase: what ran: "jobs", "plain tasks", "plain actors".
    """

    phase: str
    thing: Thing
    slope: Slope

    @property
    def fails(self) -> bool:
        """Whether it grows and may not: what is Ray's own is told, and measured with plain Ray beside it."""
        of_ours = self.thing.name in ("Controller", "SlicePoolManager", "SliceActor", "TPUHostActor", "GCS", "raylet")
        counts = of_ours or self.thing.name.startswith(LIMITED)
        return self.phase == "jobs" and counts and self.slope.grows

    def __str__(self) -> str:
        s = self.slope
        what = f"{self.thing.name}, {self.thing.unit}" if self.thing.unit else self.thing.name
        return f"| {self.phase} | {what} | {s.value:+.2f} ± {s.error:.2f} | {s.last:.1f} | {s.series} | {s.jobs:.0f} |"


HEAD = "| phase | what | per 1,000 jobs | at last | processes | jobs |\n|---|---|---|---|---|---|"


class Soak:
    """One run.

    Args:
        seconds: how long it goes on in all, without the start and the end of the cluster.
        directory: for the traces of chaos's jobs.
        say: takes a line about what is going on.

    Attributes:
        done: how many jobs each Ray job has done.
        rows: what was found.
    """

    def __init__(self, seconds: float, directory: Path, seed: int, say: Callable[[str], None] = print) -> None:
        self.done: Counter[str] = Counter()
        self.rows: list[Row] = []
        self._seconds, self._say = seconds, say
        self._lock = threading.Lock()
        self._chaos = Chaos(seed, directory, say, slices=2, jobs=1, others={TPU_TYPE: SLICES}, beside=self._beside)

    def run(self, mean_gap_s: float) -> None:
        """Raises AssertionError if a job went wrong, or something is left in the end.

        Args:
            mean_gap_s: between two faults; 0 for none.
        """
        self._chaos.run(self._seconds * (1 - 2 * PLAIN_PART), mean_gap_s)

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
            self._end(callers)
        self._report("jobs", meter)
        for kind in ("plain tasks", "plain actors"):
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
        gap = min(20.0, max(1.0, self._seconds / LOOKS))
        said = time.monotonic()
        while not over.wait(gap):
            self._look(meter)
            if time.monotonic() - said > 60:
                said = time.monotonic()
                self._say(f"{self._total()} jobs")

    def _look(self, meter: Meter) -> None:
        with self._lock:
            done = dict(self.done)
        me = ray.get_runtime_context().get_job_id()
        meter.look(sum(done.values()) + self._chaos.jobs_done, {**done, me: self._chaos.jobs_done})

    def _plain(self, cluster: SimulatedCluster, kind: str) -> None:
        """Measure what Ray itself does, without iris_ray."""
        before, meter = self._total(), Meter(self._host_directories(cluster))
        callers = [Caller(cluster.address, kind, self._count) for _ in range(2)]
        end, gap = time.monotonic() + self._seconds * PLAIN_PART, max(1.0, self._seconds * PLAIN_PART / 50)
        while time.monotonic() < end:
            time.sleep(gap)
            self._look(meter)
        self._end(callers)
        self._report(kind, meter)
        self._say(f"{self._total() - before} {kind}")

    def _report(self, phase: str, meter: Meter) -> None:
        self.rows += [Row(phase, thing, found) for thing, found in meter.slopes().items()]

    def _end(self, callers: Sequence[Caller]) -> None:
        for caller in callers:
            caller.end()

    def _count(self, ray_job: str, number: int) -> None:
        with self._lock:
            self.done[ray_job] += number

    def _total(self) -> int:
        with self._lock:
            return sum(self.done.values())

    @staticmethod
    def _host_directories(cluster: SimulatedCluster) -> list[Path]:
        return [cluster.host_dir(name, id) for name in cluster.slice_names for id in cluster.worker_ids(name)]
