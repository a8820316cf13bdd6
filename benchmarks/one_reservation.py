"""Days in which jobs of three slice sizes share a reservation: what sharing it wins, and what it costs.

    python benchmarks/one_reservation.py                        # a month, all policies; some minutes
    python benchmarks/one_reservation.py --days 2               # ten seconds
    python benchmarks/one_reservation.py --policy held          # one policy
    python benchmarks/one_reservation.py --trace openb_pod_list_default.csv

Policies, all on the same jobs:

- apart: each size has slices of its own for ever.
- idle, lower-bands, held: the real provisioner, with this ``--take-back``.

The Controller's own code and the provisioner decide, in virtual time; Google is on paper. A slice is made within five
minutes of its request and deleted within three: assumptions, not measurements.

Without a trace, 256 chips are shared, or apart four v6e-16, one v6e-64 and one v6e-128. The jobs are v6e-128 of
PRODUCTION, one a day; v6e-64 and v6e-16 of INTERACTIVE, 6 and 20 a day; v6e-16 of BATCH, 60 a day. Together they need
nearly the whole reservation.

The trace is Alibaba's cluster-trace-gpu-v2023, whose jobs have up to eight GPUs. Arrivals and run times are real, the
sizes are ours: a job with one or two GPUs gets a v6e-16, with up to four a v6e-64, with more a v6e-128. Best-effort
jobs (BE) are BATCH, guaranteed ones PRODUCTION, the others INTERACTIVE. 448 chips are shared, or apart sixteen v6e-16,
one v6e-64 and one v6e-128. The days are the last of the trace, which is busiest then. Their end takes long to simulate,
so ``--trace-days 30 --days 20`` simulates the first 20 of the last 30 days.

All jobs heed notices. Those of BATCH, of PRODUCTION and of the trace save every half hour.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from alibaba import jobs_of_last_days
from iris_ray.capacity.simulated import SimulatedReservation, reaches
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES
from iris_ray.study import Simulation
from iris_ray.study.agenda import Timings
from iris_ray.study.hosts import CPUS
from iris_ray.study.jobs import Arrival, JobStream, RunTimes, SimulatedJob, merged, slice_spec
from iris_ray.study.report import percentile

APART = "apart"
POLICIES = (APART, *reaches())
HOUR, DAY = 3600.0, 86_400.0
_, PRODUCTION, INTERACTIVE, BATCH = PriorityBand
USERS = (("ann", 1.0), ("bea", 1.0), ("cy", 1.0))
STREAMS = (
    JobStream(
        name="production-128", per_day=1, run=RunTimes(4 * HOUR, 6 * HOUR), users=USERS, band=PRODUCTION,
        tpu_type="v6e-128", save_every_s=HOUR / 2,
    ),
    JobStream(name="interactive-64", per_day=6, run=RunTimes(HOUR, 3 * HOUR), users=USERS, tpu_type="v6e-64"),
    JobStream(name="interactive-16", per_day=20, run=RunTimes(HOUR / 2, 2 * HOUR), users=USERS, tpu_type="v6e-16"),
    JobStream(
        name="batch-16", per_day=60, run=RunTimes(4 * HOUR, 9 * HOUR), users=USERS, band=BATCH, tpu_type="v6e-16",
        save_every_s=HOUR / 2,
    ),
)  # fmt: skip
TRACE_SIZES = ((2, "v6e-16"), (4, "v6e-64"), (1000, "v6e-128"))
"""The most GPUs of a job that gets a slice of each type."""
TRACE_BANDS = {"BE": BATCH, "Guaranteed": PRODUCTION}


@dataclass(frozen=True)
class Load:
    """Jobs, and the slices that divide the chips among their sizes.

    Attributes:
        kinds: the beginnings of their ids, in the order of the table.
    """

    apart: Mapping[str, int]
    kinds: Sequence[str]
    arrivals: Sequence[Arrival]

    @property
    def chips(self) -> int:
        return sum(count * get_tpu_config(tpu_type).chip_count for tpu_type, count in self.apart.items())

    @staticmethod
    def drawn(days: float, seed: int) -> "Load":
        """Return jobs of `STREAMS`."""
        chance = Random(seed)
        arrivals = merged([stream.arrivals(Random(chance.random()), days * DAY) for stream in STREAMS])
        return Load({"v6e-16": 4, "v6e-64": 1, "v6e-128": 1}, tuple(stream.name for stream in STREAMS), tuple(arrivals))

    @staticmethod
    def traced(path: Path, days: float) -> "Load":
        """Return jobs of the last days of Alibaba's trace."""
        arrivals = []
        for at, job in jobs_of_last_days(path, days):
            tpu_type = next(name for most, name in TRACE_SIZES if job.accelerators <= most)
            band = TRACE_BANDS.get(job.user, INTERACTIVE)
            spec = slice_spec(f"{band.name.lower()}-{tpu_type}-{job.job_id}", tpu_type, user=job.user, priority=band)
            arrivals.append((at, SimulatedJob(spec, job.run_s, save_every_s=HOUR / 2)))
        kinds = ("interactive-v6e-128", "interactive-v6e-64", "interactive-v6e-16", "batch-v6e-16")
        return Load({"v6e-16": 16, "v6e-64": 1, "v6e-128": 1}, kinds, tuple(arrivals))


def run(policy: str, load: Load, days: float) -> str:
    """Simulate a policy, and return a row of the table."""
    simulation, timings = Simulation(plan_every_s=5.0), Timings()
    zone: SimulatedReservation | None = None
    if policy == APART:
        for tpu_type, count in load.apart.items():
            simulation.hosts.add_slices(tpu_type, count)
    else:
        cpus = dict.fromkeys(load.apart, CPUS)
        zone = SimulatedReservation(simulation, cpus, load.chips, policy, DEFAULT_RULES, timings)
    simulation.submit_all(iter(load.arrivals))
    simulation.run_until(days * DAY)
    now, history = simulation.now, simulation.history
    cells = []
    for kind in load.kinds:
        of_kind = [job for job in history.jobs.values() if job.spec.job_id.startswith(f"{kind}-")]
        waits = sorted(job.waited_s(now) / HOUR for job in of_kind)
        cells.append(f"{percentile(waits, 50):.2f} / {percentile(waits, 90):.2f}")
    work = lost = 0.0
    for attempt in history.attempts:
        ended_at = now if attempt.ended_at is None else attempt.ended_at
        ran_s = 0.0 if attempt.began_at is None else ended_at - attempt.began_at
        kept_s = ran_s if attempt.ended_at is None else attempt.kept_s
        work += kept_s * attempt.held.get(TPU, 0.0)
        lost += (ran_s - kept_s) * attempt.held.get(TPU, 0.0)
    whole = load.chips * now
    evicted = sum(attempt.outcome in ("evicted", "moved") for attempt in history.attempts)
    done = sum(job.ended_at is not None for job in history.jobs.values())
    made = zone.made if zone is not None else 0
    figures = f"{work / whole:.1%} | {lost / whole:.2%} | {evicted} | {made} | {done} of {len(history.jobs)}"
    return f"| {policy} | {' | '.join(cells)} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only this policy; may be repeated")
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--trace-days", type=float, help="the days of the trace, of which the first --days are simulated"
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    days, trace = arguments.days, arguments.trace
    of_trace = arguments.trace_days or days
    load = Load.drawn(days, arguments.seed) if trace is None else Load.traced(trace, of_trace)
    names = " | ".join(f"{kind}, h" for kind in load.kinds)
    print(f"| policy | {names} | useful chip time | lost | moved or evicted | slices made | jobs done |")
    print("|---|" + "---:|" * (len(load.kinds) + 5))
    for policy in arguments.policy or POLICIES:
        print(run(policy, load, days), flush=True)


if __name__ == "__main__":
    main()
