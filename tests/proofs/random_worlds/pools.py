"""Pools whose reports are late, doubled and overtake each other, and an account of what really runs on the hosts."""

from collections.abc import Callable, Iterable, Mapping

from iris_ray.model.lifecycle import AttemptId
from iris_ray.model.workers import TPU
from iris_ray.scheduler.planner import PlacedGang
from iris_ray.state import ControllerState
from iris_ray.state.events import AttemptEndConfirmedEvent, Event
from iris_ray.state.instructions import Instructions, StopAttempt
from iris_ray.study.pools import SimulatedAttempt, SimulatedPools


class Pools(SimulatedPools):
    """Simulated pools that outlive the Controller.

    Attributes:
        running: what really runs: hosts by attempt, until no process of the attempt is left.
        incarnations: which process each pool is, by owner; without those that are gone.
    """

    def begin(self, note: Callable[[PlacedGang], None]) -> None:
        self.running: dict[AttemptId, dict[str, Mapping[str, float]]] = {}
        self.incarnations: dict[str, int] = {}
        self._ordered: set[AttemptId] = set()
        self._dropped: set[str] = set()  # spares
        self._note = note

    def meet(self, state: ControllerState) -> None:
        """Talk to another Controller from now on."""
        self._state = state

    # -- orders --------------------------------------------------------------------------------------------------------

    def carry_out(self, instructions: Instructions, placements: Iterable[PlacedGang]) -> None:
        """Obey. Orders that were given already, to pools that are gone, or for dropped spares change nothing."""
        self._dropped.update(one.job_id for one in instructions.dropped)
        new = []
        for placement in placements:
            attempt = placement.job.current_attempt(placement.gang)
            wanted = attempt.job_id not in self._dropped and placement.job.spec.owner in self.incarnations
            if wanted and attempt not in self._ordered:
                self._ordered.add(attempt)
                self._note(placement)
                new.append(placement)
        super().carry_out(instructions, new)

    def forget_unknown(self) -> None:
        """Drop the spares that a new Controller does not know, and the jobs that it has ended."""
        for attempt in list(self._live.values()):
            if attempt.work is None and attempt.id.job_id not in self._state.jobs:
                self._drop(attempt.id.job_id)
        for job_id in list(self._work):
            if (job := self._state.jobs.get(job_id)) is not None and job.state.finished:
                self._forget(job_id)

    def _start(self, placement: PlacedGang) -> None:
        job, gang = placement.job, placement.gang
        hosts = [self._state.workers[task.node_id or ""] for task in gang.tasks]
        held: dict[str, Mapping[str, float]] = {host.node_id: job.requirement.demand(host) for host in hosts}
        attempt = job.current_attempt(gang)
        if any(TPU in demand for demand in held.values()):
            for other, theirs in self.running.items():
                shared = [node_id for node_id in held.keys() & theirs.keys() if TPU in theirs[node_id]]
                assert not shared, f"{attempt} starts on {sorted(shared)}, where {other} still runs"
        self.running[attempt] = held
        super()._start(placement)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _confirm(self, attempt: SimulatedAttempt, *events: Event) -> None:
        if self.running.pop(attempt.id, None) is not None:  # else its pool has died meanwhile
            super()._confirm(attempt, *events)

    def _stop(self, stop: StopAttempt) -> None:
        if stop.attempt in self.running:
            super()._stop(stop)
        else:  # a pool that is asked to stop what does not run says so
            self._apply([AttemptEndConfirmedEvent(stop.attempt)])

    def _drop(self, job_id: str) -> None:
        super()._drop(job_id)
        for attempt in [attempt for attempt in self.running if attempt.job_id == job_id]:
            del self.running[attempt]

    def host_lost(self, node_id: str) -> None:
        """All that ran on a host is gone."""
        for held in self.running.values():
            held.pop(node_id, None)

    def died(self, owner: str, jobs: Iterable[str]) -> None:
        """The process of a pool has died, and all that it ran with it."""
        for attempt in [attempt for attempt in self._live.values() if attempt.owner == owner]:
            self._end(attempt, "its pool died")
        whose = set(jobs)
        for attempt_id in [attempt for attempt in self.running if attempt.job_id in whose]:
            del self.running[attempt_id]
            self._history.freed(attempt_id, self._agenda.now)
        for name in self.held_by(owner):
            del self._warm[name]

    def held_by(self, owner: str) -> list[str]:
        """The slices on which a pool has processes."""
        return [name for name, holder in self._warm.items() if holder == owner]

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, on_their_way: set[AttemptId], to_be_dropped: set[str]) -> None:
        """The Controller knows of everything that runs, and holds nothing for what does not.

        Args:
            on_their_way: attempts whose ends the pools have reported, and the Controller has not heard of.
            to_be_dropped: spares that the Controller will have dropped with its next orders, and takes for gone.
        """
        for attempt, held in self.running.items():
            for node_id in held if attempt.job_id not in to_be_dropped else ():
                occupants = {one for _, one in self._state.workers[node_id].occupants}
                assert attempt in occupants, f"{attempt} runs on {node_id}, which the Controller takes for free"
        believed = {attempt for worker in self._state.workers.values() for _, attempt in worker.occupants}
        outlived = believed - self.running.keys() - on_their_way
        assert not outlived, f"hosts are held for {sorted(outlived)}, of which nothing runs"
