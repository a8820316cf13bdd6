"""The transport of an `IrisClient` that reaches nothing of a cluster but its dashboard: the head has the direct one."""

import atexit
import contextlib
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from ray import cloudpickle

from iris_ray.actors.calls.controller_connection import RESTART_S
from iris_ray.actors.protocol.controller_interface import ControllerInterface, Question
from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.client import launch
from iris_ray.client.connection import current_user, require_workspace
from iris_ray.client.job_progress import say_if_it_runs_once
from iris_ray.client.transport import DirectTransport, Submitted, Transport
from iris_ray.errors import InvalidRequestError, IrisError, RemoteUserError, ResultNotPicklableError
from iris_ray.remote.calls import HeadCall
from iris_ray.remote.ray_jobs import RayJobs
from iris_ray.terminal import print_line

LONG_PATIENCE_S = 3600.0
"""Seconds for which the dashboard may be silent while this process waits for results: a laptop sleeps for a while."""

P = ParamSpec("P")
T = TypeVar("T")


class RemoteTransport(Transport):
    """Makes each call of `DirectTransport` in a process on the head, whose start takes some seconds.

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
        answer: T = self._send(question.__name__, asked).answer(get_type_hints(question)["return"])
        return answer

    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        sent = self._send(function.__name__, partial(function, *args, **kwargs))
        result: T = sent.answer(get_type_hints(function)["return"])
        return result

    def show(self, function: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        call = self._send(function.__name__, partial(function, *args, **kwargs))
        call.follow(print_line)
        call.answer(None)

    def submit(self, request: RunRequest, detached: bool) -> Submitted:
        if given := [name for name, one in request.secrets.items() if one.value]:
            raise InvalidRequestError(
                f"the value of {given[0]} would go through Ray's job API, which keeps what it is given; have an"
                f" operator set it in the cluster's store (iris-ray cluster secrets set {given[0]}), and give"
                f' Secret.from_store("{given[0]}")'
            )
        say_if_it_runs_once(request.spec)
        call = self._send(request.spec.name, partial(submit_on_head, request, detached), working_dir=self._workspace)
        try:
            call.answer(None)
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
        return Submitted(request.spec.job_id, results)

    def close(self) -> None:
        self._at_the_end.close()

    def _send(self, name: str, function: Callable[[], Any], **sent: Any) -> HeadCall:
        return HeadCall.send(self._jobs, name.replace("_", "-"), function, **sent)


def _receive(call: HeadCall, results: "Future[list[Any]]") -> None:
    try:
        results.set_result(_unpacked(call.answer(bytes, 1, LONG_PATIENCE_S)))
    except BaseException as error:
        results.set_exception(error)


def _unpacked(packed: bytes) -> list[Any]:
    """Return the results of a user's function, or raise its error."""
    failed, payload, trace = pickle.loads(packed)
    try:
        answer = pickle.loads(payload)
    except Exception as error:
        if failed:  # its class is not known here
            raise RemoteUserError(trace) from None
        raise ResultNotPicklableError(
            f"the results can't be read here ({type(error).__name__}: {error}); install here what they need, or return"
            " plain values"
        ) from None
    if failed:
        raise answer
    results: list[Any] = answer
    return results


# -- on the head -------------------------------------------------------------------------------------------------------


def submit_on_head(request: RunRequest, detached: bool) -> Iterator[bytes | None]:
    """Submit a job from this process. Yield None when the Controller has accepted it, and then its results, pickled."""
    job = launch(request, detached)
    yield None
    yield packed(job.results)


def packed(work: Callable[[], list[Any]]) -> bytes:
    """Return the results of a user's function, or its error, pickled: they can be of any class.

    Raises:
        ResultNotPicklableError: the results can't be pickled.
    """
    failed, trace, answer = False, "", object()
    try:
        answer = work()
    except Exception as error:
        failed, trace, answer = True, "".join(traceback.format_exception(error)), error
    try:
        payload = cloudpickle.dumps(answer)
    except Exception as error:
        if not failed:
            raise ResultNotPicklableError(f"the results can't be pickled: {error}") from None
        payload = b""
    return pickle.dumps((failed, payload, trace))
