"""The way to the cluster's Controller for programs that wait for its answers. Asking never starts a Controller.

Ray and tenacity are imported when they are needed, so that the command line is quick.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import iris_ray
from iris_ray.actors.protocol.overview import Changes, Position
from iris_ray.actors.protocol.status import (
    PAGE,
    JobEvent,
    JobGoodput,
    JobStatus,
    LimitStatus,
    Place,
    TaskStatus,
    WorkerStatus,
)
from iris_ray.actors.protocol.task_log import LogPlace, LogPosition, TaskLog
from iris_ray.actors.protocol.version import NO_PROTOCOL, SOME_OLDER_VERSION, require_same_protocol
from iris_ray.errors import ControllerUnavailableError, DeposedError, IrisError, NoClusterError
from iris_ray.model.goodput_sums import UserDay
from iris_ray.model.job_spec import PriorityBand
from iris_ray.model.limits import Limits

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tenacity import RetryCallState

ANSWER_TIMEOUT_S = 30.0
RESTART_S = 20.0
"""How long to wait for a Controller that Ray is just restarting."""
_ASK_AGAIN_S = 0.5
_NAME_POLL_S = 0.1

NO_CONTROLLER = (
    "no Controller runs in this cluster: no job has needed one yet, or it was stopped. The next job starts one, and so"
    " does: iris-ray controller start"
)
GONE = (
    f"the Controller is gone and has not come back for {RESTART_S:g} s; jobs that run go on. The next job starts"
    " another one, and so does: iris-ray controller start"
)

T = TypeVar("T")
C = TypeVar("C")

_Call = Callable[[Any], Any]
"""From the Controller's actor handle to the reference of an answer."""


class _NoAnswerError(Exception):
    """No answer this time; why, in words."""


class ControllerConnection:
    """The cluster's Controller, with its methods as plain calls that return its answer or raise its error.

    If the Controller dies or is replaced meanwhile, its successor is asked. Every method raises
    ControllerUnavailableError if no answer comes.

    Args:
        any_version: accept a Controller of any version, to ask for its versions or to end it.
        patience_s: for how many seconds to wait until one runs. One that dies later is waited for `RESTART_S` at least.

    Raises:
        ControllerUnavailableError: none runs.
        VersionMismatchError: it is of a version that can't be talked to from here.
    """

    def __init__(self, any_version: bool = False, patience_s: float = 0.0) -> None:
        import tenacity

        self._any_version = any_version
        self._patience_s = max(patience_s, RESTART_S)
        self._handle: Any = None
        tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda found: not found),
            stop=tenacity.stop_after_delay(patience_s),
            wait=tenacity.wait_fixed(_ASK_AGAIN_S),
            retry_error_callback=_no_controller,
        )(self._look_up)

    def _look_up(self) -> bool:
        """Return whether one runs; it may be another one than before, of another version."""
        handle = find_controller()
        if handle is not None and handle != self._handle:
            before, self._handle = self._handle, handle
            try:
                if not self._any_version:
                    require_same_protocol(*self.versions(), iris_ray.__version__)
            except IrisError:
                self._handle = before  # so that the next question is not put to it unchecked
                raise
        return handle is not None

    def _look_up_again(self, state: "RetryCallState") -> None:
        if state.attempt_number > 1:
            self._look_up()

    def versions(self) -> tuple[int, str]:
        """Return the protocol that it speaks, and its version of iris_ray."""
        if not hasattr(self._handle, "versions"):
            return NO_PROTOCOL, SOME_OLDER_VERSION
        versions = self._ask(lambda controller: controller.versions.remote())
        return versions["protocol"], versions["version"]

    def about(self) -> dict[str, Any]:
        """Return its epoch, version, process and node."""
        about: dict[str, Any] = self._ask(lambda controller: controller.about.remote())
        return about

    def statistics(self) -> dict[str, int]:
        """Return its epoch, and how many jobs starved, timed out or were unschedulable since it began."""
        counts: dict[str, int] = self._ask(lambda controller: controller.statistics.remote())
        return counts

    def demand(self) -> dict[str, list[int]]:
        """Return how many more slices of each type each gang that waits would need to run."""
        slices: dict[str, list[int]] = self._ask(lambda controller: controller.demand.remote())
        return slices

    # -- jobs ------------------------------------------------------------------------------------------------------

    def list_jobs(self) -> list[JobStatus]:
        """Return all jobs that it knows, the oldest first."""
        return self._all_pages(lambda after, controller: controller.list_jobs.remote(after), 0, lambda job: job.number)

    def job_status(self, job_id: str) -> JobStatus:
        """Return how one job stands.

        Raises:
            UnknownNameError: there is no such job.
        """
        status: JobStatus = self._ask(lambda controller: controller.job_status.remote(job_id))
        return status

    def job_events(self, job_id: str) -> list[JobEvent]:
        """Return what has happened to a job, oldest first; raises like `job_status`."""
        found: list[JobEvent] = self._ask(lambda controller: controller.job_events.remote(job_id))
        return found

    def list_goodput(self) -> list[JobGoodput]:
        """Return what the time of each gang that it knows went into, the oldest first."""
        return self._all_pages(
            lambda after, controller: controller.list_goodput.remote(after), 0, lambda job: job.number
        )

    def job_goodput(self, job_id: str) -> JobGoodput:
        """Return what the time of one job went into.

        Raises:
            UnknownNameError: there is no such job.
            InvalidRequestError: it is no gang.
        """
        found: JobGoodput = self._ask(lambda controller: controller.job_goodput.remote(job_id))
        return found

    def user_times(self, since: float) -> list[UserDay]:
        """Return what the time of forgotten jobs went into, since a time in seconds since the epoch."""
        found: list[UserDay] = self._ask(lambda controller: controller.user_times.remote(since))
        return found

    def fleet_times(self, since: str) -> dict[str, dict[str, float]]:
        """Return chip-seconds by day and state, see `iris_ray.model.goodput_sums.ChipState`, since a day in UTC."""
        found: dict[str, dict[str, float]] = self._ask(lambda controller: controller.fleet_times.remote(since))
        return found

    def list_tasks(self, job_id: str) -> list[TaskStatus]:
        """Return the tasks of a job, by index; raises like `job_status`."""
        return self._all_pages(
            lambda after, controller: controller.list_tasks.remote(job_id, after), -1, lambda task: task.task_index
        )

    def first_tasks(self, job_id: str) -> list[TaskStatus]:
        """Return the first `PAGE` tasks of a job, by index; raises like `job_status`."""
        tasks: list[TaskStatus] = self._ask(lambda controller: controller.list_tasks.remote(job_id))
        return tasks

    def task_status(self, job_id: str, index: int) -> TaskStatus:
        """Return how one task stands.

        Raises:
            UnknownNameError: there is no such job, or it has no such task.
        """
        status: TaskStatus = self._ask(lambda controller: controller.task_status.remote(job_id, index))
        return status

    def cancel(self, job_id: str, reason: str, user: str) -> JobStatus:
        """End a job, wherever it stands; returns how it stood before.

        Raises:
            UnknownNameError: there is no such job.
            NotPermittedError: it is a job of somebody else, and the user is no operator.
        """
        before: JobStatus = self._ask(lambda controller: controller.cancel.remote(job_id, reason, user))
        return before

    # -- logs ------------------------------------------------------------------------------------------------------

    def fetch_task_logs(self, job_id: str, task_index: int, at: LogPosition, max_bytes: int) -> TaskLog:
        """Return a piece of what a task has printed, of at most so many bytes.

        Raises:
            UnknownNameError: there is no such job, task or attempt.
        """
        log: TaskLog = self._ask(
            lambda controller: controller.fetch_task_logs.remote(job_id, task_index, at, max_bytes)
        )
        return log

    def fetch_logs(self, job_id: str, wanted: Mapping[int, LogPosition], max_bytes: int) -> dict[int, TaskLog]:
        """Return pieces of what several tasks of a job have printed, by task index, without tasks that do not exist.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """
        logs: dict[int, TaskLog] = self._ask(lambda controller: controller.fetch_logs.remote(job_id, wanted, max_bytes))
        return logs

    def locate_logs(self, job_id: str, wanted: Mapping[int, LogPosition]) -> dict[int, LogPlace]:
        """Return where the logs of several tasks are, by task index, without tasks that do not exist.

        Raises:
            UnknownNameError: there is no such job or attempt.
        """
        places: dict[int, LogPlace] = self._ask(lambda controller: controller.locate_logs.remote(job_id, wanted))
        return places

    # -- hosts -----------------------------------------------------------------------------------------------------

    def list_workers(self) -> list[WorkerStatus]:
        """Return all live hosts, by slice and number."""
        none: Place = ("", -1, "")
        return self._all_pages(lambda after, controller: controller.list_workers.remote(after), none, lambda w: w.place)

    def taint(self, target: str, taint: str, reason: str, user: str) -> list[str]:
        """Keep jobs that don't tolerate the taint away from a host or slice; returns the node ids of those hosts.

        Raises:
            UnknownNameError: there is no such host or slice.
            NotPermittedError: the user is no operator.
        """
        node_ids: list[str] = self._ask(lambda controller: controller.taint.remote(target, taint, reason, user))
        return node_ids

    def lift_taint(self, target: str, taint: str, user: str) -> list[str]:
        """Undo `taint`; returns the node ids of the hosts.

        Raises:
            UnknownNameError: nothing of that name was tainted so.
            NotPermittedError: the user is no operator.
        """
        node_ids: list[str] = self._ask(lambda controller: controller.lift_taint.remote(target, taint, user))
        return node_ids

    def changes(self, since: Position) -> Changes:
        """Return what has changed of jobs, hosts and users since a position."""
        found: Changes = self._ask(lambda controller: controller.changes.remote(since))
        return found

    # -- users -----------------------------------------------------------------------------------------------------

    def list_limits(self) -> list[LimitStatus]:
        """Return what each user has and may have: first the limits of everybody, then those of each user with jobs."""
        found: list[LimitStatus] = self._ask(lambda controller: controller.list_limits.remote())
        return found

    def set_limits(
        self, whose: str, bands: list[PriorityBand], limits: Limits, reset: bool, user: str
    ) -> list[LimitStatus]:
        """Set some limits of a user, or of everybody; returns how all limits stand then.

        Args:
            whose: the user, or `EVERYBODY`.
            bands: in which bands.
            limits: those that are None stay as they are.
            reset: forget those that were set before.
            user: who sets them.

        Raises:
            NotPermittedError: the user is no operator.
        """
        found: list[LimitStatus] = self._ask(
            lambda controller: controller.set_limits.remote(whose, bands, limits, reset, user)
        )
        return found

    # -- its process -----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End its process for good; returns when its name is free, or another one has taken it."""
        import ray
        import tenacity

        ray.kill(self._handle, no_restart=True)
        tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda found: found == self._handle),
            stop=tenacity.stop_after_delay(RESTART_S),
            wait=tenacity.wait_fixed(_NAME_POLL_S),
            retry_error_callback=lambda _: None,
        )(find_controller)

    def _all_pages(self, page: Callable[[C, Any], Any], after: C, key: Callable[[T], C]) -> list[T]:
        """Return what comes after something in a list of the Controller, which gives it page by page.

        Args:
            page: from where to begin and the Controller's actor handle to the reference of an answer.
            after: what comes before the first one.
            key: what to begin after to get what follows one of them.
        """
        found: list[T] = []
        while True:
            more: list[T] = self._ask(partial(page, after))
            found += more
            if len(more) < PAGE:
                return found
            after = key(more[-1])

    def _ask(self, call: _Call) -> Any:
        """Return the answer, or raise the error of the Controller; ask again while none answers."""
        import tenacity

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_NoAnswerError),
            stop=tenacity.stop_after_delay(self._patience_s),
            wait=tenacity.wait_fixed(_ASK_AGAIN_S),
            before=self._look_up_again,
            retry_error_callback=_no_answer,
        )(self._ask_once, call)

    def _ask_once(self, call: _Call) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        _require_connected()
        try:
            return ray.get(call(self._handle), timeout=ANSWER_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, DeposedError):  # another one has replaced it
                raise _NoAnswerError(GONE) from None
            if isinstance(error.cause, IrisError):
                raise error.cause from None
            raise ControllerUnavailableError(
                f"the Controller failed: {type(error.cause).__name__}: {error.cause}"
            ) from error
        except GetTimeoutError:
            trouble = f"the Controller did not answer within {ANSWER_TIMEOUT_S:g} s; see: iris-ray doctor"
            raise _NoAnswerError(trouble) from None
        except RayError:  # it is being restarted, was stopped, or is being replaced
            raise _NoAnswerError(GONE) from None


def _no_controller(_: "RetryCallState") -> NoReturn:
    raise ControllerUnavailableError(NO_CONTROLLER)


def _no_answer(state: "RetryCallState") -> NoReturn:
    trouble = state.outcome.exception() if state.outcome else None
    raise ControllerUnavailableError(str(trouble)) from None


def ask_job_status(controller: Any, job_id: str) -> "Future[JobStatus]":
    """Ask how a job stands, and return at once.

    Args:
        controller: what `find_controller` returned.
        job_id: which job.
    """
    asked: Future[JobStatus] = controller.job_status.remote(job_id).future()
    return asked


def tell_who_yields(controller: Any, yielding: Mapping[str, bool], user: str) -> Awaitable[None]:
    """Say of jobs whether the Controller may give their hosts to others. Return at once.

    Args:
        controller: what `find_controller` returned.
        yielding: by the jobs' ids.
        user: in whose name.
    """
    told: Awaitable[None] = controller.set_yielding.remote(yielding, user)
    return told


def find_controller() -> Any:
    """Return the handle of the Controller, or None.

    Raises:
        NoClusterError: this process is in no cluster.
    """
    import ray

    from iris_ray.actors.protocol.names import CONTROLLER_NAME, NAMESPACE

    _require_connected()
    try:
        return ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        return None


def _require_connected() -> None:
    """Raise NoClusterError if this process is in no cluster: Ray itself would start one on this machine."""
    import ray

    from iris_ray.actors.calls.ray_internals import has_inherited_connection

    if not ray.is_initialized() or has_inherited_connection():
        raise NoClusterError(
            "this process is in no Ray cluster, or has left it (ray.shutdown, or the end of IrisClient.remote), or was"
            " forked from one that is in a cluster; connect again to ask about jobs"
        )
