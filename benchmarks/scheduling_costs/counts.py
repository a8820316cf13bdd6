"""How many instructions of Python the core runs. Other programs on the machine don't change that, as they change times.

What functions written in C do, such as sorting, counts as one instruction.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.scheduler import Scheduler
from iris_ray.state import ControllerState
from iris_ray.state.events import AttemptEndConfirmedEvent, JobSubmittedEvent, TaskStateChangedEvent
from iris_ray.state.fleet import Fleet
from scheduling_costs.cycles import SCENARIOS, Scenario, cycle, waiting
from scheduling_costs.large_jobs import records_of_changes
from scheduling_costs.worlds import SLICE, bare, cpu_job, full, gang, stir, submit

HERE = Path(__file__).parents[2]
HOSTS = 1600
NAMES = (
    "gangs that all fit",
    "the same on a full fleet",
    "one host per slice busy",
    "a gang for each slice",
    "CPU jobs of one task",
    "gangs with a GE constraint",
)
"""What the first scenarios are, whatever their size."""


def instructions(action: Callable[[], object]) -> int:
    """Return how many instructions of Python an action runs, in all functions that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


def steady(scenario: Scenario) -> int:
    """The second cycle after a task has come and gone on a slice: the first one may build indexes."""
    state = waiting(scenario)
    for number in range(2):
        stir(state, number)
        spent = instructions(lambda: cycle(state))
    return spent


def from_nothing(scenario: Scenario) -> int:
    """The first cycle of a new scheduler."""
    state, fleet = waiting(scenario), Fleet()
    for slice_name, owner in state.holders.items():
        fleet.hold(slice_name, owner)
    for worker in state.workers.values():
        fleet.put(replace(worker))
    scheduler = Scheduler()
    return instructions(lambda: cycle(state, fleet, scheduler))


def freed_slice() -> int:
    """From a slice's end to the committed assignment of the only gang that waits, on full hosts."""
    state, spent = full(HOSTS), 0
    for number in range(2):
        submit(state, [gang(number, f"waits-{number}")])
        for i in range(SLICE):
            state.handle_event(TaskStateChangedEvent(AttemptId(f"full-{number}", 1), i, TaskState.SUCCEEDED))
        cycle(state)
        spent = instructions(lambda: end_and_assign(state, f"full-{number}"))  # noqa: B023
    return spent


def end_and_assign(state: ControllerState, job_id: str) -> None:
    state.handle_event(AttemptEndConfirmedEvent(AttemptId(job_id, 1)))
    for assignment in cycle(state).assignments:
        state.handle_event(assignment)


def life(job: Callable[..., Any], tasks: int) -> int:
    """The whole life of a job, from its submission to its end, with the records of each step."""
    state = bare(HOSTS)
    for number in range(2):
        spent = instructions(lambda: live(state, job(number, f"lives-{number}"), tasks))  # noqa: B023
    return spent


def live(state: ControllerState, spec: Any, tasks: int) -> None:
    state.handle_event(JobSubmittedEvent(spec, 1.0))
    for assignment in cycle(state).assignments:
        state.handle_event(assignment)
    records_of_changes(state)
    attempt = AttemptId(spec.job_id, 1)
    for change in (TaskState.RUNNING, TaskState.SUCCEEDED):
        for i in range(tasks):
            state.handle_event(TaskStateChangedEvent(attempt, i, change))
        records_of_changes(state)
    state.handle_event(AttemptEndConfirmedEvent(attempt))
    records_of_changes(state)


def counts() -> dict[str, int]:
    """Return the instructions of everything that is counted."""
    found = dict[str, int]()
    for name, scenario in zip(NAMES, SCENARIOS, strict=False):
        found[f"{name}: steady cycle"] = steady(smaller(scenario))
        found[f"{name}: cycle from nothing"] = from_nothing(smaller(scenario))
    found["a slice is freed, and a gang gets it"] = freed_slice()
    found["a gang's life: 16 tasks"] = life(gang, SLICE)
    found["a CPU job's life: one task"] = life(cpu_job, 1)
    return found


def smaller(scenario: Scenario) -> Scenario:
    """Return a scenario with 16 % of its hosts and jobs: counting is slow, and the ratio of two counts is the same."""
    jobs, assigned = scenario.jobs * 16 // 100, scenario.assigned * 16 // 100
    return replace(scenario, hosts=HOSTS, jobs=jobs, assigned=assigned)


def print_counts(before: Path | None) -> None:
    """Print the instructions of this checkout, and with ``before`` of another one with the ratio."""
    now = _counts_of(HERE)
    if before is None:
        print("| Instructions of Python | |\n|---|---:|")
        print(*(f"| {name} | {count:,} |" for name, count in now.items()), sep="\n")
        return
    then = _counts_of(before)
    print("| Instructions of Python | Before | Now | Ratio |\n|---|---:|---:|---:|")
    print(*(f"| {name} | {then[name]:,} | {now[name]:,} | {now[name] / then[name]:.3f} |" for name in now), sep="\n")


def _counts_of(checkout: Path) -> dict[str, int]:
    """Count in a process of its own, in which sets have the same order each time."""
    path = os.pathsep.join([str(checkout.resolve()), str(HERE / "benchmarks")])
    command = [
        sys.executable,
        "-c",
        "import json; from scheduling_costs.counts import counts; print(json.dumps(counts()))",
    ]
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environ, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found
