"""The loads of Kueue's own performance tests, replayed on the scheduling core. Needs neither Ray nor Kubernetes.

    python benchmarks/kueue.py                  # all three loads, beside Kueue's figures: make bench-kueue
    python benchmarks/kueue.py baseline tas     # only these
    python benchmarks/kueue.py --part 0.1       # a tenth of the queues
    python benchmarks/kueue.py --crowd          # a plan in which 50,000 jobs of 2,000 teams wait
    python benchmarks/kueue.py --no-teams       # without quotas: the queues are users who share the fleet

`kueue.toml` has the loads and Kueue's figures. A cohort becomes a team that lends and borrows nothing, a ClusterQueue a
part of that team, and the three priorities become the three bands. Without topology a CPU becomes a slice of one chip,
and a workload of 20 CPUs a gang on 20 slices: our scheduler finds hosts for what Kueue only counts. With topology a
quarter of a CPU becomes a GPU, and the pods of a workload become the tasks of a gang that is grouped by rack.

Arrivals, run times and the reports of pools happen in virtual time. The CPU time of our state and planner is real, and
counts as virtual time too, as for a Controller that has one core to itself: what comes meanwhile waits for the next
plan. A workload is admitted at the end of the plan that gives it hosts.

What differs: Kueue's figures contain an API server, which it needs for each step. Ours contain no pools and no Ray, but
the reports about every host of each workload. Kueue may preempt workloads that have run for less than a second; here
each has its least time. "Preferred" workloads are placed like "required" ones, and the parts of "balanced" ones go to
different racks.
"""

import argparse
import gc
import heapq
import itertools
import logging
import math
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp, Scalar
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team, Teams
from iris_ray.model.workers import GPU, TPU, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler.planner import PlacedGang, Planner
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    Event,
    JobSubmittedEvent,
    SliceReleasedEvent,
    TeamsSetEvent,
    TimePassedEvent,
    WorkerRegisteredEvent,
    all_reached,
    attempt_over,
)
from iris_ray.state.instructions import Instructions

LOADS = Path(__file__).with_suffix(".toml")
SLICE = "v5litepod-1"
"""One chip, on a host of its own."""
GPUS_PER_CPU = 4
"""In the load with topology, whose pods ask for quarters of a CPU."""
RACK = "rack"
BANDS = {200: PriorityBand.PRODUCTION, 100: PriorityBand.INTERACTIVE, 50: PriorityBand.BATCH}
"""By Kueue's priorities."""
LOOK_AGAIN_S, MOST_PLACED = 0.5, 200
"""As in the Controller: so often it makes a plan at least, and one places at most so many gangs."""


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """One class of workloads of each queue; see `kueue.toml`.

    Attributes:
        slice: how many pods go into the same rack; 0: all.
    """

    name: str
    count: int
    every_ms: int
    run_ms: int
    priority: int
    request: float
    limit_s: float
    kueues_s: float
    pods: int = 1
    slice: int = 0

    @property
    def cpus(self) -> float:
        """What one of them takes of the quota."""
        return self.pods * self.request

    @property
    def racks(self) -> int:
        """On how many racks one of them runs."""
        return self.pods // (self.slice or self.pods)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Queues with quotas, their workloads, and the nodes; see `kueue.toml`."""

    name: str
    cohorts: int
    queues: int
    quota: float
    borrow: float
    wall_s: float
    kueues_wall_s: float
    usage: float
    workloads: tuple[Workloads, ...]
    racks: int = 0
    nodes: int = 0
    capacity: float = 0.0

    @property
    def count(self) -> int:
        """How many workloads there are."""
        return self.cohorts * self.queues * sum(one.count for one in self.workloads)

    @property
    def cpus(self) -> float:
        """The quotas of all queues together."""
        return self.cohorts * self.queues * self.quota

    def part(self, part: float) -> "Load":
        """Return the same load with a part of the queues, at least one."""
        queues = max(1, round(part * self.cohorts * self.queues))
        cohorts = math.ceil(queues / self.queues)
        return replace(self, cohorts=cohorts, queues=queues // cohorts)

    def queue_names(self) -> Iterator[str]:
        """Yield the names of all queues, each as the path of a team."""
        for cohort, queue in itertools.product(range(self.cohorts), range(self.queues)):
            yield f"cohort-{cohort}/queue-{queue}"


def read_loads() -> dict[str, Load]:
    """Return all loads by name."""
    return {name: _load(name, table) for name, table in tomllib.loads(LOADS.read_text()).items()}


def _load(name: str, table: Mapping[str, Any]) -> Load:
    workloads = tuple(Workloads(name=one, **figures) for one, figures in table["workloads"].items())
    return Load(name=name, **{**table, "workloads": workloads})


# -- the same for us ---------------------------------------------------------------------------------------------------


def teams_of(load: Load) -> Teams:
    """Return the cohorts as teams that lend and borrow nothing, and the queues as their parts."""
    kind, unit = (GPU, GPUS_PER_CPU) if load.racks else (SLICE, 1)
    whole = Quota(load.queues * load.quota * unit, lend=0.0, borrow=0.0)
    part = Quota(load.quota * unit, borrow=load.borrow * unit)
    cohorts = [Team(f"cohort-{number}", {kind: whole}) for number in range(load.cohorts)]
    return Teams([*cohorts, *(Team(name, {kind: part}, users=(_user(name),)) for name in load.queue_names())])


def hosts_of(load: Load) -> Iterator[WorkerRegisteredEvent]:
    """Yield the nodes of a load, or as many slices of one chip as the quotas of all queues together."""
    for rack, node in itertools.product(range(load.racks), range(load.nodes)):
        yield _host(f"node-{rack}-{node}", {RACK: f"rack-{rack}"}, {GPU: load.capacity * GPUS_PER_CPU})
    for number in range(0 if load.racks else round(load.cpus)):
        facts: dict[str, Scalar] = {TPU_NAME: f"slice-{number}", TPU_WORKER_ID: 0, TPU_TOPOLOGY: SLICE, TPU_VM_COUNT: 1}
        yield _host(f"host-{number}", facts, {TPU: 1.0})


def _host(node_id: str, facts: Mapping[str, Scalar], resources: dict[str, float]) -> WorkerRegisteredEvent:
    attributes = {key: AttributeValue(value) for key, value in facts.items()}
    return WorkerRegisteredEvent(node_id, "10.0.0.1", attributes, resources)


def arrivals(load: Load, teams: bool) -> Iterator[tuple[float, Workloads, JobSpec]]:
    """Yield all workloads as jobs, with the seconds of their creation, in order.

    Each class has a generator in each queue. All generators start at once, and wait before each workload.
    """
    streams = (_stream(queue, one) for queue in load.queue_names() for one in load.workloads)
    for at, queue, one, number in heapq.merge(*streams, key=lambda coming: coming[0]):
        yield at, one, _job(load, queue, one, number, teams)


def _stream(queue: str, one: Workloads) -> Iterator[tuple[float, str, Workloads, int]]:
    return ((number * one.every_ms / 1000, queue, one, number) for number in range(1, one.count + 1))


def _job(load: Load, queue: str, one: Workloads, number: int, teams: bool) -> JobSpec:
    job_id = f"{_user(queue)}-{one.name}-{number}"
    about: dict[str, Any] = {
        "job_id": job_id,
        "owner": f"pool of {job_id}",
        "user": _user(queue),
        "team": queue if teams else "",
        "priority": BANDS[one.priority],
        "max_retries_preemption": 100,
    }
    if load.racks:
        return JobSpec(
            replicas=one.pods // one.racks,
            coscheduling=CoschedulingConfig(RACK, one.racks),
            resources={GPU: one.request * GPUS_PER_CPU},
            **about,
        )
    return JobSpec(
        device=SLICE,
        coscheduling=CoschedulingConfig(num_groups=round(one.cpus)),
        whole_groups=True,
        constraints=(Constraint(TPU_TOPOLOGY, ConstraintOp.EQ, AttributeValue(SLICE)),),
        resources={TPU: 1.0},
        **about,
    )


def _user(queue: str) -> str:
    return queue.replace("/", "-")


# -- the replay --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a replay has shown.

    Attributes:
        waits: by class, the seconds from the creation of each workload to its admission.
        cpu_s: the CPU time of state and planner.
        longest_plan_s: the CPU time of the longest turn: events and a plan.
        wall_s: when the last workload ended.
        used: CPU-seconds of quota that workloads used.
        plans: how many plans were made.
        evicted: how many attempts were evicted.
    """

    load: Load
    waits: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_s: float = 0.0
    longest_plan_s: float = 0.0
    wall_s: float = 0.0
    used: float = 0.0
    plans: int = 0
    evicted: int = 0

    @property
    def admitted(self) -> int:
        """How many workloads were admitted."""
        return sum(map(len, self.waits.values()))

    def average_s(self, name: str) -> float:
        """Return the average time to admission of a class."""
        return sum(self.waits[name]) / len(self.waits[name])


class Replay:
    """A load on a Controller's state and planner.

    Args:
        load: the load.
        teams: whether quotas hold.
        cpu_clock: the CPU time of this process, in seconds. One that stands still leaves virtual time only.
    """

    def __init__(self, load: Load, teams: bool = True, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self.result = Result(load)
        self.state = ControllerState()
        self._load = load
        self._teams = teams
        self._cpu_clock = cpu_clock
        self._now = 0.0
        self._due: list[tuple[float, int, list[Event]]] = []  # reports of pools, a heap
        self._reports = itertools.count()
        self._waiting: dict[str, tuple[float, Workloads]] = {}  # by job id, with the time of its creation
        self._planner = Planner(self.state, LOOK_AGAIN_S, most_placed=MOST_PLACED)

    def run(self) -> Result:
        """Replay the whole load."""
        self._begin()
        coming = arrivals(self._load, self._teams)
        following = next(coming, None)
        while following or self._due or self._waiting:
            if not self._planner.unfinished:
                self._now = max(self._now, self._next_at(following[0] if following else math.inf))
            events: list[Event] = [TimePassedEvent(self._now)]
            while following and following[0] <= self._now:
                at, one, spec = following
                self._waiting[spec.job_id] = at, one
                events.append(JobSubmittedEvent(spec, at))
                following = next(coming, None)
            while self._due and self._due[0][0] <= self._now:
                events += heapq.heappop(self._due)[-1]
            for placed in self._turn(events):
                self._start(placed)
            if self._now > 2 * self._load.wall_s:
                waits = next(iter(self._planner.pending_reasons.values()), "nothing waits")
                raise TimeoutError(f"{len(self._waiting)} workloads wait after {self._now:.0f} s; the first: {waits}")
        self.result.wall_s = self._now
        self.result.evicted = self._planner.counts["evicted"]
        return self.result

    def seconds_of_plans(self) -> tuple[float, float, float]:
        """Return the CPU time of a plan from nothing once no more job can run, after one job's end, and after one more.

        The last is that of a plan after the submission of a job that can't run.
        """
        self._begin()
        *some, last = (spec for _, _, spec in arrivals(self._load, self._teams))
        for spec in some:
            self.state.handle_event(JobSubmittedEvent(spec, 0.0))
        self._planner = Planner(self.state, LOOK_AGAIN_S)
        running = self._planner.plan(self._now, Instructions())
        self._planner = Planner(self.state, LOOK_AGAIN_S)
        seconds: list[float] = []
        for number in range(6):
            began = self._cpu_clock()
            started = self._planner.plan(self._now, Instructions())
            seconds.append(self._cpu_clock() - began)
            assert len(started) == (number > 0)
            job, gang = running[number].job, running[number].gang
            attempt, tasks = job.current_attempt(gang), [task.index for task in gang.tasks]
            released = [SliceReleasedEvent(name, job.spec.owner) for name in gang.groups]
            if number < 5:
                for event in (*all_reached(attempt, tasks, TaskState.SUCCEEDED), *attempt_over(attempt, (), released)):
                    self.state.handle_event(event)
        self.state.handle_event(JobSubmittedEvent(last, 0.0))
        began = self._cpu_clock()
        assert not self._planner.plan(self._now, Instructions())
        return seconds[0], statistics.median(seconds[1:]), self._cpu_clock() - began

    def _begin(self) -> None:
        if self._teams:
            self.state.handle_event(TeamsSetEvent(tuple(teams_of(self._load))))
        for host in hosts_of(self._load):
            self.state.handle_event(host)

    def _next_at(self, arrives_at: float) -> float:
        """Return when the next turn begins if nothing is left to do now."""
        next_at = min(arrives_at, self._due[0][0] if self._due else math.inf)
        return min(next_at, self._now + LOOK_AGAIN_S) if self._waiting else next_at

    def _turn(self, events: Iterable[Event]) -> list[PlacedGang]:
        """Handle events and make a plan, as the Controller does in one turn. Time passes meanwhile."""
        began, instructions = self._cpu_clock(), Instructions()
        for event in events:
            instructions.add(self.state.handle_event(event))
        placed = self._planner.plan(self._now, instructions)
        self.state.unrecorded.clear()
        spent = self._cpu_clock() - began
        self._now += spent
        self.result.cpu_s += spent
        self.result.longest_plan_s = max(spent, self.result.longest_plan_s)
        self.result.plans += 1
        for failure in instructions.failed:
            raise failure.error
        for aside in self._planner.left_out.values():
            raise RuntimeError(str(aside))
        return placed

    def _start(self, placed: PlacedGang) -> None:
        """Have a gang run at once, and return after its time."""
        job, gang = placed.job, placed.gang
        at, one = self._waiting.pop(job.spec.job_id)
        run_s = one.run_ms / 1000
        self.result.waits[one.name].append(self._now - at)
        self.result.used += one.cpus * run_s
        attempt, tasks = job.current_attempt(gang), [task.index for task in gang.tasks]
        released = [] if self._load.racks else [SliceReleasedEvent(name, job.spec.owner) for name in gang.groups]
        self._report(self._now, all_reached(attempt, tasks, TaskState.RUNNING))
        self._report(self._now + run_s, all_reached(attempt, tasks, TaskState.SUCCEEDED))
        self._report(self._now + run_s, attempt_over(attempt, (), released))

    def _report(self, when: float, events: Iterable[Event]) -> None:
        heapq.heappush(self._due, (when, next(self._reports), list(events)))


def print_result(result: Result) -> None:
    """Print what a replay has shown, beside Kueue's figures."""
    load, whole = result.load, read_loads()[result.load.name]
    rate, kueues_rate = result.admitted / result.cpu_s, whole.count / whole.kueues_wall_s
    used = result.used / load.cpus / result.wall_s
    print(f"\n{load.name}: {result.admitted:,} workloads in {load.cohorts * load.queues:,} queues.")
    print(
        f"{rate:,.0f} admissions in a second of CPU time are {rate / kueues_rate:.0f} times Kueue's {kueues_rate:.0f}."
    )
    print(f"{result.cpu_s:.1f} s for {result.plans:,} plans, the longest {1000 * result.longest_plan_s:.0f} ms.")
    print(f"All done after {result.wall_s:.0f} s (Kueue {load.kueues_wall_s:.0f} s, its limit {load.wall_s:g} s).")
    print(f"{100 * used:.0f} % of the quota in use (Kueue's limit {load.usage:g} %); {result.evicted} evicted.")
    print("\n| average time to admission, s | here | longest | Kueue | its limit |")
    print("|---|---:|---:|---:|---:|")
    for one in load.workloads:
        average_s, longest_s = result.average_s(one.name), max(result.waits[one.name])
        print(f"| {one.name} | {average_s:.2f} | {longest_s:.1f} | {one.kueues_s:.1f} | {one.limit_s:g} |", flush=True)


def print_crowd(teams: int, jobs: int) -> None:
    """Print what a plan costs in which so many jobs of so many teams wait: from nothing, and after one job's end."""
    small, medium = (
        replace(one, count=jobs // teams // 2, request=1) for one in read_loads()["baseline"].workloads[1:]
    )
    load = replace(read_loads()["baseline"], cohorts=teams // 10, queues=10, quota=1, workloads=(small, medium))
    replay = Replay(load)
    first, ended, submitted = (1000 * seconds for seconds in replay.seconds_of_plans())
    print(f"\n{teams:,} teams, {jobs:,} jobs. CPU time of the first plan in which no job can run: {first:,.0f} ms;")
    print(f"after the end of one that ran {ended:,.0f} ms, after the submission of one more {submitted:,.0f} ms.")


def main() -> None:
    loads = read_loads()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=list(loads), help=f"of {', '.join(loads)} (default: all)")
    parser.add_argument("--part", type=float, default=1.0, help="which part of the queues (default: 1, all)")
    parser.add_argument("--crowd", action="store_true", help="only a plan in which 50,000 jobs of 2,000 teams wait")
    parser.add_argument("--no-teams", action="store_true", help="without quotas")
    options = parser.parse_args()
    gc.disable()
    logging.disable(logging.WARNING)
    if options.crowd:
        print_crowd(2000, 50_000)
        return
    for name in options.loads:
        gc.collect()
        print_result(Replay(loads[name].part(options.part), teams=not options.no_teams).run())


if __name__ == "__main__":
    main()
