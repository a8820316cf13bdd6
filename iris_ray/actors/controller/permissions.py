"""Permissions: users may end and enter their own jobs, operators also others', and pools report about their own jobs.

They protect from mistakes, not from malice: a process names its user itself, see SECURITY.md.
"""

import logging
from collections.abc import Iterable
from typing import TypeVar

from iris_ray.actors.controller.node_table import NodeDiff
from iris_ray.actors.protocol.controller_interface import ReportedEvent
from iris_ray.errors import NotPermittedError
from iris_ray.model.cluster_settings import OPERATORS
from iris_ray.model.job_spec import JobSpec, require_reason
from iris_ray.model.jobs import Job
from iris_ray.model.options import PriorityBand
from iris_ray.state import ControllerState
from iris_ray.state.controller_state import job_of
from iris_ray.state.events import SliceReleasedEvent

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=ReportedEvent)


class Permissions:
    """Refuses calls that a user or a pool may not make.

    Args:
        state: read only; knows the operators, and the owners of jobs and slices.
        nodes: read only; knows the slices of hosts that are gone.
    """

    def __init__(self, state: ControllerState, nodes: NodeDiff) -> None:
        self._state = state
        self._nodes = nodes

    # -- people ----------------------------------------------------------------------------------------------------

    def require_operator(self, user: str, what: str) -> None:
        """Refuse users who are not operators; ``what`` names the action, such as "set limits".

        Raises:
            NotPermittedError: the user is not an operator.
        """
        if not self._is_operator(user):
            raise NotPermittedError(f"only operators may {what}, and {user} is not an operator; {self._operators_are}")

    def require_own(self, user: str, job: Job, what: str = "cancel it") -> None:
        """Refuse a user who is neither the job's user nor an operator; ``what`` names the action.

        Raises:
            NotPermittedError: the user is neither.
        """
        if user != job.spec.user and not self._is_operator(user):
            raise NotPermittedError(
                f"{job.spec.job_id} belongs to {job.spec.user}: only {job.spec.user} and operators may {what}, and"
                f" {user} is neither; {self._operators_are}"
            )

    def require_band(self, spec: JobSpec) -> None:
        """Refuse a job of the band SYSTEM whose user is not an operator, or that gives no reason.

        Raises:
            NotPermittedError: the user is not an operator.
            InvalidJobError: there is no reason.
        """
        if spec.priority is PriorityBand.SYSTEM:
            self.require_operator(spec.user, "submit jobs in the band system")
            require_reason(spec.priority, spec.priority_reason)

    def _is_operator(self, user: str) -> bool:
        operators = self._state.settings.value(OPERATORS)
        return operators is None or user in operators

    @property
    def _operators_are(self) -> str:
        names = ", ".join(sorted(self._state.settings.value(OPERATORS) or ()))
        return (
            f"operators are: {names} (one of them can change that: iris-ray cluster settings set {OPERATORS.name}=...)"
        )

    # -- pools -----------------------------------------------------------------------------------------------------

    def require_pools_own(self, owner: str, job_id: str) -> None:
        """Refuse a pool's message about the job of another pool. A job that is not known has no owner.

        Raises:
            NotPermittedError: the job is another pool's.
        """
        job = self._state.jobs.get(job_id)
        if job is not None and job.spec.owner != owner:
            raise NotPermittedError(f"{job_id} is not a job of pool {owner}, which has sent a message about it")

    def of_pools_own(self, owner: str, events: Iterable[E]) -> list[E]:
        """Return a pool's events without those about hosts that only other pools use.

        Such an event is dropped and not refused: the pool may have lost the host a moment ago.

        Raises:
            NotPermittedError: an event is about the job or the slices of another pool.
        """
        events = list(events)
        for job_id in {job_of(event) for event in events}:
            self.require_pools_own(owner, job_id)
        if any(isinstance(event, SliceReleasedEvent) and event.owner != owner for event in events):
            raise NotPermittedError(f"pool {owner} can't release slices of another pool")
        return [event for event in events if not self._is_about_others_host(owner, event)]

    def _is_about_others_host(self, owner: str, event: ReportedEvent) -> bool:
        node_id: str | None = getattr(event, "node_id", None)
        if node_id is None:
            return False
        worker = self._state.workers.get(node_id)
        users = {self._state.jobs[attempt.job_id].spec.owner for _, attempt in worker.occupants} if worker else set()
        last_slice = self._nodes.slices_of([node_id]).get(node_id, "")
        holder = self._state.fleet.holder_of(worker) if worker else self._state.holders.get(last_slice)
        if owner in users or owner == holder or not (users or holder):
            return False
        logger.warning("refused: pool %s reports about host %s, which others use: %s", owner, node_id, event)
        return True
