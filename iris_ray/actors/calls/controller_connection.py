"""The connection to the cluster's Controller for programs that block on answers. It never starts a Controller.

It imports Ray when it is needed, so that the command line is quick.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

from iris_ray.actors.calls.asking_again import try_again
from iris_ray.actors.protocol.controller_interface import ControllerInterface, Question
from iris_ray.actors.protocol.marks import PAGES
from iris_ray.actors.protocol.services import addressed
from iris_ray.actors.protocol.status import PAGE
from iris_ray.actors.protocol.version import (
    NO_VERSIONS,
    REPLACE_CONTROLLER,
    THE_CONTROLLER,
    in_words,
    require_fitting_controller,
    versions_here,
)
from iris_ray.errors import ControllerUnavailableError, DeposedError, IrisError, NoClusterError, VersionMismatchError

ANSWER_TIMEOUT_S = 30.0
RESTART_S = 20.0
"""The time that a caller waits for a Controller that Ray is restarting."""
_NAME_POLL_S = 0.1

NO_CONTROLLER = (
    "no Controller runs in this cluster: no job has needed one yet, or it was stopped. The next job starts one, and so"
    " does: iris-ray cluster controller start"
)
WAITING = (
    f"waiting for the Controller, which has not answered for {RESTART_S:g} s; running jobs continue. If it was stopped,"
    " the next job starts another one, and so does: iris-ray cluster controller start"
)

P = ParamSpec("P")
T = TypeVar("T")


class _NoAnswerError(Exception):
    """One try got no answer; the message says why."""


class ControllerConnection:
    """The cluster's Controller, asked until it answers: `controller.ask(ControllerInterface.job_status, job_id)`.

    If the Controller dies or is replaced meanwhile, its successor is asked.

    Args:
        any_version: accept a Controller of any version, to ask for its versions or to end it.
        patience_s: how long to wait for a Controller; seconds. After one has died, the wait is at least `RESTART_S`.

    Raises:
        ControllerUnavailableError: none runs.
        VersionMismatchError: its version speaks another protocol, or does not know the question.
    """

    def __init__(self, any_version: bool = False, patience_s: float = 0.0) -> None:
        self._any_version = any_version
        self._patience_s, self._answer_s = max(patience_s, RESTART_S), ANSWER_TIMEOUT_S
        self._handle: Any = None
        self._say: Callable[[str], object] | None = None
        self._has_said = False

        def find() -> None:
            if not self._look_up():
                raise _NoAnswerError(NO_CONTROLLER)

        _answer_within(patience_s, find)

    @contextlib.contextmanager
    def waiting(self, at_most_s: float, say: Callable[[str], object]) -> Iterator[None]:
        """Within the block, wait longer for a Controller that has died, or less long.

        Args:
            at_most_s: how long a question waits for an answer; seconds. A Controller that does not answer, as one that
                is stopped, is given a second at least.
            say: called with `WAITING`, once for each absence that is longer than `RESTART_S`.
        """
        before = self._patience_s, self._answer_s, self._say
        self._patience_s, self._answer_s, self._say = at_most_s, min(ANSWER_TIMEOUT_S, max(1.0, at_most_s)), say
        try:
            yield
        finally:
            self._patience_s, self._answer_s, self._say = before

    def _look_up(self) -> bool:
        """Return whether a Controller runs. If it is another one than before, check its version."""
        handle = find_controller()
        if handle is not None and handle != self._handle:
            before, self._handle = self._handle, handle
            try:
                if not self._any_version:
                    require_fitting_controller(self.versions())
            except IrisError:
                self._handle = before  # so that the next question checks its version again
                raise
        return handle is not None

    def versions(self) -> Mapping[str, Any]:
        """Return the Controller's versions; see `versions_here`."""
        return self.ask(ControllerInterface.versions) if hasattr(self._handle, "versions") else NO_VERSIONS

    def ask(self, question: Question[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the Controller's answer, or raise the Controller's error, as its interface says.

        Raises:
            ControllerUnavailableError: no answer comes.
        """
        tries, began = itertools.count(), time.monotonic()

        def ask_once() -> T:
            if next(tries):
                self._say_if_away(began)
                self._look_up()
            answer: T = self._ask_once(*addressed(question, args, kwargs))
            self._has_said = False
            return answer

        return _answer_within(self._patience_s, ask_once)

    def _say_if_away(self, since: float) -> None:
        if self._say is not None and not self._has_said and time.monotonic() >= since + RESTART_S:
            self._has_said = True
            self._say(WAITING)

    def ask_all(self, question: Question[P, list[T]], /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Return all pages of a list. Raise like `ask`."""
        ask: Callable[..., list[T]] = self.ask
        page = found = ask(question, *args, **kwargs)
        while len(page) >= PAGE:
            page = ask(question, *args, getattr(page[-1], getattr(question, PAGES)), **kwargs)
            found += page
        return found

    def end(self) -> None:
        """End the Controller's process for good. Wait until its name is free, or another Controller has taken it."""
        import ray

        def require_end() -> None:
            if find_controller() == self._handle:
                raise _NoAnswerError("it has not ended yet")

        ray.kill(self._handle, no_restart=True)
        with contextlib.suppress(_NoAnswerError):
            try_again(require_end, _NoAnswerError, within_s=RESTART_S, pause_s=_NAME_POLL_S)

    def _ask_once(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        _require_connected()
        if not hasattr(self._handle, method):
            raise VersionMismatchError(
                f"{THE_CONTROLLER} can't answer this ({method}): it runs an older iris_ray than this process, which"
                f" runs {in_words(versions_here())}; {REPLACE_CONTROLLER}"
            )
        try:
            return ray.get(getattr(self._handle, method).remote(*args, **kwargs), timeout=self._answer_s)
        except RayTaskError as error:
            if isinstance(error.cause, DeposedError):  # another Controller has replaced it
                raise self._gone() from None
            if isinstance(error.cause, IrisError):
                raise error.cause from None
            raise ControllerUnavailableError(
                f"the Controller failed: {type(error.cause).__name__}: {error.cause}"
            ) from error
        except GetTimeoutError:
            trouble = f"the Controller did not answer within {self._answer_s:.3g} s; see: iris-ray doctor"
            raise _NoAnswerError(trouble) from None
        except RayError:  # it is being restarted, was stopped, or is being replaced
            raise self._gone() from None

    def _gone(self) -> _NoAnswerError:
        return _NoAnswerError(
            f"the Controller is gone and has not come back for {self._patience_s:.0f} s; running jobs continue. The"
            " next job starts another one, and so does: iris-ray cluster controller start"
        )


def _answer_within(seconds: float, ask: Callable[[], T]) -> T:
    try:
        return try_again(ask, _NoAnswerError, within_s=seconds)
    except _NoAnswerError as missing:
        raise ControllerUnavailableError(str(missing)) from None


def find_controller() -> Any:
    """Return the handle of the Controller, or None.

    Raises:
        NoClusterError: this process is in no cluster.
    """
    import ray

    from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE

    _require_connected()
    try:
        return ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        return None


def _require_connected() -> None:
    """Raise NoClusterError if this process is in no cluster: Ray itself would start one on this machine."""
    from iris_ray.actors.calls.ray_internals import is_connected

    if not is_connected():
        raise NoClusterError(
            "this process is not connected to a Ray cluster: it never was, it has left it (ray.shutdown, or the end of"
            " IrisClient.remote), or it was forked from a connected process; connect again to ask about jobs"
        )
