"""One soak: callers beside chaos, a meter, and then plain Ray on the same cluster."""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from iris_ray.actors.controller.write_ahead_log import MOST_ENTRIES
from iris_ray.settings import GCS_BOUNDS
from iris_ray.state.job_table import FINISHED_JOBS_KEPT
from iris_ray.testing import SimulatedCluster
from tests.proofs.chaos.run import Chaos
from tests.proofs.soak.caller import TPU_TYPE, plain_actor
from tests.proofs.soak.meter import HOLDER, OF_A_CALLER, OUR_ACTORS, SIGMAS, Meter, Slope, Thing
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
JOBS, TASKS, ACTORS, GROUPS = "jobs", "plain tasks", "plain actors", "plain placement groups"
DRIVERS, HOSTS, STORM = "plain drivers", "plain hosts", "storm"
PARTS = {JOBS: 0.64, TASKS: 0.04, ACTORS: 0.04, GROUPS: 0.06, DRIVERS: 0.07, HOSTS: 0.07, STORM: 0.08}
"""Which part of the time each phase has."""
OURS = (*OUR_ACTORS, "GCS", "raylet", "actors ", "placement groups CREATED", "keys iris_ray", "files of hosts")
"""What may not grow, by the beginning of its name."""
BOUNDED = {
    Thing("keys iris_ray/log", ""): 2 * MOST_ENTRIES,
    Thing("keys iris_ray/job", ""): 1.2 * FINISHED_JOBS_KEPT,
    Thing("files of hosts", ""): 500,
}
"""What grows until a bound is reached, and how much there may be at last: what the Controller keeps, and the places of
32 sessions on each host."""
CEILINGS: Mapping[str, Mapping[str, float]] = {
    **{name: {"MB": 128, "descriptors": 128, "threads": 64} for name in OF_A_CALLER},
    **{name: {"": 32} for name in ("actors ", "placement groups CREATED", "keys iris_ray")},
    "GCS": {"descriptors": 256, "threads": 64},
}
"""How much of each there may be after the jobs or the storm, by the beginning of the name and the unit, however few
jobs there were: about twice what there is."""
GCS = Thing("GCS", "MB")
LOST = Thing("hosts lost", "")
RAYS_OWN = {
    Thing("placement groups REMOVED", ""): GROUPS,
    Thing("Ray jobs", ""): DRIVERS,
    LOST: HOSTS,
}
"""What Ray's GCS keeps for ever, whoever has used it, and the phase that shows what one of them costs."""


class Holder:
    """A plain actor that starts an actor on each host, as a pool does. What its memory grows by is Ray's."""

    def hold(self, node_id: str) -> None:
        """Start an actor on a host. Return once it runs."""
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        ray.get(plain_actor.options(scheduling_strategy=there).remote().nothing.remote())


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
        phase: what ran: one of `PARTS`.
        limit: what it may grow by with 1,000 jobs; None: it is told only.
    """

    phase: str
    thing: Thing
    slope: Slope
    limit: float | None

    @property
    def fails(self) -> bool:
        return self.slope.last > self._ceiling or (self.limit is not None and self.slope.exceeds(self.limit))

    @property
    def _ceiling(self) -> float:
        if self.phase not in (JOBS, STORM):
            return math.inf  # it is plain Ray's
        if (most := BOUNDED.get(self.thing)) is not None:
            return most
        begins = (units for name, units in CEILINGS.items() if self.thing.name.startswith(name))
        return next(begins, {}).get(self.thing.unit, math.inf)

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
        """Return 1 for what is ours, and what Ray keeps for ever beside that: in the GCS, and in actors of a caller."""
        if phase not in (JOBS, STORM) or not thing.name.startswith(OURS) or thing in BOUNDED:
            return None
        if thing.name in OF_A_CALLER and thing.unit == GCS.unit:
            return 1.0 + (self._kept_in_a_holder(thing) if phase == JOBS else 0.0)
        if thing.name != GCS.name:
            return 1.0
        if thing != GCS:
            return None  # it has a connection for each process of the cluster
        return 1.0 + (sum(self._kept_by_ray(made, kind) for made, kind in RAYS_OWN.items()) if phase == JOBS else 0.0)

    def _kept_by_ray(self, thing: Thing, kind: str) -> float:
        """Return the MB per 1,000 jobs that Ray keeps for what they have made, as far as a plain phase has shown it."""
        made, plain = self.slopes[JOBS].get(thing), self.slopes.get(kind, {}).get(GCS)
        if made is None or plain is None or math.isnan(made.value + plain.value):
            return 0.0
        return max(0.0, made.value) / 1000 * max(0.0, plain.value + SIGMAS * plain.error)

    def _kept_in_a_holder(self, thing: Thing) -> float:
        """Return the MB per 1,000 of a caller's jobs that Ray keeps for lost hosts, as a plain phase has shown it."""
        lost, plain = self.slopes[JOBS].get(LOST), self.slopes.get(HOSTS, {}).get(Thing(HOLDER, GCS.unit))
        own = self.slopes[JOBS][thing].jobs
        if lost is None or plain is None or not own or math.isnan(lost.value + plain.value):
            return 0.0
        return max(0.0, lost.value) * lost.jobs / own / 1000 * max(0.0, plain.value + SIGMAS * plain.error)

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
        for kind in (TASKS, ACTORS, GROUPS, DRIVERS):
            with self._plain(cluster, kind):
                callers = [Caller(cluster.address, kind, self._count) for _ in range(2)]
                time.sleep(self._seconds * PARTS[kind])
                self._end(callers)
        with self._plain(cluster, HOSTS):
            self._lose_hosts(cluster, self._seconds * PARTS[HOSTS])

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

    @contextlib.contextmanager
    def _plain(self, cluster: SimulatedCluster, kind: str) -> Iterator[None]:
        """Measure what Ray itself does within, without iris_ray."""
        before, meter = self._total(), Meter(self._host_directories(cluster), is_warm=True)
        over = threading.Event()
        gap = max(1.0, self._seconds * PARTS[kind] / 50)

        def watch() -> None:
            while not over.wait(gap):
                self._look(meter)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
        self._found(kind, meter.slopes())
        self._say(f"{self._total() - before} {kind}")

    def _lose_hosts(self, cluster: SimulatedCluster, seconds: float) -> None:
        """Have one host come and go after the other, with a plain actor on it."""
        end, me = time.monotonic() + seconds, ray.get_runtime_context().get_job_id()
        holder = ray.remote(num_cpus=0)(Holder).remote()
        while time.monotonic() < end:
            name = cluster.add_slice(TPU_TYPE)
            ray.get(holder.hold.remote(cluster.node_id(name, 0)))
            cluster.preempt_slice(name)
            self._count(me, os.getpid(), 1)
        ray.kill(holder)

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
