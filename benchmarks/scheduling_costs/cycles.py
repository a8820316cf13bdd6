"""One scheduling cycle: steady, with a new requirement, and from nothing."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from iris_ray.model.job_spec import JobSpec
from iris_ray.scheduler import Scheduler, SchedulingResult
from iris_ray.state import ControllerState
from iris_ray.state.fleet import Fleet
from scheduling_costs.worlds import bare, cpu_job, full, gang, gang_with_ge, kinds, one_busy, stir, submit, withdraw

NOW = 1.0


@dataclass(frozen=True)
class Scenario:
    name: str
    hosts: int
    jobs: int
    assigned: int
    world: Callable[[int], ControllerState] = bare
    job: Callable[..., JobSpec] = gang


SCENARIOS = (
    Scenario("10,000 hosts, 100 gangs that all fit", 10_000, 100, 100),
    Scenario("the same on a full fleet", 10_000, 100, 0, world=full),
    Scenario("one host per slice busy", 10_000, 100, 0, world=one_busy),
    Scenario("625 gangs (10,000 tasks)", 10_000, 625, 625),
    Scenario("1,000 one-task CPU jobs", 10_000, 1000, 1000, job=cpu_job),
    Scenario("100 gangs with a GE constraint", 10_000, 100, 100, job=gang_with_ge),
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
    state = waiting(scenario)
    nothing = from_nothing_s(state, rounds)
    return steady_s(state, rounds), new_requirement_s(state, scenario.job, scenario.jobs, rounds), nothing


def waiting(scenario: Scenario) -> ControllerState:
    """Return a scenario's state, in which its jobs wait."""
    gc.collect()
    state = scenario.world(scenario.hosts)
    submit(state, [scenario.job(i, f"job-{i}") for i in range(scenario.jobs)])
    result = cycle(state)
    assert len(result.assignments) == scenario.assigned, f"{scenario.name}: {len(result.assignments)} were assigned"
    return state


def print_cycles(scenarios: tuple[Scenario, ...], rounds: int) -> None:
    print("| One cycle, ms | Steady | New requirement | From nothing |")
    print("|---|---:|---:|---:|")
    for scenario in scenarios:
        cells = [f"{1000 * spent:.1f}" for spent in measure_cycle(scenario, rounds)]
        print(f"| {scenario.name} | {' | '.join(cells)} |", flush=True)
