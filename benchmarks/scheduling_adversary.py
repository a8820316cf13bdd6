"""The longest plans that an adversary found: worlds where much could be searched, and little is to be found.

    python benchmarks/scheduling_adversary.py                 # the table; some minutes
    python benchmarks/scheduling_adversary.py groups teams    # the worlds whose names begin so

Needs neither Ray nor TPUs. Each world is planned as the Controller plans: at first with everything new, then several
times after one change each. The figures are CPU time with the garbage collector off, of the first plan, and the median
and the longest of the others. A plan of the Controller during which nobody is answered should take less than a second.
"""

import argparse
import gc
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.job_group import GroupSpec
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import TaskState
from iris_ray.model.options import PriorityBand
from iris_ray.model.teams import Quota, Team
from iris_ray.model.topology import get_tpu_config
from iris_ray.scheduler import Planner
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    GangAssignedEvent,
    JobCancelledEvent,
    JobSubmittedEvent,
    TasksAssignedEvent,
    TaskStateChangedEvent,
    TeamsSetEvent,
    TimePassedEvent,
    WorkerRegisteredEvent,
)
from iris_ray.state.instructions import Instructions
from scheduling_costs.worlds import SLICE, TPU_TYPE, bare, gang

_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
HOSTS, RACK = 10_000, 10
BEGAN, NOW = 10_000.0, 20_000.0
"""When everything that runs began, and when the first plan is made."""
CHIPS = float(get_tpu_config(TPU_TYPE).chip_count)


@dataclass(frozen=True)
class World:
    """A cluster and its queue.

    Args:
        name: the word by which it is asked for.
        about: what is in it.
        make: makes its state.
        plans_before: how many plans are made before the first that counts, without a change between them.
    """

    name: str
    about: str
    make: Callable[[], ControllerState]
    plans_before: int = 0


# -- what runs ---------------------------------------------------------------------------------------------------------


def begin(state: ControllerState) -> ControllerState:
    """Have all tasks that have hosts run since long ago."""
    state.handle_event(TimePassedEvent(BEGAN))
    for job in list(state.jobs.values()):
        for one in job.gangs:
            if one.placed:
                attempt = job.current_attempt(one)
                for task in one.tasks:
                    state.handle_event(TaskStateChangedEvent(attempt, task.index, TaskState.RUNNING))
    state.unrecorded.clear()
    return state


def full(band: PriorityBand = BATCH, slices: int = HOSTS // SLICE) -> ControllerState:
    """A fleet with a gang on each slice: in this band on the first ones, in PRODUCTION on the others."""
    state = bare(HOSTS)
    for number in range(HOSTS // SLICE):
        start(state, number, band if number < slices else PRODUCTION)
    return begin(state)


def start(state: ControllerState, number: int, band: PriorityBand, team: str = "") -> None:
    """Give a slice to a gang of a user of its own."""
    name = f"full-{number}"
    spec = replace(gang(number, name), user=name, priority=band, team=team)
    state.handle_event(JobSubmittedEvent(spec, 0.0))
    hosts = tuple(f"w{number * SLICE + i}" for i in range(SLICE))
    state.handle_event(GangAssignedEvent(name, (f"slice-{number}",), (hosts,)))


def small_tasks(hosts: int, cpus: int) -> ControllerState:
    """Racks of ten hosts full of tasks of one CPU each, and three gangs of a higher band that need half a rack each."""
    state = ControllerState()
    for number in range(hosts):
        rack = {"rack": AttributeValue(f"rack-{number // RACK}")}
        state.handle_event(WorkerRegisteredEvent(f"w{number}", "10.0.0.1", rack, {"CPU": float(cpus)}))
        for task in range(cpus):
            name = f"small-{number}-{task}"
            spec = JobSpec(job_id=name, owner="owner", user=name, priority=BATCH, resources={"CPU": 1.0})
            state.handle_event(JobSubmittedEvent(spec, 0.0))
            state.handle_event(TasksAssignedEvent(spec.job_id, (0,), f"w{number}"))
    begin(state)
    for number in range(3):
        large = JobSpec(
            job_id=f"large-{number}",
            owner="owner",
            user="large",
            priority=PRODUCTION,
            replicas=RACK,
            coscheduling=CoschedulingConfig("rack"),
            resources={"CPU": float(cpus // 2 + number)},
        )
        state.handle_event(JobSubmittedEvent(large, NOW))
    return state


# -- what waits --------------------------------------------------------------------------------------------------------


def with_queue(state: ControllerState, specs: Iterable[JobSpec], at: float = NOW) -> ControllerState:
    for spec in specs:
        state.handle_event(JobSubmittedEvent(spec, at))
    return state


def groups(count: int) -> Iterator[JobSpec]:
    """Groups of three gangs each."""
    for number in range(count):
        ids = tuple(f"group-{number}-{member}" for member in "abc")
        group = GroupSpec(f"group-{number}", f"group-{number}", tuple(zip(ids, ids, strict=True)), ids)
        for job_id in ids:
            yield replace(gang(number, job_id), priority=PRODUCTION, group=group, owner=f"owner-{number}")


def many_constraints(jobs: int, constraints: int) -> Iterator[JobSpec]:
    """Gangs whose constraints all hold."""
    for number in range(jobs):
        no = [Constraint("zone", ConstraintOp.NE, AttributeValue(f"z-{number}-{i}")) for i in range(constraints)]
        yield replace(gang(number, f"fussy-{number}"), constraints=tuple(no), priority=PRODUCTION)


def many_values(jobs: int, values: int) -> Iterator[JobSpec]:
    """Gangs that may run on many slices, each named."""
    for number in range(jobs):
        names = tuple(f"host-{(7 * number + i) % HOSTS}" for i in range(values - 1))
        among = Constraint("zone", ConstraintOp.IN, (*names, "us-a"))
        yield replace(gang(number, f"choosy-{number}"), constraints=(among,), priority=PRODUCTION)


def gangs(count: int, band: PriorityBand) -> Iterator[JobSpec]:
    for number in range(count):
        yield replace(gang(number, f"gang-{number}"), priority=band)


def distinct_amounts(jobs: int) -> Iterator[JobSpec]:
    """Tasks that each ask for another amount, and find no host."""
    for number in range(jobs):
        yield JobSpec(
            job_id=f"amount-{number}",
            owner=f"owner-{number}",
            user=f"user-{number % 7}",
            resources={"CPU": 120.5 + number / 1000, "TPU": 0.0},
        )


def in_teams(teams: int, jobs: int, users: int) -> ControllerState:
    """A full fleet whose teams have used up their quotas, and may borrow nothing."""
    state = bare(HOSTS)
    slices = HOSTS // SLICE
    quotas = (CHIPS if number < slices else 0.0 for number in range(teams))
    made = [Team(f"team-{n}", {TPU_TYPE: Quota(quota, borrow=0.0)}) for n, quota in enumerate(quotas)]
    state.handle_event(TeamsSetEvent(tuple(made)))
    for number in range(slices):
        start(state, number, INTERACTIVE, f"team-{number}")
    begin(state)
    waiting = (
        replace(gang(n, f"waits-{n}"), user=f"user-{n % teams}-{n // teams % users}", team=f"team-{n % teams}")
        for n in range(jobs)
    )
    return with_queue(state, waiting)


WORLDS = (
    World("tasks-224", "10 hosts of 224 one-CPU tasks, gangs of a higher band", partial(small_tasks, 10, 224)),
    World("tasks-64", "200 hosts of 64 one-CPU tasks, gangs of a higher band", partial(small_tasks, 200, 64)),
    World("groups", "100 PRODUCTION groups of three gangs, a full fleet", lambda: with_queue(full(), groups(100))),
    World("groups-stay", "the same, and nobody may be evicted", lambda: with_queue(full(PRODUCTION), groups(100))),
    World("constraints", "ten gangs of 100 constraints", lambda: with_queue(full(), many_constraints(10, 100))),
    World("values", "ten gangs with IN of 1,000 values", lambda: with_queue(full(), many_values(10, 1000))),
    World(
        "leaving",
        "1,000 gangs, for which 465 slices are being left",
        lambda: with_queue(full(slices=465), gangs(1000, INTERACTIVE)),
        80,
    ),
    World("amounts", "10,000 jobs of distinct amounts", lambda: with_queue(full(), distinct_amounts(10_000))),
    World("teams", "2,000 teams, 50,000 jobs", partial(in_teams, 2000, 50_000, 1)),
    World("teams-of-five", "the same, five users a team", partial(in_teams, 2000, 50_000, 5)),
)


# -- plans -------------------------------------------------------------------------------------------------------------


def seconds_of_plans(world: World, rounds: int) -> Iterator[float]:
    """Yield the CPU time of the first plan, and of later ones: each after a job's end or a submission, in turn."""
    state = world.make()
    planner = Planner(state, look_again_s=0.5)
    now = NOW
    for _ in range(world.plans_before):
        now += 0.01
        state.handle_event(TimePassedEvent(now))
        planner.look_again()
        planner.plan(now, Instructions())
    for number in range(rounds + 1):
        now += 0.5
        began = time.process_time()
        state.handle_event(TimePassedEvent(now))
        planner.plan(now, Instructions())
        yield time.process_time() - began
        for aside in planner.left_out.values():
            raise RuntimeError(str(aside))
        change(state, number, now)
        state.unrecorded.clear()


def change(state: ControllerState, number: int, now: float) -> None:
    """Have a running job end, or submit one more that is like the last."""
    if number % 2:
        like = list(state.jobs.values())[-1].spec
        state.handle_event(JobSubmittedEvent(replace(like, job_id=f"more-{number}", group=None), now))
        return
    running = (job for job in state.jobs.values() if len(job.gangs) == 1 and job.gang.placed)
    if (job := next(islice(running, 7, None), None)) is not None:
        attempt = job.current_attempt(job.gang)
        state.handle_event(JobCancelledEvent(job.spec.job_id, "measured"))
        state.handle_event(AttemptEndConfirmedEvent(attempt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", help=f"beginnings of {', '.join(world.name for world in WORLDS)}")
    parser.add_argument("--rounds", type=int, default=6, help="plans after the first (default: 6)")
    options = parser.parse_args()
    gc.disable()
    logging.disable(logging.WARNING)
    sys.setrecursionlimit(10_000)
    print("| One plan, s of CPU time | First | Median of later ones | Longest of those |")
    print("|---|---:|---:|---:|")
    for world in WORLDS:
        if options.worlds and not world.name.startswith(tuple(options.worlds)):
            continue
        gc.collect()
        try:
            first, *later = seconds_of_plans(world, options.rounds)
        except RuntimeError as defect:
            print(f"| {world.about} | {str(defect)[:80]} | | |", flush=True)
            continue
        print(f"| {world.about} | {first:.3f} | {statistics.median(later):.3f} | {max(later):.3f} |", flush=True)


if __name__ == "__main__":
    main()
