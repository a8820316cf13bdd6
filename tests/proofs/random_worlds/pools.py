"""Pools whose reports are late, doubled and overtake each other, and an account of what really runs on the hosts."""

import math
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
        returned: the attempts whose results some pool has.
    """

    def begin(self, note: Callable[[PlacedGang], None]) -> None:
        self.running: dict[AttemptId, dict[str, Mapping[str, float]]] = {}
        self.incarnations: dict[str, int] = {}
        self.returned: set[AttemptId] = set()
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

    def _returned(self, attempt: SimulatedAttempt) -> None:
        if attempt.id in self._live:
            self.returned.add(attempt.id)
        super()._returned(attempt)

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
        self.returned = {attempt for attempt in self.returned if attempt.job_id not in whose}
        for name in self.held_by(owner):
            del self._warm[name]

    def held_by(self, owner: str) -> list[str]:
        """The slices on which a pool has processes."""
        return [name for name, holder in self._warm.items() if holder == owner]

    def starting(self) -> list[AttemptId]:
        """The attempts that have not begun."""
        return [attempt.id for attempt in self._live.values() if attempt.began_at == math.inf]

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, on_their_way: set[AttemptId], given_next: Instructions) -> None:
        """The Controller knows of everything that runs, holds nothing for what does not, and has had the rest stopped.

        Args:
            on_their_way: attempts whose ends the pools have reported, and the Controller has not heard of.
            given_next: what the Controller will have stopped, or dropped and takes for gone, with its next orders.
        """
        to_be_dropped = {one.job_id for one in given_next.dropped}
        for attempt, held in self.running.items():
            for node_id in held if attempt.job_id not in to_be_dropped else ():
                occupants = {one for _, one in self._state.workers[node_id].occupants}
                assert attempt in occupants, f"{attempt} runs on {node_id}, which the Controller takes for free"
        believed = {attempt for worker in self._state.workers.values() for _, attempt in worker.occupants}
        outlived = believed - self.running.keys() - on_their_way
        assert not outlived, f"hosts are held for {sorted(outlived)}, of which nothing runs"
        ending = {attempt for worker in self._state.workers.values() for _, attempt in worker.ending}
        go_on = ending & self._live.keys() - {one.attempt for one in given_next.stop}
        assert not go_on, f"{sorted(go_on)} are over, and their pools have not been told"
        begun = (attempt for attempt in self._live.values() if attempt.began_at < math.inf)
        unheld = {name for attempt in begun for name in attempt.slices} - self._state.holders.keys()
        assert not unheld, f"nobody is known to hold {sorted(unheld)}, where tasks run"
        for job in self._state.jobs.values():
            done = (gang for gang in job.gangs if gang.succeeded == len(gang.tasks) and not job.state.finished)
            lost = {job.current_attempt(gang) for gang in done} - self.returned
            assert not lost, f"{sorted(lost)} have succeeded, and nobody has their results"
