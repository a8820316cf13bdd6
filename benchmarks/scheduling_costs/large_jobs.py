"""Jobs of many tasks: what a task's end costs, and how long a whole job takes to be placed."""

import statistics
import time

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    JobSubmittedEvent,
    TaskStateChangedEvent,
    WorkerRegisteredEvent,
)
from scheduling_costs.cycles import NOW, cycle, running
from scheduling_costs.worlds import bare

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
    for assignment in cycle(state, scheduler=running).assignments:
        state.handle_event(assignment)
    for number in range(tasks // 5):
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
