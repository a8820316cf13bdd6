"""Jobs that count their steps, and everything that can happen to them, in an order that a seed decides.

    python -m tests.proofs.chaos --minutes 10 --seed 1
    python -m tests.proofs.chaos --minutes 5 --gap 0 --load 4    # no faults, but a busy machine

For so long, three jobs at a time run on four simulated slices, while a fault happens every so often: hosts are killed,
or frozen and thawed, slices preempted with and without notice, task processes killed in three ways, each of our own
actors killed, raylets killed, and each kind of process stopped for a while. Of the slices that replace others, some
have a clock that is an hour off. If root runs it, hosts are also cut off from the network, wholly or in part, and some
slices have a read-only root file system. In the end every job has its results, once; every step was done in order, from
a checkpoint or from where the attempt before was; nobody was charged for more than happened to him; nothing is left: no
process of a task or forked by one, no reservation, no claimed chip.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from iris_ray import release, run_on_pod_ray
from iris_ray.actors.wire.shared_names import PLACEMENT_GROUP_PREFIX
from iris_ray.testing import SimulatedCluster
from tests.support.gangs import actor_pid, alive, birth, controller_pid, pids_of, pool_pid, the_controller
from tests.support.odd_hosts import READ_ONLY_ROOT, clock_off_by
from tests.support.waiting import wait_until

TPU_TYPE, SLICES, JOBS = "v4-16", 4, 3
STEP_S, CHECKPOINT_EVERY = 0.05, 20
UNNOTICED_S = 10.0
"""How long a slice may pass for sound after one of its hosts was lost: Ray's health check takes up to five seconds."""
CUT_OFF_RUNS_S = 75.0
"""How long the tasks of a host that is cut off, or frozen, may go on after its attempt is over."""
PATIENCE_S = 240.0
"""How long the jobs of the end may take."""


def counting(directory: str, steps: int) -> Callable[[], tuple[int, int]]:
    """A function whose every task goes from its gang's checkpoint to the last step, and leaves a line for each."""

    def count() -> tuple[int, int]:
        import iris_ray

        me = iris_ray.get_job_info()
        assert me is not None
        checkpoint = Path(directory) / "checkpoint"
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
        if not (child := os.fork()):  # like a data loader's
            time.sleep(3600)
        who = {"attempt": me.attempt, "index": me.task_index}
        with (Path(directory) / f"lines-{me.task_index}").open("a") as lines:

            def line(**more: Any) -> None:
                lines.write(json.dumps({**who, "at": time.monotonic(), **more}) + "\n")
                lines.flush()

            def save(step: int) -> None:
                if me.task_index == 0:
                    unfinished = checkpoint.with_name(f"unfinished-{me.attempt}")
                    unfinished.write_text(str(step))
                    unfinished.replace(checkpoint)

            place = {"job": me.job_id, "slice": me.slice_name, "worker": me.worker_id}
            line(start=start, pid=os.getpid(), child=child, born=[birth(os.getpid()), birth(child)], **place)
            for step in range(start, steps):
                time.sleep(STEP_S)
                line(step=step)
                if (step + 1) % CHECKPOINT_EVERY == 0:
                    save(step + 1)
                if notice := iris_ray.preemption_notice():
                    save(step + 1)
                    line(saved=step + 1)
                    notice.saved()
        return me.task_index, steps

    return count


@dataclass
class Running:
    """One job of the crowd.

    Attributes:
        charges: what happened to it so far that may cost it an attempt, by budget.
    """

    number: int
    directory: Path
    steps: int
    ref: Any
    slices: int | list[int]
    charges: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[dict[str, Any]]:
        """What its tasks have written, by task and in order."""
        found = []
        for path in sorted(self.directory.glob("lines-*")):
            text = path.read_text()
            found += [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return found

    def latest(self) -> list[dict[str, Any]]:
        """The first lines of its newest attempt's tasks."""
        starts = [line for line in self.lines() if "start" in line]
        newest = max((line["attempt"] for line in starts), default=0)
        return [line for line in starts if line["attempt"] == newest]


class Chaos:
    """One run.

    Args:
        seed: decides what happens; when exactly, the machine has its say, too.
        directory: where the jobs leave their traces.
        say: takes a line about what is going on.
    """

    def __init__(self, seed: int, directory: Path, say: Callable[[str], None] = print) -> None:
        self.faults: Counter[str] = Counter()
        self.false_alarms: list[str] = []
        self.overlaps: list[str] = []
        self.redone = 0
        self.jobs_done = 0
        self._say = say
        self._chance = random.Random(seed)
        self._directory = directory
        self._running: dict[int, Running] = {}
        self._started = 0
        self._passing: list[tuple[threading.Timer, Callable[[], None]]] = []  # what ends faults
        self._leaving: set[str] = set()
        self._shaky: list[tuple[str, float, float]] = []  # from when to when a slice may pass for sound
        self._cluster: SimulatedCluster

    def run(self, seconds: float, mean_gap_s: float) -> None:
        """Raises AssertionError if anything is not as it should be.

        Args:
            seconds: how long faults happen.
            mean_gap_s: between two of them; 0 for none at all.
        """
        with SimulatedCluster({TPU_TYPE: SLICES}, quiet=True, networks=os.geteuid() == 0) as self._cluster:
            end = time.monotonic() + seconds
            self._fill_up()
            while time.monotonic() < end:
                if not mean_gap_s:
                    self._wait(end - time.monotonic())
                    break
                self._wait(min(self._chance.expovariate(1 / mean_gap_s), 3 * mean_gap_s))
                self._fault()
            self._say("no more faults; the jobs go on to their ends")
            self._end_what_passes()
            deadline = time.monotonic() + PATIENCE_S
            while self._running:
                assert time.monotonic() < deadline, f"after {PATIENCE_S:g} s these still run: {self._stand()}"
                self._settle(start_more=False)
                time.sleep(0.2)
            release()
            self._check_nothing_left()

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _fill_up(self) -> None:
        while len(self._running) < JOBS:
            number, self._started = self._started, self._started + 1
            directory = self._directory / str(number)
            directory.mkdir()
            counts: list[int | list[int]] = [1, 1, 2, [1, 2]]
            slices = self._chance.choice(counts)
            steps = self._chance.randrange(60, 300)
            spares = self._chance.choice([0, 0, 1])
            ref = run_on_pod_ray.remote(
                counting(str(directory), steps), TPU_TYPE, num_slices=slices, spares=spares, keep_warm=5
            )
            self._running[number] = Running(number, directory, steps, ref, slices)

    def _settle(self, start_more: bool = True) -> None:
        """Check the jobs that have ended, replace what is broken."""
        for number in [n for n, job in self._running.items() if ray.wait([job.ref], timeout=0)[0]]:
            self._check(self._running.pop(number))
        if len(self._sound_slices()) < SLICES:
            self._add_slice()
        if start_more:
            self._fill_up()

    def _add_slice(self) -> None:
        clocks = {f"clock {off:+d} s": clock_off_by(off, self._directory / f"clock{off:+d}") for off in (3600, -3600)}
        odd = {**clocks, **({"read-only root": READ_ONLY_ROOT} if os.geteuid() == 0 else {})}
        how = self._chance.choice([*odd, *["as usual"] * 3])
        name = self._cluster.add_slice(TPU_TYPE, under=odd.get(how, []))
        if how in odd:
            self.faults[how] += 1
            self._say(f"{name} has a {how}")

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
            self._check_steps(job, own, index < tasks)
        job_id = lines[0]["job"]
        status = next((s for s in the_controller().list_jobs() if s.job_id == job_id), None)
        assert status is not None, f"the Controller has forgotten {job_id}"
        self.overlaps += [f"job {job.number}: {text}" for text in self._overlaps(lines)]
        job.charges["preemptions"] += self._starts_on_shaky_slices(lines)
        for budget, charged in (("failures", status.failures), ("preemptions", status.preemptions)):
            for _ in range(charged - job.charges[budget]):
                self.false_alarms.append(f"{job_id} was charged for {budget} that nobody caused: {status.error}")
        self.jobs_done += 1

    def _starts_on_shaky_slices(self, lines: list[dict[str, Any]]) -> int:
        """How many attempts began on a slice of which a host could not answer just then."""
        starts = [line for line in lines if "start" in line]
        return len({start["attempt"] for start in starts for shaky in self._shaky if began_on(start, *shaky)})

    def _overlaps(self, lines: list[dict[str, Any]]) -> Iterator[str]:
        """Tasks that went on when the next attempt had begun, on slices where nothing happened that explains it."""
        began: dict[int, float] = {}
        for line in lines:
            if "start" in line:
                began[line["attempt"]] = min(line["at"], began.get(line["attempt"], line["at"]))
        for start in (line for line in lines if "start" in line):
            attempt, index = start["attempt"], start["index"]
            next_began = min((at for other, at in began.items() if other > attempt), default=math.inf)
            last = max(line["at"] for line in lines if (line["attempt"], line["index"]) == (attempt, index))
            if last > next_began and not self._was_disturbed(start["slice"], next_began):
                over = last - next_began
                yield f"task {index} of attempt {attempt} on {start['slice']} went on for {over:.1f} s beside the next"

    def _was_disturbed(self, slice_name: str, at: float) -> bool:
        """Whether a host of the slice could not be told to stop: its network or one of our processes was cut off."""
        return any(name == slice_name and begin < at < end + CUT_OFF_RUNS_S for name, begin, end in self._shaky)

    def _check_steps(self, job: Running, lines: list[dict[str, Any]], took_part_in_the_end: bool) -> None:
        """One task's lines: each attempt goes on without a gap from a checkpoint, and the last one gets to the end.

        The checkpoint may be of any attempt before: on a host that is cut off, one that is over runs for up to a minute
        more, and saves.
        """
        upcoming, last, furthest = 0, -1, -1
        for line in lines:
            who = f"job {job.number} task {line['index']} attempt {line['attempt']}"
            if "start" in line:
                saved = line["start"]
                # The checkpoint is task 0's; others may have been behind it.
                assert line["index"] or saved <= furthest + 1, f"{who} starts at {saved} after {furthest}"
                self.redone += max(0, last + 1 - saved)
                upcoming = saved
            elif "step" in line:
                assert line["step"] == upcoming, f"{who}: step {line['step']} after {upcoming - 1}"
                last, upcoming = line["step"], upcoming + 1
                furthest = max(furthest, last)
        if took_part_in_the_end:  # with nothing to do, perhaps: task 0 may have written its last checkpoint before
            assert upcoming == job.steps, f"job {job.number}: its last step is {upcoming - 1} of {job.steps}"

    # -- faults ----------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        kinds: list[tuple[Callable[[], str | None], int]] = [
            (self._kill_host, 3),
            (self._kill_raylet, 2),
            (self._freeze_host, 2),
            (self._preempt, 2),
            (self._preempt_with_notice, 3),
            (self._kill_task, 4),
            (self._kill_slice_actor, 1),
            (self._kill_host_actor, 1),
            (self._kill_pool, 1),
            (self._kill_controller, 2),
            (self._stop_process, 5),
            *([(self._cut_off, 4)] if os.geteuid() == 0 else []),
        ]
        fault = self._chance.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        with contextlib.suppress(ProcessLookupError, ValueError, IndexError):  # gone by itself meanwhile
            if done := fault():
                self.faults[fault.__name__.strip("_")] += 1
                self._say(f"{done}   [{self._stand()}]")

    def _kill_host(self) -> str:
        name, worker = self._some_host()
        self._charge("preemptions", name)
        self._shaky_for(UNNOTICED_S, name)
        self._cluster.kill_host(name, worker)
        return f"killed host {worker} of {name}"

    def _kill_raylet(self) -> str:
        name, worker = self._some_host()
        self._charge("preemptions", name)
        self._shaky_for(UNNOTICED_S, name)
        self._leaving.add(name)  # some of its processes live on for a while
        self._cluster.kill_raylet(name, worker)
        return f"killed the raylet of {name} host {worker}"

    def _freeze_host(self) -> str:
        name, worker = self._some_host()
        self._charge("preemptions", name)
        self._cluster.freeze_host(name, worker)
        seconds = self._chance.uniform(1.0, 12.0)
        self._shaky_for(seconds, name)
        self._ends_in(seconds, partial(self._cluster.thaw_host, name, worker))
        return f"froze host {worker} of {name} for {seconds:.0f} s"

    def _cut_off(self) -> str:
        name, worker = self._some_host()
        whom = self._chance.choice([{}, {"from_head": False}, {"from_hosts": False}])
        direction = self._chance.choice(["both", "in", "out"])
        self._charge("preemptions", name)
        self._cluster.cut_off(name, worker, **whom, direction=direction)
        seconds = self._chance.uniform(1.0, 20.0)
        self._shaky_for(seconds, name)
        self._ends_in(seconds, partial(self._cluster.reconnect, name, worker))
        return f"cut host {worker} of {name} off {whom or 'from all'} ({direction}) for {seconds:.0f} s"

    def _stop_process(self) -> str:
        """A Controller that stops costs nobody anything, nor a task; a pool, all its jobs; else the job there pays."""
        name, worker = self._some_host()
        kind = self._chance.choice(
            ["Controller", "SlicePoolManager", "SliceActor", "TPUHostActor", "TaskProcess", "host.reaper", "raylet"]
        )
        disturbed = [name]
        if kind == "Controller":
            pid = controller_pid()
        elif kind == "SlicePoolManager":
            pid = pool_pid()
            self._charge_all("preemptions")
            disturbed = self._sound_slices()
        elif kind == "raylet":
            pid = self._cluster.host_pids(name, worker)[0]
            self._charge("preemptions", name)
        elif kind in ("TaskProcess", "host.reaper"):  # one of several perhaps: standbys, and reapers of earlier actors
            pid = self._chance.choice(pids_of(self._cluster, name, worker, kind))
        else:
            worker = 0 if kind == "SliceActor" else worker
            pid = actor_pid(self._cluster, name, worker, kind)
            self._charge("preemptions", name)
        os.kill(pid, signal.SIGSTOP)
        seconds = self._chance.uniform(1.0, 12.0)
        for one in disturbed:
            self._shaky_for(seconds, one)
        self._ends_in(seconds, partial(os.kill, pid, signal.SIGCONT))
        return f"stopped {kind} ({name} host {worker}) for {seconds:.0f} s"

    def _preempt(self) -> str:
        name = self._some_slice()
        self._charge("preemptions", name)
        self._shaky_for(UNNOTICED_S, name)
        self._cluster.preempt_slice(name)
        return f"took {name}"

    def _preempt_with_notice(self) -> str:
        name = self._some_slice()
        self._charge("preemptions", name)
        self._leaving.add(name)
        seconds = self._chance.uniform(3.0, 12.0)
        self._shaky_for(seconds, name)
        self._cluster.preempt_slice(name, notice_s=seconds)
        return f"announced that {name} goes in {seconds:.0f} s"

    def _kill_task(self) -> str | None:
        starts = [(job, start) for job in self._running.values() for start in job.latest() if runs(start)]
        if not starts:
            return None
        job, start = self._chance.choice(starts)
        number = self._chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
        job.charges["failures"] += 1
        os.kill(start["pid"], number)
        return f"{number.name} to task {start['index']} of job {job.number}"

    def _kill_slice_actor(self) -> str:
        name = self._some_slice()
        return self._kill_actor(name, 0, "SliceActor")

    def _kill_host_actor(self) -> str:
        name, worker = self._some_host()
        return self._kill_actor(name, worker, "TPUHostActor")

    def _kill_actor(self, name: str, worker: int, kind: str) -> str:
        pid = actor_pid(self._cluster, name, worker, kind)
        self._charge("preemptions", name)
        os.kill(pid, signal.SIGKILL)
        return f"killed {kind} of {name} host {worker}"

    def _kill_pool(self) -> str:
        self._charge_all("preemptions")
        os.kill(pool_pid(), signal.SIGKILL)
        return "killed the SlicePoolManager"

    def _kill_controller(self) -> str:
        os.kill(controller_pid(), signal.SIGKILL)
        return "killed the Controller"

    def _ends_in(self, seconds: float, end: Callable[[], None]) -> None:
        """Have a fault end by itself, whatever this thread waits for meanwhile."""
        timer = threading.Timer(seconds, self._end, (end,))
        timer.daemon = True
        timer.start()
        self._passing.append((timer, end))

    def _shaky_for(self, seconds: float, name: str) -> None:
        """Excuse attempts that begin on a slice from now on: the Controller can't know at once what happened to it."""
        now = time.monotonic()
        self._shaky.append((name, now, now + seconds))

    def _end(self, end: Callable[[], None]) -> None:
        """A host that Ray has given up meanwhile ends when it goes on; its slice is broken, and goes."""
        with contextlib.suppress(ProcessLookupError, ValueError):
            end()

    def _end_what_passes(self) -> None:
        for timer, end in self._passing:
            timer.cancel()
            timer.join()
            self._end(end)

    def _charge_all(self, budget: str) -> None:
        for job in self._running.values():
            job.charges[budget] += 1

    def _charge(self, budget: str, slice_name: str) -> None:
        """Whoever runs on the slice, or is being started there, may lose an attempt by what comes now."""
        for status in the_controller().list_jobs():
            if slice_name in status.groups:
                for job in self._running.values():
                    if (lines := job.lines()) and status.job_id == lines[0]["job"]:
                        job.charges[budget] += 1

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _sound_slices(self) -> list[str]:
        """Those with all their hosts, frozen ones apart; those that are announced to go are going."""
        names = [name for name in self._cluster.slice_names if len(self._cluster.worker_ids(name)) == 2]
        return [name for name in names if name not in self._leaving and name in self._living()]

    def _living(self) -> set[str]:
        """Slices of which Ray has given up no host."""
        living: Counter[str] = Counter()
        for node in ray.nodes():
            if node["Alive"] and (name := node["Labels"].get("ray.io/tpu-slice-name")):
                living[name] += 1
        return {name for name, count in living.items() if count == 2}

    def _some_slice(self) -> str:
        return self._chance.choice(self._sound_slices())

    def _some_host(self) -> tuple[str, int]:
        return self._some_slice(), self._chance.randrange(2)

    def _stand(self) -> str:
        return ", ".join(f"job {job.number}: {self._standing(job)}" for job in self._running.values())

    def _standing(self, job: Running) -> str:
        lines = job.lines()
        if not lines:
            return "waits"
        return f"attempt {lines[-1]['attempt']} step {max(line.get('step', 0) for line in lines)}/{job.steps}"

    def _check_nothing_left(self) -> None:
        starts = [start for path in self._directory.glob("*/lines-*") for start in starts_in(path)]
        ours = [one for start in starts for one in zip((start["pid"], start["child"]), start["born"], strict=True)]

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


def began_on(start: dict[str, Any], slice_name: str, begin: float, end: float) -> bool:
    return bool(start["slice"] == slice_name and begin < start["at"] < end)


def runs(start: dict[str, Any]) -> bool:
    return alive(start["pid"]) and birth(start["pid"]) == start["born"][0]


def words_of(pid: int) -> str:
    """How `ps` shows a process."""
    return subprocess.run(
        ["ps", "-o", "pid,ppid,stat,etime,args", "-p", str(pid)], capture_output=True, text=True
    ).stdout


def starts_in(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in found if "start" in line]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="which faults")
    parser.add_argument("--gap", type=float, default=12.0, help="seconds between two faults, on average; 0: no faults")
    parser.add_argument("--load", type=int, default=0, help="processes that compete for the machine's CPUs")
    given = parser.parse_args(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[chaos {time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        chaos = Chaos(given.seed, Path(directory), say)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.load)]
        try:
            chaos.run(given.minutes * 60, given.gap)
        except BaseException:
            again = f"--seed {given.seed} --minutes {given.minutes:g} --gap {given.gap:g} --load {given.load}"
            print(f"failed with {again}", flush=True)
            raise
        finally:
            for process in busy:
                process.kill()
                process.wait()
    print(f"seed {given.seed}: {chaos.jobs_done} jobs, {chaos.faults.total()} faults: {dict(chaos.faults)}")
    print(f"{chaos.redone} steps of tasks were done again; {len(chaos.false_alarms)} false alarms")
    print(f"{len(chaos.overlaps)} tasks went on beside the next attempt, on hosts that nothing kept from hearing of it")
    for finding in chaos.false_alarms + chaos.overlaps:
        print(f"  {finding}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
