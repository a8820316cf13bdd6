"""What happens to the jobs of a chaos run, the hosts that they are on, and our own processes."""

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError

from iris_ray.actors.host import reaper
from iris_ray.testing import SimulatedCluster
from iris_ray.testing.network import Direction
from tests.proofs.chaos.checks import Disturbances
from tests.proofs.chaos.jobs import Running, runs
from tests.support.clusters import TASK, ZYGOTE
from tests.support.gangs import actor_pid, all_jobs, controller_pid, pool_pid
from tests.support.odd_hosts import fill

REAPER = reaper.__name__
"""In the command line of every reaper."""
UNNOTICED_S = 10.0
"""How long a slice may pass for sound after one of its hosts was lost: Ray's health check takes up to five seconds."""


class Faults:
    """Makes them happen, and counts them.

    Args:
        cluster: where. Its slices have two hosts each.
        chance: decides which, and to whom.
        running: the jobs, by number.

    Attributes:
        counts: what happened how often.
        disturbances: which slices were disturbed, and when.
        small_disks: of slices whose hosts have them: where they are mounted.
    """

    def __init__(self, cluster: SimulatedCluster, chance: random.Random, running: Mapping[int, Running]) -> None:
        self.counts: Counter[str] = Counter()
        self.disturbances = Disturbances()
        self.small_disks: dict[str, list[Path]] = {}
        self._cluster = cluster
        self._chance = chance
        self._running = running
        self._passing: list[tuple[threading.Timer, Callable[[], None]]] = []  # what ends faults
        self._leaving: set[str] = set()

    def happen(self) -> str | None:
        """Have one happen. Returns what, or None if there was nothing for it to happen to."""
        kinds: list[tuple[Callable[[], str | None], int]] = [
            (self._kill_host, 3),
            (self._kill_raylet, 2),
            (self._freeze_host, 2),
            (self._preempt, 2),
            (self._preempt_with_notice, 3),
            (self._kill_task, 4),
            (self._kill_host_actor, 1),
            (self._kill_pool, 1),
            (self._kill_controller, 2),
            (self._stop_process, 5),
            *([(self._cut_off, 4), (self._slow_network, 2), (self._fill_disk, 3)] if os.geteuid() == 0 else []),
        ]
        fault = self._chance.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        with contextlib.suppress(ProcessLookupError, ValueError, IndexError, RayError):  # gone by itself meanwhile
            if done := fault():
                self.counts[fault.__name__.strip("_")] += 1
                return done
        return None

    def _kill_host(self) -> str:
        name, worker = self._some_host()
        with self._charged(name):
            self.disturbances.add(name, UNNOTICED_S)
            self._cluster.kill_host(name, worker)
        return f"killed host {worker} of {name}"

    def _kill_raylet(self) -> str:
        name, worker = self._some_host()
        with self._charged(name):
            self.disturbances.add(name, UNNOTICED_S)
            self._leaving.add(name)  # some of its processes live on for a while
            self._cluster.kill_raylet(name, worker)
        return f"killed the raylet of {name} host {worker}"

    def _freeze_host(self) -> str:
        name, worker = self._some_host()
        with self._charged(name):
            self._cluster.freeze_host(name, worker)
        seconds = self._chance.uniform(1.0, 12.0)
        self.disturbances.add(name, seconds)
        self._ends_in(seconds, partial(self._cluster.thaw_host, name, worker))
        return f"froze host {worker} of {name} for {seconds:.0f} s"

    def _cut_off(self) -> str:
        name, worker = self._some_host()
        whom = self._chance.choice([{}, {"from_head": False}, {"from_hosts": False}])
        direction: Direction = self._chance.choice(["both", "in", "out"])
        with self._charged(name):
            self._cluster.cut_off(name, worker, **whom, direction=direction)
        seconds = self._chance.uniform(1.0, 20.0)
        self.disturbances.add(name, seconds)
        self._ends_in(seconds, partial(self._cluster.reconnect, name, worker))
        return f"cut host {worker} of {name} off {whom or 'from all'} ({direction}) for {seconds:.0f} s"

    def _slow_network(self) -> str:
        """Limit what a host sends. Its answers to health checks are small and get through, so no job is charged."""
        name, worker = self._some_host()
        kilobits = self._chance.choice([250, 1000, 4000])
        self._cluster.slow_down(name, worker, kilobits * 1000)
        seconds = self._chance.uniform(1.0, 20.0)
        self._ends_in(seconds, partial(self._cluster.slow_down, name, worker, None))
        return f"host {worker} of {name} may send {kilobits} kbit/s for {seconds:.0f} s"

    def _fill_disk(self) -> str:
        """Fill a host's disk. Running tasks go on without it; one that can't start moves, and no job is charged."""
        name = self._chance.choice([name for name in self.sound_slices() if name in self.small_disks])
        ballast = fill(self._chance.choice(self.small_disks[name]))
        seconds = self._chance.uniform(1.0, 20.0)
        self._ends_in(seconds, partial(ballast.unlink, missing_ok=True))
        return f"filled {ballast.parent} of {name} for {seconds:.0f} s"

    def _stop_process(self) -> str:
        """A Controller that stops costs nobody anything, nor a task; a pool, all its jobs; else the job there pays."""
        name, worker = self._some_host()
        kind = self._chance.choice(["Controller", "SlicePoolManager", "TPUHostActor", ZYGOTE, TASK, REAPER, "raylet"])
        disturbed, victim = [name], ""  # nobody pays if it is the Controller, which could not be asked then
        if kind == "Controller":
            pid = controller_pid()
        elif kind == "SlicePoolManager":
            pid = pool_pid()
            self._charge_all("preemptions")
            disturbed = self.sound_slices()
        elif kind == "raylet":
            pid = self._cluster.host_pids(name, worker)[0]
            victim = name
        elif kind in (ZYGOTE, TASK, REAPER):  # one of several perhaps, of earlier actors
            pid = self._chance.choice(self._cluster.host_pids(name, worker, kind))
        else:
            pid = actor_pid(self._cluster, name, worker, kind)
            victim = name
        with (
            self._charged(victim) if victim else contextlib.nullcontext()
        ):  # a Controller that is stopped does not answer
            os.kill(pid, signal.SIGSTOP)
        seconds = self._chance.uniform(1.0, 12.0)
        for one in disturbed:
            self.disturbances.add(one, seconds)
        self._ends_in(seconds, partial(os.kill, pid, signal.SIGCONT))
        return f"stopped {kind} ({name} host {worker}) for {seconds:.0f} s"

    def _preempt(self) -> str:
        name = self._some_slice()
        with self._charged(name):
            self.disturbances.add(name, UNNOTICED_S)
            self._cluster.preempt_slice(name)
        return f"took {name}"

    def _preempt_with_notice(self) -> str:
        name = self._some_slice()
        seconds = self._chance.uniform(3.0, 12.0)
        with self._charged(name):
            self._leaving.add(name)
            self.disturbances.add(name, seconds)
            self._cluster.preempt_slice(name, notice_s=seconds)
        return f"announced that {name} goes in {seconds:.0f} s"

    def _kill_task(self) -> str | None:
        tasks = [(job, task) for job in self._running.values() for task in job.latest() if runs(task)]
        if not tasks:
            return None
        job, task = self._chance.choice(tasks)
        number = self._chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
        job.charges["failures"] += 1
        os.kill(task["pid"], number)
        return f"{number.name} to task {task['index']} of job {job.number}"

    def _kill_host_actor(self) -> str:
        name, worker = self._some_host()
        return self._kill_actor(name, worker, "TPUHostActor")

    def _kill_actor(self, name: str, worker: int, kind: str) -> str:
        pid = actor_pid(self._cluster, name, worker, kind)
        with self._charged(name):
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

    def _end(self, end: Callable[[], None]) -> None:
        """A host that Ray has given up meanwhile ends when it goes on; its slice is broken, and goes."""
        with contextlib.suppress(ProcessLookupError, ValueError):
            end()

    def end_what_passes(self) -> None:
        for timer, end in self._passing:
            timer.cancel()
            timer.join()
            self._end(end)

    def _charge_all(self, budget: str) -> None:
        for job in self._running.values():
            job.charges[budget] += 1

    @contextlib.contextmanager
    def _charged(self, slice_name: str) -> Iterator[None]:
        """What happens to the slice may cost an attempt of whoever is there just before, or just after."""
        victims = self._jobs_on(slice_name)
        try:
            yield
        finally:
            victims |= self._jobs_on(slice_name)
            for job in self._running.values():
                job.charges["preemptions"] += job.job_id in victims

    def _jobs_on(self, slice_name: str) -> set[str]:
        """Jobs that run on the slice, or are being started there."""
        return {status.job_id for status in all_jobs() if slice_name in status.groups}

    def sound_slices(self) -> list[str]:
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
        return self._chance.choice(self.sound_slices())

    def _some_host(self) -> tuple[str, int]:
        return self._some_slice(), self._chance.randrange(2)
