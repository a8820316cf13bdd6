"""Jobs that iris_ray could not handle: they were ended, so that they stop nobody else."""

import logging
from collections.abc import Iterable, Mapping

from iris_ray.state import ControllerState
from iris_ray.state.controller_state import apply_safely, job_of
from iris_ray.state.events import AttemptEndConfirmedEvent, Event, JobCancelledEvent
from iris_ray.state.instructions import Instructions

logger = logging.getLogger(__name__)

MOST_KEPT = 1000
"""Jobs that are remembered; the oldest are forgotten first."""


class BrokenStateError(Exception):
    """The state is not as it should be. Only a new process helps, which reads it from the records."""


class SetAsideJobs:
    """Ends the jobs of events that failed, and remembers why.

    Args:
        state: what the events were for.
    """

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._why: dict[str, str] = {}

    @property
    def jobs(self) -> Mapping[str, str]:
        """Why each job was set aside, by its id."""
        return self._why

    def without(self, events: Iterable[Event]) -> list[Event]:
        """Return the events that are not about these jobs, and the ends of their attempts: the hosts are to be free."""
        if not self._why:
            return list(events)
        return [e for e in events if isinstance(e, AttemptEndConfirmedEvent) or job_of(e) not in self._why]

    def end_those_of_failed(self, instructions: Instructions) -> None:
        """End the job of each event that failed, and check that the state is whole.

        An event is handled in steps, and the first of them may have been done.

        Args:
            instructions: has the events; what their ends want done is added here.

        Raises:
            BrokenStateError: it is not; the jobs are noted all the same.
        """
        failed, instructions.failed = instructions.failed, []
        if not failed:
            return
        for failure in failed:
            self.end(self._job_to_blame(failure.event), "handled", failure.error, instructions)
        try:
            assert not instructions.failed, "a job that failed can't be ended"
            self._state.check()
        except Exception as error:
            raise BrokenStateError(f"{error}; after {failed[0].error!r}") from failed[0].error

    def end(self, job_id: str, what: str, error: Exception, instructions: Instructions) -> None:
        """End a job that could not be handled, if it has not ended already.

        Args:
            job_id: which; nothing is done for an empty one.
            what: could not be done to it: "handled", "recorded", …
            error: what was raised.
            instructions: what the end wants done is added here.
        """
        if not job_id:
            return
        reason = (
            f"iris_ray has set it aside: it could not be {what}, by a defect of iris_ray ({type(error).__name__}:"
            f" {str(error)[:500]}). Other jobs go on. The Controller's log has more: please report it"
        )
        logger.error("%s is set aside", job_id, exc_info=error)
        self.end_again(job_id, reason, instructions)

    def end_again(self, job_id: str, reason: str, instructions: Instructions) -> None:
        """End a job for a reason that is known."""
        self._why[job_id] = reason
        while len(self._why) > MOST_KEPT:
            del self._why[next(iter(self._why))]
        apply_safely(self._state, [JobCancelledEvent(job_id, reason)], instructions)

    def _job_to_blame(self, event: object) -> str:
        """Return the id of the job that an event is about; a spare's is that of the job that it is for."""
        job_id = job_of(event)  # type: ignore[arg-type]
        job = self._state.jobs.get(job_id)
        return job_id if job is None or job.spec.spare_for is None else job.spec.spare_for.job_id
