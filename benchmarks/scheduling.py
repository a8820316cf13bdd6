"""What the scheduling core costs: one cycle, one event, memory, and how they grow. Needs neither Ray nor TPUs.

    python benchmarks/scheduling.py            # the table; about a minute
    python benchmarks/scheduling.py --quick    # the cycles at 10,000 hosts and the event; seconds
    python benchmarks/scheduling.py --plot     # the table, and docs/scheduling-cost.png; pip install -e '.[bench]'

A cycle is measured in three states of the indexes:

- steady: as in a running Controller. Before each cycle 16 tasks come and go on the hosts of one slice, so the figure
  includes catching up with a change.
- new requirement: no job has had the jobs' requirement before, so every group is evaluated.
- from nothing: the hosts are registered, and a new scheduler makes its first plan, as after the Controller's start.

All figures are medians of CPU time with the garbage collector off. The hosts come in slices of 16 and have nine
attributes each, one of them unique; the jobs have two EQ constraints.
"""

import argparse
import gc
import multiprocessing
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import psutil

from iris_ray.actors.controller.log_memory import LogMemory
from iris_ray.actors.wire.task_log import LastLines
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp, Scalar
from iris_ray.model.ids import AttemptId
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler import Scheduler, SchedulingResult
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    TaskAssignedEvent,
    TaskStateChangedEvent,
    WorkerRegisteredEvent,
)
from iris_ray.state.fleet import Fleet

PICTURE = Path(__file__).parents[1] / "docs" / "scheduling-cost.png"
TPU_TYPE, SLICE = "v4-128", 16
HOST = {"TPU": 4.0, "CPU": 120.0}
SHARED: dict[str, Scalar] = {
    TPU_TOPOLOGY: TPU_TYPE,
    TPU_VM_COUNT: SLICE,
    "region": "us",
    "zone": "us-a",
    "pool": "large",
    "generation": 4,
}
"""Attributes that all hosts share. With a host's slice, its number there and its address there are nine."""
NOW = 1.0

Constraints = tuple[Constraint, ...]


def kinds() -> Iterator[Constraints]:
    """All pairs of shared attributes, as two EQ constraints that every host satisfies."""
    for pair in combinations(SHARED, 2):
        yield tuple(Constraint(key, ConstraintOp.EQ, AttributeValue(SHARED[key])) for key in pair)


USUAL = next(kinds())


# -- worlds ------------------------------------------------------------------------------------------------------------


def host(number: int) -> WorkerRegisteredEvent:
    place: dict[str, Scalar] = {
        TPU_NAME: f"slice-{number // SLICE}",
        TPU_WORKER_ID: number % SLICE,
        "address": f"host-{number}",
    }
    attributes = {key: AttributeValue(value) for key, value in {**place, **SHARED}.items()}
    return WorkerRegisteredEvent(f"w{number}", "10.0.0.1", attributes, dict(HOST))


def bare(hosts: int) -> ControllerState:
    state = ControllerState()
    for number in range(hosts):
        state.handle_event(host(number))
    return state


def full(hosts: int) -> ControllerState:
    """A gang on every slice."""
    state = bare(hosts)
    for number in range(hosts // SLICE):
        start_gang(state, f"full-{number}", number)
    return state


def one_busy(hosts: int) -> ControllerState:
    """A task that uses chips on one host of every slice."""
    state = bare(hosts)
    for number in range(hosts // SLICE):
        job = JobSpec(job_id=f"busy-{number}", owner="busy", resources={"TPU": 4.0})
        state.handle_event(JobSubmittedEvent(job, 0.0))
        state.handle_event(TaskAssignedEvent(job.job_id, 0, f"w{number * SLICE + 3}"))
    return state


def gang(number: int, name: str, constraints: Constraints = USUAL) -> JobSpec:
    return JobSpec(
        job_id=name,
        owner=f"owner-{number}",
        user=f"user-{number % 7}",
        device=TPU_TYPE,
        replicas=SLICE,
        coscheduling=CoschedulingConfig(),
        constraints=constraints,
        resources={"TPU": 4.0, "CPU": 1.0},
    )


def gang_with_ge(number: int, name: str, constraints: Constraints = USUAL) -> JobSpec:
    return gang(number, name, (*constraints, Constraint("generation", ConstraintOp.GE, AttributeValue(3))))


def cpu_job(number: int, name: str, constraints: Constraints = USUAL) -> JobSpec:
    return JobSpec(
        job_id=name,
        owner=f"owner-{number}",
        user=f"user-{number % 7}",
        constraints=constraints,
        resources={"CPU": 1.0},
    )


def start_gang(state: ControllerState, name: str, slice_number: int) -> None:
    state.handle_event(JobSubmittedEvent(gang(0, name), 0.0))
    hosts = tuple(f"w{slice_number * SLICE + i}" for i in range(SLICE))
    state.handle_event(GangAssignedEvent(name, (f"slice-{slice_number}",), (hosts,)))


def submit(state: ControllerState, specs: list[JobSpec]) -> None:
    for spec in specs:
        state.handle_event(JobSubmittedEvent(spec, 0.0))


def withdraw(state: ControllerState, specs: list[JobSpec]) -> None:
    for spec in specs:
        state.handle_event(JobCancelledEvent(spec.job_id, "measured"))


def stir(state: ControllerState, number: int) -> None:
    """Sixteen tasks come and go on the hosts of one slice."""
    job = JobSpec(job_id=f"stir-{number}", owner="stir", replicas=SLICE, resources={"CPU": 1.0})
    first = number * 37 % (len(state.workers) // SLICE) * SLICE
    state.handle_event(JobSubmittedEvent(job, 0.0))
    for i in range(SLICE):
        state.handle_event(TaskAssignedEvent(job.job_id, i, f"w{first + i}"))
    for i in range(SLICE):
        state.handle_event(TaskStateChangedEvent(AttemptId(job.job_id, 1, i), i, TaskState.SUCCEEDED))
        state.handle_event(AttemptEndConfirmedEvent(AttemptId(job.job_id, 1, i)))


# -- one cycle ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    name: str
    hosts: int
    jobs: int
    assigned: int
    world: Callable[[int], ControllerState] = bare
    job: Callable[..., JobSpec] = gang
    reference: tuple[float, float] | None = None  # s


# The reference is the newest marin-iris wheel on Python 3.12: CPU time of its scheduler alone, with the building of its
# context, on the same kind of machine; the minimum and the maximum of several runs.
SCENARIOS = (
    Scenario("10,000 hosts, 100 gangs that all fit", 10_000, 100, 100, reference=(1.0, 1.3)),
    Scenario("the same on a full fleet", 10_000, 100, 0, world=full, reference=(2.9, 2.9)),
    Scenario("one host per slice busy", 10_000, 100, 0, world=one_busy, reference=(2.0, 2.4)),
    Scenario("625 gangs (10,000 tasks)", 10_000, 625, 625, reference=(14.0, 14.0)),
    Scenario("1,000 one-task CPU jobs", 10_000, 1000, 1000, job=cpu_job, reference=(3.2, 4.7)),
    Scenario("100 gangs with a GE constraint", 10_000, 100, 100, job=gang_with_ge, reference=(3.0, 3.0)),
    Scenario("100,000 hosts, 1,000 gangs", 100_000, 1000, 1000),
)


def cpu_s(action: Callable[[], object]) -> float:
    start = time.process_time()
    kept = action()  # so that its result is freed after the measurement
    spent = time.process_time() - start
    del kept
    return spent


running = Scheduler()


def cycle(state: ControllerState, fleet: Fleet | None = None, scheduler: Scheduler = running) -> SchedulingResult:
    return scheduler.find_assignments(state.pending(), fleet or state.fleet, state.usage, NOW)


def steady_s(state: ControllerState, rounds: int) -> float:
    cycle(state)
    samples = []
    for number in range(rounds):
        stir(state, number)
        samples.append(cpu_s(lambda: cycle(state)))
    return statistics.median(samples)


def new_requirement_s(state: ControllerState, job: Callable[..., JobSpec], jobs: int, rounds: int) -> float:
    """Replaces the pending jobs by others."""
    withdraw(state, [pending.spec for pending in state.pending()])
    samples = []
    for number, constraints in zip(range(rounds), list(kinds())[1:], strict=False):
        specs = [job(i, f"new-{number}-{i}", constraints) for i in range(jobs)]
        submit(state, specs)
        samples.append(cpu_s(lambda: cycle(state)))
        withdraw(state, specs)
    assert len(samples) == rounds, "not enough kinds of jobs"
    return statistics.median(samples)


def from_nothing_s(state: ControllerState, rounds: int) -> float:
    samples = []
    for _ in range(rounds):
        fleet = Fleet()
        for slice_name, owner in state.holders.items():
            fleet.hold(slice_name, owner)
        for worker in state.workers.values():
            fleet.put(replace(worker))
        scheduler = Scheduler()
        samples.append(cpu_s(partial(cycle, state, fleet, scheduler)))
    return statistics.median(samples)


def measure_cycle(scenario: Scenario, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a cycle: steady, with a new requirement, from nothing."""
    gc.collect()
    state = scenario.world(scenario.hosts)
    submit(state, [scenario.job(i, f"job-{i}") for i in range(scenario.jobs)])
    result = cycle(state)
    assert len(result.assignments) == scenario.assigned, f"{scenario.name}: {len(result.assignments)} were assigned"
    nothing = from_nothing_s(state, rounds)
    return steady_s(state, rounds), new_requirement_s(state, scenario.job, scenario.jobs, rounds), nothing


def print_cycles(scenarios: tuple[Scenario, ...], rounds: int) -> None:
    print("| One cycle, ms (times faster than the reference) | Steady | New requirement | From nothing | Reference |")
    print("|---|---:|---:|---:|---:|")
    for scenario in scenarios:
        cells = [_cell(spent, scenario.reference) for spent in measure_cycle(scenario, rounds)]
        reference = " to ".join(f"{1000 * s:,.0f}" for s in dict.fromkeys(scenario.reference or ()))
        print(f"| {scenario.name} | {' | '.join(cells)} | {reference or 'unknown'} |", flush=True)


def _cell(spent: float, reference: tuple[float, float] | None) -> str:
    ratios = dict.fromkeys(f"{s / spent:,.0f}" for s in reference or ())
    return f"{1000 * spent:.1f}" + (f" ({' to '.join(ratios)} ×)" if ratios else "")


# -- one event ---------------------------------------------------------------------------------------------------------


def print_event(rounds: int) -> None:
    """A slice is freed while one gang waits at 10,000 full hosts."""
    gc.collect()
    state = full(10_000)
    parts: list[tuple[float, ...]] = []
    for number in range(rounds):
        submit(state, [gang(number, f"waits-{number}")])
        ending = f"full-{7 * number}"
        for i in range(SLICE):
            state.handle_event(TaskStateChangedEvent(AttemptId(ending, 1), i, TaskState.SUCCEEDED))
        cycle(state)
        times = [time.process_time()]
        state.handle_event(AttemptEndConfirmedEvent(AttemptId(ending, 1)))
        times.append(time.process_time())
        result = cycle(state)
        times.append(time.process_time())
        for assignment in result.assignments:
            state.handle_event(assignment)
        times.append(time.process_time())
        assert len(result.assignments) == 1
        parts.append(tuple(1000 * (after - before) for before, after in pairwise(times)))
    total = statistics.median(map(sum, parts))
    event, scheduling, commit = map(statistics.median, zip(*parts, strict=True))
    print(
        f"\nOne event (a slice freed, one gang waiting, 10,000 full hosts) to its committed assignment: {total:.2f} ms"
        f" (event {event:.2f}, cycle {scheduling:.2f}, commit {commit:.2f})."
    )


# -- a large job -------------------------------------------------------------------------------------------------------

CPU_HOST = {"CPU": 100.0}
MOST_PLACED = 200
"""By one plan of the Controller."""


def started_job(tasks: int) -> ControllerState:
    """A job of single tasks, of which a fifth run: there is no room for more."""
    state = ControllerState()
    for number in range(tasks // 500):
        state.handle_event(WorkerRegisteredEvent(f"w{number}", "10.0.0.1", {}, dict(CPU_HOST)))
    spec = JobSpec(job_id="large", owner="owner", user="user", replicas=tasks, resources={"CPU": 1.0})
    state.handle_event(JobSubmittedEvent(spec, 0.0))
    assignments = cycle(state, scheduler=running).assignments
    for assignment in assignments:
        state.handle_event(assignment)
    for number in range(len(assignments)):
        state.handle_event(TaskStateChangedEvent(AttemptId("large", 1, number), number, TaskState.RUNNING))
    state.unrecorded.clear()
    return state


def records_of_changes(state: ControllerState) -> int:
    """Make the records of everything that has changed; their size in bytes."""
    size = 0
    for job_id, chunks in state.unrecorded.items():
        record = state.record(job_id)
        assert record is not None
        size += len(record.head()) + sum(len(part or b"") for _, part in record.chunks(chunks))
    state.unrecorded.clear()
    return size


def one_task_ends(state: ControllerState, number: int) -> tuple[float, float, int]:
    """Return the seconds from a task's end to the committed plan, those for the records, and their bytes."""
    start = time.process_time()
    state.handle_event(TaskStateChangedEvent(AttemptId("large", 1, number), number, TaskState.SUCCEEDED))
    state.handle_event(AttemptEndConfirmedEvent(AttemptId("large", 1, number)))
    for assignment in cycle(state).assignments:
        state.handle_event(assignment)
    planned = time.process_time()
    size = records_of_changes(state)
    return planned - start, time.process_time() - planned, size


def whole_plan(tasks: int) -> list[float]:
    """Return the seconds of each piece of the plan, commit included, that places a whole job on an empty fleet."""
    state = bare(0)
    for number in range(tasks // 100):
        state.handle_event(WorkerRegisteredEvent(f"w{number}", "10.0.0.1", {}, dict(CPU_HOST)))
    spec = JobSpec(job_id="large", owner="owner", user="user", replicas=tasks, resources={"CPU": 1.0})
    state.handle_event(JobSubmittedEvent(spec, 0.0))
    pieces = []
    while state.pending():
        start = time.process_time()
        plan = running.find_assignments(state.pending(), state.fleet, state.usage, NOW, None, MOST_PLACED)
        for assignment in plan.assignments:
            state.handle_event(assignment)
        pieces.append(time.process_time() - start)
    return pieces


def print_large_job(rounds: int) -> None:
    """The same changes of a small job and of a large one, side by side."""
    sizes = 1000, 50_000
    states = {tasks: started_job(tasks) for tasks in sizes}
    samples: dict[int, list[tuple[float, float, int]]] = {tasks: [] for tasks in sizes}
    for number in range(rounds):
        for tasks, state in states.items():
            samples[tasks].append(one_task_ends(state, number))
    print("\n| A task ends while others of its job wait | To the committed plan, ms | Its records, ms | Their bytes |")
    print("|---|---:|---:|---:|")
    middles = {tasks: tuple(map(statistics.median, zip(*samples[tasks], strict=True))) for tasks in sizes}
    for tasks, (planned, recorded, size) in middles.items():
        print(f"| {tasks:,} tasks | {1000 * planned:.2f} | {1000 * recorded:.2f} | {size:,.0f} |")
    small, large = (sum(middles[tasks][:2]) for tasks in sizes)
    print(f"\nFifty times the tasks: {large / small:.1f} × the time from a change to its records.")
    pieces = whole_plan(50_000)
    print(
        f"50,000 tasks that all fit are placed in {sum(pieces):.1f} s of CPU time, in {len(pieces)} pieces of"
        f" {1000 * statistics.median(pieces):.0f} ms, at most {1000 * max(pieces):.0f} ms."
    )


# -- many different jobs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """10,000 jobs that wait together.

    Args:
        name: what they have in common.
        specs: makes them.
    """

    name: str
    specs: Callable[[], list[JobSpec]]


def cpu_jobs_of(amounts: int) -> list[JobSpec]:
    """10,000 one-task jobs that ask for so many different amounts of CPUs."""
    return [replace(cpu_job(i, f"cpu-{i}"), resources={"CPU": 1.0 + i % amounts / 100}) for i in range(10_000)]


def gangs_of(amounts: int) -> list[JobSpec]:
    """10,000 gangs that ask for so many different amounts of CPUs beside their chips."""
    return [replace(gang(i, f"gang-{i}"), resources=HOST | {"CPU": 1.0 + i % amounts / 100}) for i in range(10_000)]


CROWDS = (
    Crowd("CPU jobs, 1 amount", partial(cpu_jobs_of, 1)),
    Crowd("CPU jobs, 200 amounts", partial(cpu_jobs_of, 200)),
    Crowd("CPU jobs, 5,000 amounts", partial(cpu_jobs_of, 5000)),
    Crowd("gangs of 16, 1 amount", partial(gangs_of, 1)),
    Crowd("gangs of 16, 2,000 amounts", partial(gangs_of, 2000)),
)


def first_plan(crowd: Crowd) -> tuple[int, float, float]:
    """Return how many of a crowd's jobs a first plan for 10,000 hosts places, its seconds, and the MB that it takes.

    Call it in a fresh process.
    """
    gc.disable()
    process = psutil.Process()
    state = bare(10_000)
    submit(state, crowd.specs())
    before = process.memory_info().rss
    start = time.process_time()
    placed = len(Scheduler().find_assignments(state.pending(), state.fleet, state.usage, NOW).assignments)
    return placed, time.process_time() - start, (process.memory_info().rss - before) / 1e6


def print_crowds() -> None:
    """What it costs that each job of a long queue asks for something else."""
    print("\n| The first plan of 10,000 jobs on 10,000 hosts | Placed | CPU time, s | Memory, MB |")
    print("|---|---:|---:|---:|")
    for crowd in CROWDS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            placed, spent, size = pool.submit(first_plan, crowd).result()
        print(f"| {crowd.name} | {placed:,} | {spent:.2f} | {size:,.0f} |")


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_mb(hosts: int, gangs: int, cpu_jobs: int) -> tuple[float, float]:
    """Return the resident memory in MB of the state and its indexes with all tasks placed, and of the whole process.

    Call it in a fresh process.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    state = ControllerState()
    for number in range(hosts):
        state.handle_event(_received(host(number)))
    specs = [gang(i, f"gang-{i}") for i in range(gangs)] + [cpu_job(i, f"cpu-{i}") for i in range(cpu_jobs)]
    for spec in specs:
        state.handle_event(_received(JobSubmittedEvent(spec, 0.0)))
    del specs
    for assignment in cycle(state).assignments:
        state.handle_event(assignment)
    assert not cycle(state).pending_reasons
    assert sum(len(worker.occupants) for worker in state.workers.values()) == SLICE * gangs + cpu_jobs
    after = process.memory_info().rss
    return (after - before) / 1e6, after / 1e6


def _received(event: Any) -> Any:
    """Return an event as another process would send it: it shares no objects with other events."""
    return pickle.loads(pickle.dumps(event))


def log_memory_b(tasks: int) -> tuple[float, float]:
    """Return the bytes for each task that has printed a line: real ones, and those that are counted."""
    process = psutil.Process()
    memory = LogMemory(most_bytes=1 << 40)
    before = process.memory_info().rss
    for number in range(tasks):
        memory.remember(
            _received(LastLines("train-1a2b3c4d", number, 1, f"{number % 500:056x}", 1000, b"step 9, loss 0.1\n"))
        )
    return (process.memory_info().rss - before) / tasks, memory.held_bytes / tasks


def print_memory() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        real, counted = pool.submit(log_memory_b, 1_000_000).result()
    print(f"Last lines of 1,000,000 tasks, one each, if unbounded: {real:.0f} MB, and {counted:.0f} MB are counted.")
    for gangs, cpu_jobs in ((6250, 0), (3125, 50_000)):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            state, process = pool.submit(memory_mb, 100_000, gangs, cpu_jobs).result()
        what = f"{gangs:,} gangs of 16" + (f" and {cpu_jobs:,} one-task jobs" if cpu_jobs else "")
        print(
            f"Memory with 100,000 hosts and 100,000 tasks ({what}), all placed: {state:,.0f} MB"
            f" ({process:,.0f} MB with the interpreter and all libraries)."
        )


# -- growth ------------------------------------------------------------------------------------------------------------

FLEETS = (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
QUEUES = (10, 30, 100, 300, 1000, 3000)

Curves = dict[str, list[float]]


def measure_growth(worlds: list[tuple[int, int]], rounds: int) -> Curves:
    """Return the cost of one cycle, in ms, for each pair of a number of hosts and a number of gangs."""
    curves: Curves = {"steady": [], "new requirement": []}
    for hosts, gangs in worlds:
        gc.collect()
        state = bare(hosts)
        submit(state, [gang(i, f"job-{i}") for i in range(gangs)])
        curves["steady"].append(1000 * steady_s(state, rounds))
        curves["new requirement"].append(1000 * new_requirement_s(state, gang, gangs, rounds))
    return curves


def save_picture(rounds: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_fleet = measure_growth([(hosts, 100) for hosts in FLEETS], rounds)
    by_queue = measure_growth([(10_000, gangs) for gangs in QUEUES], rounds)
    reference = {s.jobs: s.reference for s in SCENARIOS if s.world is bare and s.job is gang and s.reference}
    reference_by_fleet = {10_000: reference[100]}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    panels = (
        (axes[0], FLEETS, by_fleet, reference_by_fleet, "hosts in the fleet (100 gangs wait)"),
        (axes[1], QUEUES, by_queue, reference, "gangs in the queue (10,000 hosts)"),
    )
    for axis, sizes, curves, others, label in panels:
        for (name, costs), colour, mark in zip(curves.items(), ("#2a78d6", "#c2510c"), "os", strict=True):
            axis.loglog(sizes, costs, color=colour, marker=mark, markersize=5, linewidth=2, label=name)
        middles = [1000 * statistics.mean(times) for times in others.values()]
        axis.loglog(list(others), middles, "D", color="#555555", markersize=6, label="marin-iris")
        axis.set_xlabel(label)
        axis.grid(which="major", color="#dddddd")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(top=40_000)
    axes[0].set_ylabel("one cycle, ms of CPU time")
    axes[0].legend(frameon=False, loc="upper left")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    print(f"\nSaved {PICTURE} ({PICTURE.stat().st_size / 1000:.0f} KB).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the cycles at 10,000 hosts and the event only")
    parser.add_argument("--plot", action="store_true", help="also measure how the cost grows, and save the picture")
    parser.add_argument("--rounds", type=int, default=9, help="cycles per figure (default: 9, at most 14)")
    options = parser.parse_args()
    gc.disable()
    print_cycles(tuple(s for s in SCENARIOS if not options.quick or s.hosts <= 10_000), options.rounds)
    print_event(50)
    print_large_job(50)
    print_crowds()
    if not options.quick:
        print_memory()
    if options.plot:
        save_picture(options.rounds)


if __name__ == "__main__":
    main()
