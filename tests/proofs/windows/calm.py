"""A calm before the end of a world: a service runs on, a job waits for the whole fleet, and small jobs come and go."""

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Job
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.calendar import LEAST_LOAN_S
from iris_ray.state.events import JobCancelledEvent, JobSubmittedEvent
from tests.proofs.windows.outsider import SETTLES_S
from tests.proofs.windows.quiet import Quiet
from tests.support.worlds import gang_spec

SERVICE_RUNS_S = 1200.0
"""How long the service has run before the large job comes: nobody takes its end for near."""
FOR_EVER_S = 1e9


class Calm(Quiet):
    """The end of a world, with a calm before it, in which slices that are kept for the large job are idle or lent."""

    def play(self) -> None:
        self._faults_end()
        self._all_end()
        if len(self._world.slices) > 1:
            self._small_jobs_pass()
        super().play()

    def _small_jobs_pass(self) -> None:
        world, chance = self._world, self._chance
        band = chance.choice((PriorityBand.PRODUCTION, PriorityBand.INTERACTIVE))
        service = self._submit("service", band=PriorityBand.PRODUCTION)
        self._left_s["service", 0] = FOR_EVER_S
        self._go_on_for(SERVICE_RUNS_S)
        large = self._submit("large", slices=(len(world.slices),), band=band)
        until, number = world.now + 3 * (world.bound_s + world.grace_s + LEAST_LOAN_S + SETTLES_S), 0
        while world.now < until:
            while sum(job.spec.job_id.startswith("small") for job in world.state.pending()) < 2:
                number += 1
                limit = chance.choice((None, None, 30.0, 3600.0))
                self._submit(f"small-{number}", band=PriorityBand.BATCH, max_runtime=limit)
            self._go_on()
        world.counts["small jobs beside a large one"] += number
        for job in (service, large):
            world.apply(JobCancelledEvent(job.spec.job_id, "it has waited, or run, for long enough"))

    def _submit(self, name: str, slices: tuple[int, ...] = (1,), **changes: object) -> Job:
        """Submit a job of a user of its own, whom no limit concerns."""
        world, terms = self._world, {"priority": changes.pop("band"), **changes}
        spec: JobSpec = gang_spec(name, world.tpu_type, slices, user=name, max_retries_preemption=1000, **terms)
        world.apply(JobSubmittedEvent(spec, world.now))
        return world.state.jobs[name]

    def _go_on_for(self, seconds: float) -> None:
        until = self._world.now + seconds
        while self._world.now < until:
            self._go_on()
