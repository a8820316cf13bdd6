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
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

from alibaba import jobs_of_last_days
from iris_ray.capacity import provisioner as provisioner_module
from iris_ray.capacity.core import CapacityReport
from iris_ray.capacity.demand import WaitingGang, demand_of, slices_to_remove
from iris_ray.capacity.holdings import Reach, Settings
from iris_ray.capacity.lower_bands import ChipsLeft, ChipsWanted, left_for, promise_for
from iris_ray.capacity.provider import OWNER_LABEL, HostSettings, Market, NewSlice, QueuedSlice, QueuedState, Source
from iris_ray.capacity.provisioner import CLOSED_S, GIVEN_BACK, Jobs, Provisioner
from iris_ray.capacity.provisioning import Joined
from iris_ray.model.constraints import TAINT_PREFIX, AttributeValue
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.model.workers import TPU, TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES
from iris_ray.state.events import (
    SliceReleasedEvent,
    TaintedEvent,
    TaintLiftedEvent,
    WorkerFailedEvent,
    WorkerRegisteredEvent,
)
from iris_ray.study import Simulation
from iris_ray.study.jobs import Arrival, JobStream, RunTimes, SimulatedJob, merged, slice_spec
from iris_ray.study.report import percentile

APART = "apart"
POLICIES = (APART, *(reach.value for reach in Reach))
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
EVERY_S = 60.0
MADE_S, DELETED_S = 5 * MINUTE, 3 * MINUTE
HERE = "projects/p/locations/here"
TYPES = ("v6e-16", "v6e-64", "v6e-128")
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


@dataclass
class PaperSlice:
    listed: QueuedSlice
    config: TPUConfig
    leaves: bool = False


class Zone(Jobs):
    """The zone of the reservation, and the cluster as a provisioner sees it.

    Args:
        simulation: the cluster.
        chips: the number of chips of the reservation.
        take_back: how far the provisioner goes to free chips for a waiting job.
    """

    location = HERE

    def __init__(self, simulation: Simulation, chips: int, take_back: Reach) -> None:
        self._simulation, self._state = simulation, simulation.state
        self.slices: dict[str, PaperSlice] = {}
        self.made, self._chips = 0, chips
        self._source = Source.reserved(f"{HERE}/reservations/res:{chips}")
        types = tuple(map(get_tpu_config, TYPES))
        settings = Settings("b", types, (self._source,), least=0, most=99, idle_s=600.0, take_back=take_back)
        hosts = HostSettings("image", {OWNER_LABEL: "b"}, "")
        clock = SimpleNamespace(time=lambda: 1.7e9 + simulation.now, monotonic=lambda: simulation.now)
        setattr(provisioner_module, "time", clock)  # noqa: B010 - the provisioner lives in virtual time
        self._provisioner = Provisioner(settings, [self], self, hosts, every_s=EVERY_S, print_line=lambda *_: None)

    def turn(self) -> None:
        """Take a turn of the provisioner, and plan the next one."""
        self._provisioner.turn()
        self._simulation.agenda.after(EVERY_S, self.turn)

    def release_warm(self) -> None:
        """Do once a second what the Controller does: pools release warm slices that are to be removed."""
        state = self._state
        for job in state.pending().others.values():
            for name in slices_to_remove(job, state.fleet):
                holder = state.holders.get(name)
                if holder is not None and not any(host.occupants for host in state.fleet.slice_workers(name)):
                    self._simulation.apply([SliceReleasedEvent(name, holder)])

    # -- Google ----------------------------------------------------------------------------------------------------

    def require_type(self, config: TPUConfig) -> None:
        """Take every type: this Google has all of them."""

    def queued_slices(self) -> list[QueuedSlice]:
        return [replace(one.listed, state=QueuedState.DELETING) if one.leaves else one.listed for one in self._all()]

    def _all(self) -> list[PaperSlice]:
        return list(self.slices.values())

    def create(self, wanted: NewSlice) -> str | None:
        listed = QueuedSlice(
            wanted.name, wanted.config.accelerator_type, QueuedState.PROVISIONING, {OWNER_LABEL: "b"},
            location=HERE, market=Market.RESERVED, reservation=self._source.reservation,
        )  # fmt: skip
        self.slices[wanted.name] = PaperSlice(listed, wanted.config)
        if sum(one.config.chip_count for one in self._all()) > self._chips:
            raise RuntimeError("a chip has two owners")
        self.made += 1
        self._simulation.agenda.after(MADE_S, self._is_made, wanted.name)
        return None

    def _is_made(self, name: str) -> None:
        if (one := self.slices.get(name)) is not None and not one.leaves:
            one.listed = replace(one.listed, state=QueuedState.ACTIVE)
            add_slice(self._simulation, name, one.config)

    def delete(self, name: str) -> str | None:
        if (one := self.slices.get(name)) is not None and not one.leaves:
            one.leaves = True
            self._simulation.agenda.after(DELETED_S, self._is_gone, name)
        return None

    def _is_gone(self, name: str) -> None:
        for host in list(self._state.fleet.slice_workers(name)):
            self._simulation.pools.host_is_lost(host)
            self._simulation.apply([WorkerFailedEvent(host.node_id, "its slice is deleted")])
        del self.slices[name]

    # -- the cluster -----------------------------------------------------------------------------------------------

    def look(self) -> tuple[Sequence[WaitingGang] | None, Mapping[str, Joined]]:
        fleet, joined = self._state.fleet, {}
        for name in fleet.grouping(TPU_NAME):
            hosts = fleet.slice_workers(name)
            in_use = any(host.occupants or fleet.holder_of(host) for host in hosts)
            joined[name] = Joined(True, in_use, any(TAINT_PREFIX + GIVEN_BACK in host.attributes for host in hosts))
        return demand_of(self._state, self._simulation.waits, self._simulation.now), joined

    def leave_chips(self, wanted: ChipsWanted) -> ChipsLeft:
        now = self._simulation.now
        event = promise_for(wanted, self._state, DEFAULT_RULES, self._simulation.waits, now)
        if isinstance(event, str):
            return ChipsLeft(why_not=event)
        if event is not None:
            self._simulation.apply([event])
        return left_for(wanted.job_id, self._state, now)

    def lease(self, owner: str, instance: str, seconds: float) -> None:
        pass

    def report(self, report: CapacityReport) -> None:
        pass

    def close(self, name: str) -> None:
        self._simulation.apply([TaintedEvent(name, GIVEN_BACK, "it goes", self._simulation.now + CLOSED_S)])

    def reopen(self, name: str) -> None:
        self._simulation.apply([TaintLiftedEvent(name, GIVEN_BACK)])


def add_slice(simulation: Simulation, name: str, config: TPUConfig) -> None:
    """Add a slice's hosts to the cluster."""
    shared = {
        TPU_NAME: AttributeValue(name),
        TPU_TOPOLOGY: AttributeValue(config.name),
        TPU_VM_COUNT: AttributeValue(config.vm_count),
    }
    resources = {TPU: float(config.chips_per_vm), "CPU": 120.0}
    simulation.apply(
        WorkerRegisteredEvent(
            f"{name}-{number}", "10.0.0.1", {**shared, TPU_WORKER_ID: AttributeValue(number)}, resources
        )
        for number in range(config.vm_count)
    )


def run(policy: str, load: Load, days: float) -> str:
    """Simulate a policy, and return a row of the table."""
    simulation = Simulation(plan_every_s=5.0)
    zone = Zone(simulation, load.chips, Reach.HELD if policy == APART else Reach(policy))
    if policy == APART:
        for tpu_type, count in load.apart.items():
            for number in range(count):
                add_slice(simulation, f"{tpu_type}-{number}", get_tpu_config(tpu_type))
    else:
        simulation.agenda.after(EVERY_S, zone.turn)
    simulation.submit_all(iter(load.arrivals))
    for number in range(1, int(days * DAY / 15.0) + 1):
        simulation.run_until(number * 15.0)
        zone.release_warm()
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
    figures = f"{work / whole:.1%} | {lost / whole:.2%} | {evicted} | {zone.made} | {done} of {len(history.jobs)}"
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
