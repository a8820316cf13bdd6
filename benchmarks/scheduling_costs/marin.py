"""The scheduler of the installed marin-iris, in the same worlds and the same process.

Nothing of it is kept between its cycles: it makes a context of all workers each time. What it gets is made before.
"""

import statistics
from collections.abc import Callable, Iterable
from importlib.metadata import version

from iris.cluster.constraints import AttributeValue, Constraint, ConstraintOp
from iris.cluster.controller.scheduling.scheduler import (
    DEFAULT_MAX_ASSIGNMENTS_PER_WORKER,
    DEFAULT_MAX_BUILDING_TASKS_PER_WORKER,
    JobRequirements,
    Scheduler,
    SchedulingContext,
    SchedulingResult,
    WorkerSnapshot,
)
from iris.cluster.types import JobName, UserBudgetDefaults, WorkerId

from iris_ray.model import constraints
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.workers import Worker
from iris_ray.state import ControllerState
from scheduling_costs.cycles import Scenario, cpu_s, from_nothing_s, steady_s, waiting

MOST = DEFAULT_MAX_BUILDING_TASKS_PER_WORKER, DEFAULT_MAX_ASSIGNMENTS_PER_WORKER


def print_beside_marin(scenarios: Iterable[Scenario], rounds: int) -> None:
    """Print what a cycle of each scheduler costs, measured in turn, and how many times as long Marin's takes."""
    print(f"| One cycle, ms | marin-iris {version('marin-iris')} | Steady | From nothing |")
    print("|---|---:|---:|---:|")
    for scenario in scenarios:
        state = waiting(scenario)
        marins = marins_cycle(state)
        others = [cpu_s(marins)]
        nothing = from_nothing_s(state, rounds)
        others.append(cpu_s(marins))
        steady = steady_s(state, rounds)
        other = statistics.mean([*others, cpu_s(marins)])
        cells = (f"{1000 * spent:.1f} ({other / spent:,.0f} ×)" for spent in (steady, nothing))
        print(f"| {scenario.name} | {1000 * other:,.0f} | {' | '.join(cells)} |", flush=True)


def marins_cycle(state: ControllerState) -> Callable[[], SchedulingResult]:
    """Return a cycle of Marin's scheduler, its context included, with the workers and the pending jobs of a state."""
    workers = list(map(_snapshot, state.workers.values()))
    jobs = {JobName.root(job.spec.user, job.spec.job_id): job.spec for job in state.pending()}
    tasks = [name.task(index) for name, spec in jobs.items() for index in range(spec.replicas)]
    needs = {name: _requirements(spec) for name, spec in jobs.items()}
    bands = {name: int(spec.priority) for name, spec in jobs.items()}

    def cycle() -> SchedulingResult:
        context = SchedulingContext(workers, {}, *MOST, tasks, needs, [], {}, {}, bands, UserBudgetDefaults())
        return Scheduler().find_assignments(context)

    return cycle


def _snapshot(worker: Worker) -> WorkerSnapshot:
    total, held = worker.resources, worker.held
    return WorkerSnapshot(
        WorkerId(worker.node_id),
        *(int(total.get("CPU", 0) * 1000), int(total.get("memory", 0)), 0, int(total.get("TPU", 0))),
        *(int(held.get("CPU", 0) * 1000), int(held.get("memory", 0)), 0, int(held.get("TPU", 0))),
        {key: AttributeValue(value.value) for key, value in worker.attributes.items()},
    )


def _requirements(spec: JobSpec) -> JobRequirements:
    return JobRequirements(
        *(int(spec.resources.get("CPU", 0) * 1000), 0, 0, int(spec.resources.get("TPU", 0))),
        spec.device,
        list(map(_constraint, spec.constraints)),
        spec.coscheduling is not None,
        spec.coscheduling.group_by if spec.coscheduling else None,
    )


def _constraint(ours: constraints.Constraint) -> Constraint:
    assert isinstance(ours.value, constraints.AttributeValue)
    return Constraint.create(ours.key, ConstraintOp[ours.op.name], value=ours.value.value)
