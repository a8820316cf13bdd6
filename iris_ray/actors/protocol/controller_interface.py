"""The interface of the Controller, for people (see `ControllerConnection`) and for pools (see `ControllerClient`).

To add a question: write it here, give `UserCalls` or `PoolCalls` a method of that name, and ask.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from iris_ray.actors.protocol.marks import in_pages, within
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.actors.protocol.status import (
    JobEvent,
    JobStatus,
    Place,
    TaskStatus,
    WorkerStatus,
)
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.outcomes import HostEvidence, ProviderWord
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    AttemptMarkedEvent,
    GangMovedEvent,
    GangReturnedEvent,
    JobCancelledEvent,
    MaintenanceCalledOffEvent,
    SliceReleasedEvent,
    TaskDispatchFailedEvent,
    TaskStateChangedEvent,
    WorkerBlamedEvent,
    WorkerDrainedEvent,
    WorkerSuspectedEvent,
)

if TYPE_CHECKING:  # these import Ray, which would make each command slow
    from ray.actor import ActorHandle

    from iris_ray.actors.protocol.messages import GangProgress, JobView, PoolProcess

P = ParamSpec("P")
T = TypeVar("T")

OVER_WITHIN_S, ANSWER_S = 60.0, 10.0

ReportedEvent = (
    TaskStateChangedEvent
    | AttemptEndConfirmedEvent
    | AttemptMarkedEvent
    | TaskDispatchFailedEvent
    | SliceReleasedEvent
    | WorkerSuspectedEvent
    | WorkerBlamedEvent
    | WorkerDrainedEvent
    | MaintenanceCalledOffEvent
    | GangMovedEvent
    | GangReturnedEvent
    | JobCancelledEvent
)
"""The events that pools report. The Controller sees or decides all others itself."""


class ForPeople(Protocol):
    """The questions of people, through the command line, `IrisClient` and the dashboard."""

    @in_pages(by="number")
    async def list_jobs(self, after: int = 0) -> list[JobStatus]:
        """Return a page of all known jobs, the oldest first, from the job after the one with this number."""

    async def job_status(self, job_id: str) -> JobStatus:
        """Return the status of one job.

        Raises:
            UnknownNameError: there is no such job.
        """

    async def job_events(self, job_id: str) -> list[JobEvent]:
        """Return the events of a job, oldest first. Raise like `job_status`."""

    @in_pages(by="task_index")
    async def list_tasks(self, job_id: str, after: int = -1) -> list[TaskStatus]:
        """Return a page of a job's tasks, from the one after this index. Raise like `job_status`."""

    async def task_status(self, job_id: str, index: int) -> TaskStatus:
        """Return the status of one task.

        Raises:
            UnknownNameError: there is no such job, or it has no such task.
        """

    @in_pages(by="place")
    async def list_workers(self, after: Place = ("", -1, "")) -> list[WorkerStatus]:
        """Return a page of the live hosts, by slice and number, from the one after this place.

        Hosts that no job gets, because of their labels or chips, are included with the reason.
        """

    async def changes(self, since: Position) -> Changes:
        """Return the changes since a position, for programs that watch the whole cluster."""

    async def cancel(self, job_id: str, reason: str, user: str) -> JobStatus:
        """End a job in any state. Return its status before.

        Raises:
            UnknownNameError: there is no such job.
            NotPermittedError: it is another user's job, and the user is not an operator.
        """

    async def set_yielding(self, yielding: Mapping[str, bool], user: str) -> None:
        """Set by job id whether a job yields its hosts to any waiting job. Unknown jobs are ignored.

        Raises:
            NotPermittedError: one is another user's job, and the user is not an operator.
        """

    async def require_own(self, job_id: str, user: str, what: str) -> None:
        """Refuse a user who is neither the job's nor an operator, before a command acts on the job.

        Args:
            job_id: the job.
            user: who wants to act.
            what: names the action, such as "run commands on its hosts".

        Raises:
            UnknownNameError: there is no such job.
            NotPermittedError: it is another user's job, and the user is not an operator.
        """

    async def require_operator(self, user: str, what: str) -> None:
        """Refuse users who are not operators, before a command acts outside of the Controller.

        Args:
            user: who wants to act.
            what: names the action, such as "give notice to hosts".

        Raises:
            NotPermittedError: the user is not an operator.
        """

    async def taint(self, target: str, taint: str, reason: str, user: str, seconds: float | None = None) -> list[str]:
        """Keep jobs that don't tolerate the taint off a host or slice. Return the ids of the tainted hosts.

        Args:
            target: the host or slice.
            taint: the taint's name.
            reason: is shown to people.
            user: who asks.
            seconds: the time after which the taint expires, unless it is set again; None: never.

        Raises:
            UnknownNameError: there is no such host or slice.
            NotPermittedError: the user is not an operator.
        """

    async def lift_taint(self, target: str, taint: str, user: str) -> list[str]:
        """Lift a taint. Return the ids of the hosts.

        Raises:
            UnknownNameError: this host or slice does not have the taint.
            NotPermittedError: the user is not an operator.
        """

    async def list_settings(self) -> dict[str, WasSet]:
        """Return the cluster's settings that an operator has set, by name. All others have their defaults."""

    async def set_settings(self, texts: Mapping[str, str | None], unless_set: bool, user: str) -> dict[str, WasSet]:
        """Set some settings of the cluster, all or none, and apply them at once. Return all that are set then.

        Args:
            texts: the new values by name; None: the default. A call that changes nothing needs no operator.
            unless_set: whether to leave out settings that were set before.
            user: who sets them.

        Raises:
            UnknownNameError: there is no such setting.
            InvalidRequestError: a setting can't have this value.
            NotPermittedError: the user is not an operator.
        """

    async def statistics(self) -> dict[str, int]:
        """Return counts since this Controller began: starved, timed out and unschedulable jobs, evicted attempts."""

    async def about(self) -> dict[str, Any]:
        """Return this Controller's epoch, version, process and node, and the jobs and records that it set aside.

        ``services`` holds what each service has published about itself, ``service_health`` a `ServiceHealth` of each.
        """


class ForPools(Protocol):
    """The questions and reports of pools. Each may arrive twice."""

    async def submit(self, spec: JobSpec, pool: "ActorHandle", incarnation: int) -> JobState:
        """Accept a job and return its state. Submitting the same job again changes nothing.

        Args:
            spec: the job.
            pool: the pool that runs it.
            incarnation: number of the pool's process; a larger one than before means that the pool was restarted.

        Raises:
            SupersededError: a newer process of the pool has replaced this one.
            InvalidJobError: there is another job with this id, or the caller is not a pool.
            JobCancelledError: iris_ray could not handle the job and has set it aside.
            LimitReachedError: its user has too many waiting jobs, or too many tasks.
            UnknownNameError, NotPermittedError, InvalidTeamsError: as for `Teams.team_for`.
            NotPermittedError: it is in the band SYSTEM, and its user is not an operator.
            SecretNotFoundError, SecretStoreError: it asks for a secret that the store does not have, or can't read.
        """

    async def report(
        self,
        job_id: str | None,
        events: list[ReportedEvent],
        gang: int = 0,
        sender: "PoolProcess | None" = None,
        sent_at: float | None = None,
    ) -> "JobView | None":
        """Apply a pool's events. Return the state of a gang of the job.

        Args:
            job_id, gang: the job and the number of the gang; no state is returned for None.
            events: in their order.
            sender: the process that reports.
            sent_at: the time on the sender's clock, by which deadlines are told; None: that is the Controller's clock.

        Raises:
            SupersededError: a newer process of the pool has replaced the sender.
            NotPermittedError: an event is about a job or slice of another pool.
            InvalidMessageError: a host's notice has a kind that only the Controller gives.
        """

    @within(OVER_WITHIN_S + ANSWER_S)
    async def until_over(self, job_id: str) -> bool:
        """Wait at most `OVER_WITHIN_S` until a job has ended or is forgotten. Return whether it has."""

    async def why(self, job_id: str) -> str:
        """Return in a sentence why a job, or a part of it, is not running."""

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        """Return the Controller's evidence about these hosts: how they were lost, and their notices."""

    async def is_to_grow(self, attempt: AttemptId) -> bool:
        """Return whether the larger slices that an attempt's gang was told to move to are still free for it."""

    async def provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        """Return the cloud provider's statements about the slices of these silent hosts, from services."""

    async def note_progress(self, progress: "GangProgress", sender: "PoolProcess") -> None:
        """Remember the progress of an attempt.

        Raises:
            NotPermittedError: they are tasks of another pool.
        """


class ControllerInterface(ForPeople, ForPools, Protocol):
    """All methods of the Controller. A caller checks the Controller's version first."""

    async def versions(self) -> dict[str, Any]:
        """Return `versions_here`. Answer clients of all versions, even during the start."""

    async def serve(self, service: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a service; see `iris_ray.actors.protocol.services.addressed`.

        Raises:
            ServiceUnavailableError: the service is failing, or was taken out.
            InvalidMessageError: it has no such call.
            Exception: the service's own error.
        """

    async def ping(self) -> None:
        """Wait until the start is over: the Controller has read the hosts and the records of an earlier Controller.

        Raises:
            UnknownRecordError: another version of iris_ray wrote the records.
            ControllerUnavailableError: it could not start for another reason, or has failed and is about to restart.
            DeposedError: another Controller has taken over.
        """


Question = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
"""A method of the interface, or of the Protocol of a service's calls (see `iris_ray.actors.protocol.services`)."""
