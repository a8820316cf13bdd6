"""The transport of an `IrisClient` that reaches nothing of a cluster but its dashboard: the head has the direct one."""

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from iris_ray.actors.calls.controller_connection import RESTART_S
from iris_ray.actors.protocol.controller_interface import ControllerInterface, Question
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.client import launch
from iris_ray.client.connection import current_user, require_workspace
from iris_ray.client.job_progress import say_if_it_runs_once
from iris_ray.client.transport import DirectTransport, Transport
from iris_ray.errors import InvalidRequestError, IrisError
from iris_ray.remote.calls import HeadCall
from iris_ray.remote.ray_jobs import RayJobs
from iris_ray.terminal import print_line

LONG_PATIENCE_S = 3600.0
"""Seconds for which the dashboard may be silent while this process waits for results: a laptop sleeps for a while."""

P = ParamSpec("P")
T = TypeVar("T")


class RemoteTransport(Transport):
    """Has a process on the head do what `DirectTransport` does here. Each call takes some seconds, as it starts one.

    Args:
        address: the URL of the dashboard.
        workspace: a directory that is sent with each job, or None.

    Raises:
        NoClusterError, TokenRefusedError, VersionMismatchError: as for `RayJobs`.
        InvalidRequestError: the address or the workspace makes no sense.
    """

    is_direct = False

    def __init__(self, address: str, workspace: Path | str | None = None) -> None:
        if workspace is not None:
            require_workspace(workspace)
        self._workspace = workspace
        self._jobs = RayJobs(address)
        self._at_the_end = contextlib.ExitStack()
        atexit.register(self.close)

    def ask(self, patience_s: float, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked = partial(DirectTransport().ask, patience_s, question, *args, **kwargs)
        answer: T = self._send(question.__name__, asked).answer()
        return answer

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._send(function.__name__, partial(function, *args, **kwargs)).answer()
        return result

    def show(self, function: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        call = self._send(function.__name__, partial(function, *args, **kwargs))
        call.follow(print_line)
        call.answer()

    def submit(self, request: RunRequest, detached: bool) -> "Future[list[Any]]":
        if given := [name for name, one in request.secrets.items() if one.value]:
            raise InvalidRequestError(
                f"the value of {given[0]} would go through Ray's job API, which keeps what it is given; have an"
                f" operator set it in the cluster's store (iris-ray cluster secrets set {given[0]}), and give"
                f' Secret.from_store("{given[0]}")'
            )
        say_if_it_runs_once(request.spec)
        call = self._send(request.spec.name, partial(submit_on_head, request, detached), working_dir=self._workspace)
        try:
            call.answer()
        except BaseException as error:
            call.stop()
            if detached and isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(IrisError):  # most often it is not in the queue yet
                    job_id, user = request.spec.job_id, current_user()
                    self.ask(RESTART_S, ControllerInterface.cancel, job_id, f"cancelled by {user}", user)
            raise
        results: Future[list[Any]] = Future()
        if not detached:
            self._at_the_end.callback(lambda: None if results.done() else call.stop())
        threading.Thread(target=_receive, args=(call, results), name=request.spec.job_id, daemon=True).start()
        return results

    def close(self) -> None:
        self._at_the_end.close()

    def _send(self, name: str, function: Callable[[], Any], **sent: Any) -> HeadCall:
        return HeadCall.send(self._jobs, name.replace("_", "-"), function, **sent)


def _receive(call: HeadCall, results: "Future[list[Any]]") -> None:
    try:
        results.set_result(call.answer(1, LONG_PATIENCE_S))
    except BaseException as error:
        results.set_exception(error)


def submit_on_head(request: RunRequest, detached: bool) -> Iterator[Any]:
    """Submit a job from this process. Yield None when the Controller has accepted it, and then its results."""
    job = launch(request, detached)
    yield None
    yield job.results()
