"""How long large jobs wait, and how much of a fleet is used meanwhile: iris_ray beside the textbook's backfilling.

    python benchmarks/lent_room.py              # all cases, on 16 slices; some minutes
    python benchmarks/lent_room.py service      # one case
    python benchmarks/lent_room.py trace --trace openb_pod_list_default.csv --slices 24   # minutes for each policy

Cases:

- service: a service without end on one slice for a day, a job for all 16 slices, and short jobs.
- mixed: a week of short jobs and of larger ones, up to the whole fleet; each says for how long it runs at most.
- unbounded: the same, but half of the short jobs don't say it.
- trace: the last 30 days of Alibaba's cluster-trace-gpu-v2023, each job on as many slices as it had GPUs there, which
  are at most 8. Half of the jobs say for how long they run at most: for 1.5 times as long as they ran there.

Policies, all on the same jobs:

- iris_ray: the Controller's own code in virtual time. Each job has a user of its own, so that age decides.
- EASY: the first job that does not fit gets the earliest time at which it surely fits; others pass it if they delay it
  not. As in Slurm's and Flux's EASY policies (Lifka 1995).
- conservative: every waiting job gets such a time (Mualem and Feitelson 2001).
- keep all: after ten minutes everything that comes free is kept for the first job that does not fit.

Large jobs are those on at least 8 slices. Use counts the slices that jobs hold.
"""

import argparse
import heapq
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from alibaba import jobs_of_last_days
from iris_ray.model.options import PriorityBand
from iris_ray.model.workers import TPU
from iris_ray.study import SimulatedJob, Simulation
from iris_ray.study.agenda import Timings
from iris_ray.study.jobs import slice_spec
from iris_ray.study.report import percentile

TPU_TYPE, LARGE = "v4-8", 8
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
BOUND_S = 10 * MINUTE
MOST_PLANNED = 50
"""For so many waiting jobs conservative backfill plans a time."""


@dataclass(frozen=True)
class Job:
    """A job on equal slices.

    Args:
        name: its id.
        at: when it is submitted; all times are in seconds.
        size: on how many slices it runs.
        run_s: for how long.
        most_s: for how long at most, as its user says; infinite: the user does not say.
    """

    name: str
    at: float
    size: int
    run_s: float
    most_s: float = math.inf


@dataclass(frozen=True)
class Running:
    job: Job
    began: float

    @property
    def ends_at_most(self) -> float:
        return self.began + self.job.most_s


@dataclass(frozen=True)
class Result:
    """When jobs started, by name; and the part of the slices that jobs held."""

    started: dict[str, float]
    use: float


Policy = Callable[[float, Sequence[Job], int, Sequence[Running]], list[Job]]
"""Takes the time, the queue, the number of free slices and what runs; returns the jobs that start."""


# -- cases -------------------------------------------------------------------------------------------------------------


def service_case(slices: int, seed: int) -> tuple[list[Job], float]:
    """Return a day's jobs, and the time until which they count. The service ends after 24 h."""
    chance, every_s = Random(seed), 10 * MINUTE / (0.92 * (slices - 1))
    jobs = [Job("service", 0.0, 1, DAY), Job("large", MINUTE, slices, HOUR, 2 * HOUR)]
    jobs += [
        Job(f"short-{n}", n * every_s, 1, chance.uniform(5, 15) * MINUTE, 15 * MINUTE)
        for n in range(int(DAY / every_s))
    ]
    return jobs, DAY


def mixed_case(unbounded: float, slices: int, seed: int) -> tuple[list[Job], float]:
    """Return a week's jobs; ``unbounded`` is the part of the short ones that don't say for how long they run."""
    chance, week = Random(seed), 7 * DAY
    jobs: list[Job] = []
    for at in arrivals(chance, 8 / DAY, week):
        size, run_s = chance.choice((8, 8, 12, slices)), chance.uniform(0.5, 2) * HOUR
        jobs.append(Job(f"large-{len(jobs)}", at, size, run_s, 1.5 * run_s))
    work_s = 0.85 * slices * week - sum(job.size * job.run_s for job in jobs)
    for at in arrivals(chance, work_s / week / (1.5 * 40 * MINUTE), week):
        size, run_s = chance.choice((1, 1, 1, 1, 2, 3)), chance.uniform(10, 70) * MINUTE
        most_s = math.inf if chance.random() < unbounded else 1.5 * run_s
        jobs.append(Job(f"short-{len(jobs)}", at, size, run_s, most_s))
    return jobs, week


def trace_case(path: Path, seed: int) -> tuple[list[Job], float]:
    """Return the jobs of Alibaba's last 30 days."""
    chance, jobs = Random(seed), list[Job]()
    for at, job in jobs_of_last_days(path, 30):
        most_s = 1.5 * job.run_s if chance.random() < 0.5 else math.inf
        jobs.append(Job(f"{job.accelerators:.0f}-{len(jobs)}", at, round(job.accelerators), job.run_s, most_s))
    return jobs, 30 * DAY


def arrivals(chance: Random, rate: float, until: float) -> Iterable[float]:
    """Yield random times, ``rate`` of them in a second on average."""
    now = chance.expovariate(rate)
    while now < until:
        yield now
        now += chance.expovariate(rate)


CASES: dict[str, Callable[[int, int], tuple[list[Job], float]]] = {
    "service": service_case,
    "mixed": partial(mixed_case, 0.0),
    "unbounded": partial(mixed_case, 0.5),
}


# -- the textbook's policies -------------------------------------------------------------------------------------------


def fits_at(now: float, size: int, free: int, running: Sequence[Running]) -> tuple[float, int]:
    """Return when so many slices are surely free, infinite if nobody says, and how many more are free then."""
    at = now
    for one in sorted(running, key=lambda one: one.ends_at_most):
        if free >= size:
            break
        at, free = max(now, one.ends_at_most), free + one.job.size
    return at, free - size


def easy(now: float, queue: Sequence[Job], free: int, running: Sequence[Running]) -> list[Job]:
    started: list[Job] = []
    waiting = list(queue)
    while waiting and waiting[0].size <= free:
        started.append(waiting.pop(0))
        free -= started[-1].size
    if not waiting:
        return started
    at, more = fits_at(now, waiting[0].size, free, [*running, *(Running(job, now) for job in started)])
    for job in waiting[1:]:
        in_time = now + job.most_s <= at
        if job.size <= free and (in_time or job.size <= more):
            started.append(job)
            free -= job.size
            more -= 0 if in_time else job.size
    return started


def conservative(now: float, queue: Sequence[Job], free: int, running: Sequence[Running]) -> list[Job]:
    started: list[Job] = []
    changes = [(max(now, one.ends_at_most), one.job.size) for one in running]  # the slices that come free, and go
    for job in queue[:MOST_PLANNED]:
        at = _earliest(now, job, free, changes)
        if at == now:
            started.append(job)
        if at < math.inf:
            changes += [(at, -job.size), (at + job.most_s, job.size)]
    return started


def _earliest(now: float, job: Job, free: int, changes: Sequence[tuple[float, int]]) -> float:
    """Return the first time from which a job has its slices for as long as it runs at most."""
    times = sorted({now, *(at for at, _ in changes if at < math.inf)})
    profile, there, ordered, position = [], free, sorted(changes), 0
    for at in times:
        while position < len(ordered) and ordered[position][0] <= at:
            there += ordered[position][1]
            position += 1
        profile.append((at, there))
    for number, (at, _) in enumerate(profile):
        if all(there >= job.size for later, there in profile[number:] if later < at + job.most_s):
            return at
    return math.inf


def keep_all(now: float, queue: Sequence[Job], free: int, running: Sequence[Running]) -> list[Job]:
    started: list[Job] = []
    for job in queue:
        if job.size <= free:
            started.append(job)
            free -= job.size
        elif now - job.at >= BOUND_S:
            break
    return started


def play(jobs: Sequence[Job], until: float, slices: int, policy: Policy) -> Result:
    """Play a policy to the end of all jobs."""
    numbers = count()
    coming = sorted(jobs, key=lambda job: job.at)
    due: list[tuple[float, int, Running]] = []
    queue: list[Job] = []
    started: dict[str, float] = {}
    free, now, place, held = slices, 0.0, 0, 0.0
    while place < len(coming) or due or queue:
        looks = [job.at + BOUND_S for job in queue if job.at + BOUND_S > now]
        now = min([*(job.at for job in coming[place : place + 1]), *(end for end, _, _ in due[:1]), *looks])
        while due and due[0][0] <= now:
            free += heapq.heappop(due)[2].job.size
        while place < len(coming) and coming[place].at <= now:
            queue.append(coming[place])
            place += 1
        for job in policy(now, queue, free, [one for _, _, one in due]):
            queue.remove(job)
            started[job.name] = now
            free -= job.size
            held += job.size * max(0.0, min(until, now + job.run_s) - min(until, now))
            heapq.heappush(due, (now + job.run_s, next(numbers), Running(job, now)))
        assert free >= 0
    return Result(started, held / (slices * until))


# -- iris_ray ----------------------------------------------------------------------------------------------------------


def play_iris_ray(
    jobs: Sequence[Job], until: float, slices: int, band: PriorityBand = PriorityBand.INTERACTIVE
) -> Result:
    """Play iris_ray to the end of all jobs. Hosts start and end tasks at once, as in the other policies."""
    at_once = Timings(launch=0.0, warm_launch=0.0, stop=0.0, exit=0.0, reclaim=0.0, keep_warm=0.0)
    simulation = Simulation(at_once, plan_every_s=15.0)
    simulation.hosts.add_slices(TPU_TYPE, slices)
    for job in jobs:
        most_s = None if job.most_s == math.inf else job.most_s
        spec = slice_spec(job.name, TPU_TYPE, job.size, user=job.name, priority=band, max_runtime=most_s)
        simulation.submit(SimulatedJob(spec, job.run_s), job.at)
    simulation.run_until(1.5 * until)
    history = simulation.history
    started = {name: job.assigned_at for name, job in history.jobs.items() if job.assigned_at is not None}
    chips = history.capacity[-1][1][TPU]
    held = sum(
        one.held[TPU] * max(0.0, min(until, one.freed_at or until) - min(until, one.assigned_at))
        for one in history.attempts
    )
    return Result(started, held / (chips * until))


PLAYERS: dict[str, Callable[[Sequence[Job], float, int], Result]] = {
    "iris_ray": play_iris_ray,
    "EASY": partial(play, policy=easy),
    "conservative": partial(play, policy=conservative),
    "keep all": partial(play, policy=keep_all),
}


def minutes(seconds: Sequence[float], percent: float) -> str:
    return f"{percentile(sorted(seconds), percent) / MINUTE:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CASES, "trace"]
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(names)} (default: all but trace)")
    parser.add_argument("--policies", nargs="*", default=list(PLAYERS), choices=PLAYERS, help="default: all")
    parser.add_argument("--slices", type=int, default=16)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of Alibaba, for the case trace")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(names):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    if "trace" in options.cases and options.trace is None:
        parser.error("the case trace needs --trace FILE")
    logging.disable(logging.WARNING)
    print("| Case, policy | In use | Large jobs: half wait, min | 95 of 100 | Longest | Others: half | 95 of 100 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for case in options.cases:
        make = partial(trace_case, options.trace) if case == "trace" else partial(CASES[case], options.slices)
        jobs, until = make(options.seed)
        for name in options.policies:
            result = PLAYERS[name](jobs, until, options.slices)
            waits = {job: result.started.get(job.name, 2 * until) - job.at for job in jobs if job.at < until}
            large = [wait for job, wait in waits.items() if job.size >= LARGE]
            others = [wait for job, wait in waits.items() if job.size < LARGE]
            cells = [
                minutes(large, 50),
                minutes(large, 95),
                minutes(large, 100),
                minutes(others, 50),
                minutes(others, 95),
            ]
            print(f"| {case}, {name} | {100 * result.use:.0f} % | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
