"""One run of chaos, from the first job to the proof that nothing is left."""

import contextlib
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import ray
from ray.util.placement_group import placement_group_table

from iris_ray import release, run_on_pod_ray
from iris_ray.actors.calls.names import PLACEMENT_GROUP_PREFIX
from iris_ray.actors.host.ledger import EXCLUSIVE
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.testing import SimulatedCluster
from tests.proofs.chaos.checks import KnownAttempt, check_steps, in_memory, overlaps, wrong_numbers, wrong_restores
from tests.proofs.chaos.faults import Faults
from tests.proofs.chaos.jobs import Running, counting, keeping, lines_in
from tests.support.gangs import alive, all_jobs, birth, the_controller
from tests.support.odd_hosts import CONTAINER, NON_ROOT, READ_ONLY_ROOT, SMALL_DISK, clock_off_by, unmount
from tests.support.waiting import wait_until

TPU_TYPE, SLICES, JOBS = "v4-16", 4, 3
"""Where faults happen, and to how many jobs at a time, unless a run says otherwise."""
PRELOAD = ["iris_ray.checkpoint"]
PATIENCE_S = 240.0
"""How long the jobs of the end may take."""
WHERE = re.compile("(?P<began>runs|did not start) on (?P<slices>[^(]+?)( \\(|$)")
"""How the Controller says where an attempt has run, or has not started."""


class Chaos:
    """One run.

    Args:
        seed: decides what happens; when exactly, the machine has its say, too.
        directory: where the jobs leave their traces.
        say: takes a line about what is going on.
        slices, jobs: the number of slices to which faults happen, and of jobs at a time that run there.
        states: whether one of the jobs keeps a state of JAX in memory.
        others: the number of other slices of each TPU type, which faults leave alone.
        beside: what goes on beside the jobs; entered when the cluster is there, left before it is checked.

    Attributes:
        odd_slices: how many slices came that were odd, by what was odd.
        false_alarms: what a job was charged for although nobody had caused it.
        overlaps: tasks that went on beside the next attempt, though nothing kept them from hearing of it.
        losses: states in memory that were wrong, old or lost.
        restores: from where later attempts of jobs that keep a state went on.
        redone: steps of tasks that were done again.
        jobs_done: how many jobs have ended, all well.
    """

    def __init__(
        self,
        seed: int,
        directory: Path,
        say: Callable[[str], None] = print,
        *,
        slices: int = SLICES,
        jobs: int = JOBS,
        states: bool = True,
        others: Mapping[str, int] | None = None,
        beside: Callable[[SimulatedCluster], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.odd_slices: Counter[str] = Counter()
        self.false_alarms: list[str] = []
        self.overlaps: list[str] = []
        self.losses: list[str] = []
        self.restores: Counter[str] = Counter()
        self.redone = 0
        self.jobs_done = 0
        self._say = say
        self._slices, self._jobs, self._states = slices, jobs, states
        self._others, self._beside = dict(others or {}), beside
        self._chance = random.Random(seed)
        self._directory = directory
        self._running: dict[int, Running] = {}
        self._started = 0
        self._cluster: SimulatedCluster
        self._faults: Faults
        self._mounts = contextlib.ExitStack()

    @property
    def findings(self) -> list[str]:
        """All that should not be."""
        return self.false_alarms + self.overlaps + self.losses

    @property
    def faults(self) -> Counter[str]:
        """What happened how often, odd slices included."""
        return self._faults.counts + self.odd_slices

    def run(self, seconds: float, mean_gap_s: float) -> None:
        """Raises AssertionError if anything is not as it should be.

        Args:
            seconds: how long faults happen.
            mean_gap_s: between two of them; 0 for none at all.
        """
        networks = os.geteuid() == 0
        slices = {TPU_TYPE: self._slices, **self._others}
        with SimulatedCluster(slices, quiet=True, networks=networks) as self._cluster, self._mounts:
            self._faults = Faults(self._cluster, self._chance, self._running)
            with self._beside(self._cluster):
                self._disturb(seconds, mean_gap_s)
            release()
            self._check_nothing_left()

    def _disturb(self, seconds: float, mean_gap_s: float) -> None:
        """Have faults happen for a while, then wait until all jobs are done."""
        end = time.monotonic() + seconds
        self._fill_up()
        while time.monotonic() < end:
            if not mean_gap_s:
                self._wait(end - time.monotonic())
                break
            self._wait(min(self._chance.expovariate(1 / mean_gap_s), 3 * mean_gap_s, end - time.monotonic()))
            if happened := self._faults.happen():
                self._say(f"{happened}   [{self._stand()}]")
        self._say("no more faults; the jobs go on to their ends")
        self._faults.end_what_passes()
        deadline = time.monotonic() + PATIENCE_S
        while self._running:
            assert time.monotonic() < deadline, f"after {PATIENCE_S:g} s these still run: {self._stand()}"
            self._settle(start_more=False)
            time.sleep(0.2)

    def _fill_up(self) -> None:
        while len(self._running) < self._jobs:
            number, self._started = self._started, self._started + 1
            directory = self._directory / str(number)
            directory.mkdir()
            keeps = self._states and not any(job.keeps for job in self._running.values())
            counts: list[int | list[int]] = [1, 2, 2, [1, 2]] if keeps else [1, 1, 2, [1, 2]]
            slices = self._chance.choice(counts)
            steps = self._chance.randrange(300, 1200) if keeps else self._chance.randrange(60, 300)
            spares = self._chance.choice([0, 0, 1])
            function = counting(str(directory), steps)
            if keeps:
                function = keeping(str(directory), steps, sharded=self._chance.random() < 0.5)
            ref = run_on_pod_ray.remote(
                function, TPU_TYPE, num_slices=slices, spares=spares, keep_warm=5, preload=PRELOAD if keeps else []
            )
            self._running[number] = Running(number, run_on_pod_ray.job_id(ref), directory, steps, ref, slices, keeps)

    def _settle(self, start_more: bool = True) -> None:
        """Check the jobs that have ended, replace what is broken."""
        for number in [n for n, job in self._running.items() if ray.wait([job.ref], timeout=0)[0]]:
            self._check(self._running.pop(number))
        if len(self._faults.sound_slices()) < self._slices:
            self._add_slice()
        if start_more:
            self._fill_up()

    def _add_slice(self) -> None:
        clocks = {f"clock {off:+d} s": clock_off_by(off, self._directory / f"clock{off:+d}") for off in (3600, -3600)}
        of_root = {
            "read-only root": READ_ONLY_ROOT,
            "small disk": SMALL_DISK,
            "user without privileges": NON_ROOT,
            "process table of its own": CONTAINER,
        }
        odd = {**clocks, **(of_root if os.geteuid() == 0 else {})}
        how = self._chance.choice([*odd, *["as usual"] * 3])
        name = self._cluster.add_slice(TPU_TYPE, under=odd.get(how, []))
        if how in odd:
            self.odd_slices[how] += 1
            self._say(f"{name} has a {how}")
        if how == "small disk":
            disks = [self._cluster.host_dir(name, worker) / EXCLUSIVE for worker in self._cluster.worker_ids(name)]
            self._faults.small_disks[name] = disks
            for disk in disks:
                self._mounts.callback(unmount, disk)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._settle()
            time.sleep(0.1)

    def _check(self, job: Running) -> None:
        results = ray.get(job.ref)
        tasks = len(results)
        assert results == [(index, job.steps) for index in range(tasks)], f"job {job.number}: {results}"
        allowed = [2 * n for n in (job.slices if isinstance(job.slices, list) else [job.slices])]
        assert tasks in allowed, f"job {job.number} has {tasks} results"
        lines = job.lines()
        for index in range(max(allowed)):
            # A host that thaws may go on for a moment with an attempt that is over.
            own = sorted((line for line in lines if line["index"] == index), key=lambda line: line["attempt"])
            self.redone += check_steps(job, own, index < tasks)
        status = next((s for s in all_jobs() if s.job_id == job.job_id), None)
        assert status is not None, f"the Controller has forgotten {job.job_id}"
        for text in overlaps(lines, self._faults.disturbances):
            self._find(self.overlaps, f"job {job.number}: {text}")
        attempts = in_memory(lines)
        later = [attempt for attempt in attempts[1:] if attempt.starts]
        self.restores.update(attempt.source for attempt in later)
        if later:
            went_on = (f"{attempt.source} at {len(attempt.done_by)} in attempt {attempt.number}" for attempt in later)
            self._say(f"job {job.number} went on from {', '.join(went_on)}")
        if wrong := [*wrong_numbers(lines), *wrong_restores(attempts, self._arrivals(but=job) if later else [])]:
            self._say("\n".join(map(str, (line for line in lines if not line.keys() & {"step", "kept"}))))
        for text in wrong:
            self._find(self.losses, f"job {job.number}: {text}")
        job.charges["preemptions"] += self._faults.disturbances.attempts(lines, known_attempts(job.job_id))
        for budget, charged in (("failures", status.failures), ("preemptions", status.preemptions)):
            for _ in range(charged - job.charges[budget]):
                text = f"{job.job_id} was charged for {budget} without a known cause: {status.error}"
                self._find(self.false_alarms, text)
        self.jobs_done += 1

    def _arrivals(self, but: Running) -> list[tuple[str, float]]:
        """When tasks of the other jobs began on which slices."""
        paths = [path for path in self._directory.glob("*/lines-*") if path.parent != but.directory]
        return [(line["slice"], line["at"]) for path in paths for line in lines_in(path) if "slice" in line]

    def _find(self, findings: list[str], text: str) -> None:
        findings.append(text)
        self._say(text)

    def _stand(self) -> str:
        return ", ".join(f"job {job.number}: {self._standing(job)}" for job in self._running.values())

    def _standing(self, job: Running) -> str:
        lines = job.lines()
        if not lines:
            return "waits"
        return f"attempt {lines[-1]['attempt']} step {max(line.get('step', 0) for line in lines)}/{job.steps}"

    def _check_nothing_left(self) -> None:
        lines = [line for path in self._directory.glob("*/lines-*") for line in lines_in(path)]
        tasks = [line for line in lines if "pid" in line]
        ours = [one for task in tasks for one in zip((task["pid"], task["child"]), task["born"], strict=True)]

        def left() -> list[str]:
            return [words_of(pid) for pid, born in ours if alive(pid) and birth(pid) == born]

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not left(), 30)
        assert not left(), "these are processes of tasks"

        def reservations() -> list[str]:
            groups = placement_group_table().values()
            ours = [g for g in groups if g["name"].startswith(PLACEMENT_GROUP_PREFIX)]
            return [g["name"] for g in ours if g["state"] != "REMOVED"]

        wait_until(lambda: not reservations(), 30)
        total = sum(n["Resources"].get("TPU", 0.0) for n in ray.nodes() if n["Alive"])
        wait_until(lambda: ray.available_resources().get("TPU", 0.0) == total, 30)


def known_attempts(job_id: str) -> list[KnownAttempt]:
    """A job's attempts, as far as the Controller remembers them."""
    found, monotonic = [], time.monotonic() - time.time()
    for event in the_controller().ask(ControllerInterface.job_events, job_id):
        where = WHERE.match(event.what)
        if where and event.attempt is not None:
            slices, began = where["slices"].split(", "), where["began"] == "runs"
            found.append(KnownAttempt(event.attempt, slices, event.at + monotonic, began))
    return found


def words_of(pid: int) -> str:
    """How `ps` shows a process."""
    return subprocess.run(
        ["ps", "-o", "pid,ppid,stat,etime,args", "-p", str(pid)], capture_output=True, text=True
    ).stdout
