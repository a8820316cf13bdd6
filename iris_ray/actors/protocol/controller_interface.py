"""What the Controller may be asked: by people (see `ControllerConnection`), and by pools (see `ControllerClient`).

To add a question: write it here, give `UserCalls` or `PoolCalls` a method of that name, and ask.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from iris_ray.actors.protocol.marks import in_pages
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.actors.protocol.status import (
    JobEvent,
    JobGoodput,
    JobStatus,
    LimitStatus,
    Place,
    TaskStatus,
    WorkerStatus,
)
from iris_ray.actors.protocol.task_log import LastLines, LogPlace, LogPosition, TaskLog
from iris_ray.model.cluster_settings import WasSet
from iris_ray.model.goodput_sums import UserDay
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import AttemptId, JobState
from iris_ray.model.limits import Limits
from iris_ray.model.options import PriorityBand
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

if TYPE_CHECKING:  # these need Ray, for which people would wait at each command
    from ray.actor import ActorHandle

    from iris_ray.actors.protocol.messages import GangProgress, JobView, PoolProcess

P = ParamSpec("P")
T = TypeVar("T")

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
"""What pools report. Everything else that happens, the Controller sees or decides itself."""


class ForPeople(Protocol):
    """What people ask, through the command line, `IrisClient` and the dashboard."""

    @in_pages(by="number")
    async def list_jobs(self, after: int = 0) -> list[JobStatus]:
        """Return a page of the jobs that are known, the oldest first: those after the one with this number."""

    async def job_status(self, job_id: str) -> JobStatus:
        """Return how one job stands.

        Raises:
            UnknownNameError: there is no such job.
        """

    async def job_events(self, job_id: str) -> list[JobEvent]:
        """Return what has happened to a job, oldest first. Raise like `job_status`."""

    @in_pages(by="number")
    async def list_goodput(self, after: int = 0) -> list[JobGoodput]:
        """Return a page of what the time of gangs went into, the oldest first: those after the job with this number."""

    async def job_goodput(self, job_id: str) -> JobGoodput:
        """Return what the time of one job went into.

        Raises:
            UnknownNameError: there is no such job.
            InvalidRequestError: it is no gang.
        """

    async def user_times(self, since: float) -> list[UserDay]:
        """Return what the time of forgotten jobs went into, by the day of their end and user, since a time."""

    async def fleet_times(self, since: str) -> dict[str, dict[str, float]]:
        """Return chip-seconds by day and state, since a day in UTC, such as 2026-11-23."""

    @in_pages(by="task_index")
    async def list_tasks(self, job_id: str, after: int = -1) -> list[TaskStatus]:
        """Return a page of the tasks of a job: those that come after this index. Raise like `job_status`."""

    async def task_status(self, job_id: str, index: int) -> TaskStatus:
        """Return how one task stands.

        Raises:
            UnknownNameError: there is no such job, or it has no such task.
        """

    async def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        """Return a piece of what a task has printed.

        Args:
            job_id, task_index: which task.
            at: where the piece begins, and in which attempt.
            max_bytes: how long it may be.

        Raises:
            UnknownNameError: there is no such job, task or attempt.
        """

    async def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Return pieces of what several tasks of a job have printed, by task index, without tasks that do not exist.

        At most `MOST_LOGS` tasks are read; those beyond are left out, too, and to be asked for again.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """

    async def locate_logs(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        """Return where the logs of several tasks of a job are, by task index: the first `MOST_LOGS` that exist.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """

    @in_pages(by="place")
    async def list_workers(self, after: Place = ("", -1, "")) -> list[WorkerStatus]:
        """Return a page of the live hosts, by slice and number: those that come after this place.

        Hosts that no job gets, because of their labels or chips, are among them, each with the reason.
        """

    async def changes(self, since: Position) -> Changes:
        """Return what has changed since a position, for those who watch the whole cluster."""

    async def cancel(self, job_id: str, reason: str, user: str) -> JobStatus:
        """End a job, wherever it stands. Return how it stood before.

        Raises:
            UnknownNameError: there is no such job.
            NotPermittedError: it is a job of somebody else, and the user is no operator.
        """

    async def set_yielding(self, yielding: Mapping[str, bool], user: str) -> None:
        """Note which jobs give their hosts to whoever waits, and which do so no more. Unknown ones are left out.

        Raises:
            NotPermittedError: one is a job of somebody else, and the user is no operator.
        """

    async def taint(self, target: str, taint: str, reason: str, user: str) -> list[str]:
        """Keep jobs that don't tolerate the taint away from a host or slice. Return the ids of the hosts concerned.

        Raises:
            UnknownNameError: there is no such host or slice.
            NotPermittedError: the user is no operator.
        """

    async def lift_taint(self, target: str, taint: str, user: str) -> list[str]:
        """Lift a taint. Return the ids of the hosts concerned.

        Raises:
            UnknownNameError: nothing of that name was tainted so.
            NotPermittedError: the user is no operator.
        """

    async def list_limits(self) -> list[LimitStatus]:
        """Return what each user has and may have: first the limits of everybody, then those of each user with jobs."""

    async def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        """Set some limits of a user, or of everybody. Return how all limits stand then.

        Args:
            whose: the user, or `EVERYBODY`.
            bands: in which bands.
            limits: those that are None stay as they are.
            reset: forget those that were set before.
            user: who sets them.

        Raises:
            NotPermittedError: the user is no operator.
        """

    async def list_settings(self) -> dict[str, WasSet]:
        """Return the cluster's settings that somebody has set, by name. All others have their defaults."""

    async def set_settings(self, texts: Mapping[str, str | None], unless_set: bool, user: str) -> dict[str, WasSet]:
        """Set some settings of the cluster, all or none; do as they say at once. Return those that are set then.

        Args:
            texts: what to set, by name; None: the default. What is so already needs no operator.
            unless_set: leave out what somebody has set before.
            user: who sets them.

        Raises:
            UnknownNameError: there is no such setting.
            InvalidRequestError: a setting can't have this value.
            NotPermittedError: the user is no operator.
        """

    async def statistics(self) -> dict[str, int]:
        """Return counts since this Controller began: starved, timed out and unschedulable jobs, evicted attempts."""

    async def demand(self) -> dict[str, list[int]]:
        """Return how many more slices of each type each gang that waits would need to run; see `missing_slices`."""

    async def about(self) -> dict[str, Any]:
        """Return who this Controller is: epoch, version, process, node; and what it could not handle."""


class ForPools(Protocol):
    """What pools ask, and what they tell the Controller. Every question may arrive twice."""

    async def submit(self, spec: JobSpec, pool: "ActorHandle", incarnation: int) -> JobState:
        """Take a job and return how it stands. Submitting the same one again changes nothing.

        Args:
            spec: the job.
            pool: who runs it.
            incarnation: number of the pool's process; a larger one than before means that it was started anew.

        Raises:
            SupersededError: a newer process has taken this one's place.
            InvalidJobError: there is another job of this id, or what calls is no pool.
            JobCancelledError: iris_ray could not handle it and has set it aside.
            LimitReachedError: its user has too many jobs that wait, or too many tasks.
        """

    async def report(
        self, job_id: str | None, events: list[ReportedEvent], gang: int = 0, sender: "PoolProcess | None" = None
    ) -> "JobView | None":
        """Take what a pool has to say, and answer how a gang of the job stands now.

        Raises:
            SupersededError: a newer process of the pool has taken the sender's place.
            NotPermittedError: it is about what another pool has.
            InvalidMessageError: it has a host's notice of a kind that only the Controller gives.
        """

    async def why(self, job_id: str) -> str:
        """Return in a sentence why a job is not running, or not all of it."""

    async def evidence(self, node_ids: list[str]) -> dict[str, HostEvidence]:
        """Return what is known about these hosts."""

    async def is_to_grow(self, attempt: AttemptId) -> bool:
        """Return whether the slices that an attempt's gang was told to move to are still there for it."""

    async def provider_words(self, node_ids: list[str]) -> dict[str, ProviderWord]:
        """Return what the provider says about the slices of these silent hosts; nothing if it is not asked."""

    async def note_last_lines(self, batch: list[LastLines], sender: "PoolProcess") -> None:
        """Remember what tasks of a pool have printed last, in case that their hosts vanish.

        Raises:
            NotPermittedError: they are tasks of another pool.
        """

    async def note_progress(self, progress: "GangProgress", sender: "PoolProcess") -> None:
        """Remember what the tasks of an attempt have said about themselves.

        Raises:
            NotPermittedError: they are tasks of another pool.
        """


class ControllerInterface(ForPeople, ForPools, Protocol):
    """All that the Controller may be asked. Whoever calls the Controller checks its version first."""

    async def versions(self) -> dict[str, Any]:
        """Return the version and the protocol. Answer clients of all versions, and before the start is over."""

    async def ping(self) -> None:
        """Answer as soon as the cluster's hosts are known, and what an earlier Controller has left.

        Raises:
            UnknownRecordError: another version of iris_ray has left it.
            ControllerUnavailableError: it could not start for another reason, or has failed and is about to be
                started anew.
            DeposedError: another Controller has taken over.
        """


Question = Callable[Concatenate[ControllerInterface, P], Coroutine[Any, Any, T]]
"""A method of the interface."""
