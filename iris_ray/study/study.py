"""A study compares policies on one fleet and one workload. Each policy meets the same jobs and losses."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, Literal

from iris_ray.actors.protocol.services import module_of
from iris_ray.errors import InvalidStudyError, ServiceUnavailableError
from iris_ray.model.checks import AUTO
from iris_ray.model.teams import Teams
from iris_ray.model.topology import get_tpu_config
from iris_ray.scheduler.eviction_costs import DEFAULT_RULES, EvictionRules
from iris_ray.scheduler.scheduler import BACKFILL_BOUND_S
from iris_ray.state.events import TeamsSetEvent
from iris_ray.study.agenda import Timings, strike_at_random
from iris_ray.study.hosts import CPUS
from iris_ray.study.jobs import JobStream, SimulatedJob, merged, on_whole_slices
from iris_ray.study.simulation import LOOK_AGAIN_S, Simulation
from iris_ray.study.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceKind:
    """Slices of one type. Times are in seconds; infinite: never.

    Args:
        tpu_type: such as ``v4-32``.
        count: the number of slices.
        cpus: the CPUs of each host.
        preempted_every_s: mean time between two preemptions of the same slice.
        notice_s: time between the notice of a preemption and the loss; None: there is no notice.
        away_s: time until a preempted slice returns.
        host_dies_every_s: mean time between two deaths of the same host.
        repair_s: time until a dead host returns.
    """

    tpu_type: str
    count: int
    cpus: float = CPUS
    preempted_every_s: float = math.inf
    notice_s: float | None = None
    away_s: float = 3600.0
    host_dies_every_s: float = math.inf
    repair_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """Hosts without TPU. Times are in seconds; infinite: never.

    Args:
        count: the number of hosts.
        cpus: the CPUs of each host.
        dies_every_s: mean time between two deaths of the same host.
        repair_s: time until a dead host returns.
    """

    count: int
    cpus: float
    dies_every_s: float = math.inf
    repair_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A user whose queue never ends.

    Args:
        stream: the jobs, all of this user.
        waiting: the number of jobs that always wait.
    """

    stream: JobStream
    user: str
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPolicy:
    """Choices of operators and users that a study compares.

    Args:
        spares: the number of slices that each gang on slices holds ready.
        heed_notices: whether the gangs that can save do so when they are told to move.
        backfill_bound_s: for how many seconds later jobs may pass a waiting job.
        evictions: whether jobs may take hosts from lower bands, and from teams beyond their quotas.
        grow_after: the option of all gangs on slices.
        quotas: whether there are teams; else their users share the fleet.
        parts: whether jobs get the parts of slices that they ask for; else they get as many whole slices.
        take_back: whether the chips of all slices are one reservation, and how far a provisioner goes to free chips for
            a waiting job (``--take-back``); None: the slices stay as they are.
    """

    name: str
    spares: int = 0
    heed_notices: bool = True
    backfill_bound_s: float = BACKFILL_BOUND_S
    evictions: bool = True
    grow_after: float | Literal["auto"] | None = AUTO
    quotas: bool = True
    parts: bool = True
    take_back: str | None = None

    def applied_to(self, job: SimulatedJob) -> SimulatedJob:
        """Return the job with the options of this policy."""
        spec = job.spec if self.parts else on_whole_slices(job.spec)
        if spec.coscheduling is not None:
            spec = replace(spec, spares=self.spares or spec.spares, grow_after=self.grow_after)
        return replace(job, spec=spec, heeds_notices=job.heeds_notices and self.heed_notices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A fleet, its work, and the policies to compare.

    Args:
        seconds: the simulated time.
        seed: the seed of all random numbers.
        slices, hosts: the fleet.
        streams: jobs that come at random.
        backlogs: users whose queues never end.
        traces: jobs of real clusters.
        teams: the teams to which users and jobs belong.
        policies: the policies; the first one is the baseline.
        timings: how long the actions of pools and hosts take.
        plan_every_s, look_again_s: see `Simulation`.
    """

    seconds: float
    seed: int = 0
    slices: tuple[SliceKind, ...] = ()
    hosts: tuple[HostKind, ...] = ()
    streams: tuple[JobStream, ...] = ()
    backlogs: tuple[Backlog, ...] = ()
    traces: tuple[Trace, ...] = ()
    teams: Teams = field(default_factory=Teams)
    policies: tuple[StudyPolicy, ...] = (StudyPolicy(name="default"),)
    timings: Timings = field(default_factory=Timings)
    plan_every_s: float = 0.0
    look_again_s: float = LOOK_AGAIN_S

    def simulation(self, policy: StudyPolicy, check_every: int = 0) -> Simulation:
        """Return a simulation of a policy, at its beginning; `run_until` runs it."""
        rules = DEFAULT_RULES if policy.evictions else None
        simulation = Simulation(
            self.timings, policy.backfill_bound_s, self.plan_every_s, self.look_again_s, check_every, rules
        )
        if policy.quotas and self.teams:
            simulation.apply([TeamsSetEvent(tuple(self.teams))])
        if policy.take_back is not None:
            self._share_chips(simulation, policy.take_back, rules)
        else:
            for number, kind in enumerate(self.slices):
                self._add_slices(simulation, kind, f"slices {number}")
        for number, hosts in enumerate(self.hosts):
            names = simulation.hosts.add_hosts(hosts.count, hosts.cpus)
            self._let_die(simulation, names, hosts.dies_every_s, hosts.repair_s, f"hosts {number}")
        streams = [stream.arrivals(self._chance(stream.name), self.seconds) for stream in self.streams]
        arrivals = merged([*streams, *(trace.arrivals for trace in self.traces)])
        simulation.submit_all((at, policy.applied_to(job)) for at, job in arrivals)
        for backlog in self.backlogs:
            jobs = self._jobs_of(backlog)
            simulation.keep_waiting((policy.applied_to(job) for job in jobs), backlog.waiting)
        return simulation

    def _share_chips(self, simulation: Simulation, take_back: str, rules: EvictionRules | None) -> None:
        chips = sum(kind.count * get_tpu_config(kind.tpu_type).chip_count for kind in self.slices)
        cpus = {kind.tpu_type: kind.cpus for kind in self.slices}
        reservations().SimulatedReservation(simulation, cpus, chips, take_back, rules, self.timings)

    def _add_slices(self, simulation: Simulation, kind: SliceKind, what: str) -> None:
        hosts, agenda = simulation.hosts, simulation.agenda
        names = hosts.add_slices(kind.tpu_type, kind.count, kind.cpus)
        if kind.preempted_every_s < math.inf:

            def preempt(name: str) -> None:
                hosts.preempt(name, kind.notice_s, kind.away_s)

            strike_at_random(agenda, names, kind.preempted_every_s, preempt, self._chance(f"preemptions of {what}"))
        members = [node_id for name in names for node_id in hosts.slices[name]]
        self._let_die(simulation, members, kind.host_dies_every_s, kind.repair_s, what)

    def _let_die(self, simulation: Simulation, names: list[str], every_s: float, repair_s: float, what: str) -> None:
        if every_s < math.inf:

            def die(node_id: str) -> None:
                simulation.hosts.lose([node_id], "the host died", repair_s)

            strike_at_random(simulation.agenda, names, every_s, die, self._chance(f"deaths of {what}"))

    def _jobs_of(self, backlog: Backlog) -> Iterator[SimulatedJob]:
        name, chance = f"{backlog.stream.name}-{backlog.user}", self._chance(f"{backlog.stream.name} {backlog.user}")
        return (backlog.stream.job(f"{name}-{number}", chance) for number in count())

    def _chance(self, what: str) -> Random:
        """Return a random generator for one purpose, independent of the generators for other purposes."""
        return Random(f"{self.seed} {what}")


def reservations() -> Any:
    """Return the module of the service ``capacity`` that simulates a reservation.

    Raises:
        InvalidStudyError: the service was taken out.
    """
    try:
        return module_of("capacity", "simulated")
    except ServiceUnavailableError as error:
        raise InvalidStudyError(f"a policy with take_back needs the provisioner: {error}") from None
