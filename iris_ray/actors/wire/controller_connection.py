"""The way to the cluster's Controller for programs that wait for its answers. Nothing is started by asking."""

import time
from typing import Any

import iris_ray
from iris_ray.actors.wire.protocol import NO_PROTOCOL, SOME_OLDER_VERSION, require_same_protocol
from iris_ray.errors import ControllerUnavailableError, DeposedError, IrisError

ANSWER_TIMEOUT_S = 30.0
RESTART_S = 20.0
"""How long a Controller that is just being restarted by Ray is waited for."""
_ASK_AGAIN_S = 0.5

NO_CONTROLLER = (
    "no Controller runs in this cluster: no job has needed one yet, or it was stopped. The next job starts one, and so"
    " does: iris-ray controller start"
)
GONE = (
    f"the Controller is gone and has not come back for {RESTART_S:g} s; jobs that run go on. The next job starts"
    " another one, and so does: iris-ray controller start"
)


class ControllerConnection:
    """The cluster's Controller, for people: it is not started by asking.

    Args:
        any_version: whether one will do that can only be asked for its versions, or ended.
        patience_s: for how many seconds to wait until one runs. One that dies later is waited for `RESTART_S` at least.

    Raises:
        ControllerUnavailableError: none runs.
        VersionMismatchError: it is of a version that can't be talked to from here.
    """

    def __init__(self, any_version: bool = False, patience_s: float = 0.0) -> None:
        self._any_version = any_version
        self._patience_s = max(patience_s, RESTART_S)
        self._handle: Any = None
        deadline = time.monotonic() + patience_s
        while not self._look_up():
            if time.monotonic() > deadline:
                raise ControllerUnavailableError(NO_CONTROLLER)
            time.sleep(_ASK_AGAIN_S)

    def _look_up(self) -> bool:
        """Whether one runs; it may be another one than before, of another version."""
        handle = find_controller()
        if handle is not None and handle != self._handle:
            self._handle = handle
            if not self._any_version:
                require_same_protocol(*self.versions(), iris_ray.__version__)
        return handle is not None

    def versions(self) -> tuple[int, str]:
        """The protocol that it speaks, and its version of iris_ray."""
        if not hasattr(self._handle, "versions"):
            return NO_PROTOCOL, SOME_OLDER_VERSION
        versions = self.ask("versions")
        return versions["protocol"], versions["version"]

    def ask(self, method: str, *args: Any) -> Any:
        """Its answer, or the error that it raises. If it dies or is replaced, its successor is asked.

        Raises:
            ControllerUnavailableError: no answer.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return ray.get(getattr(self._handle, method).remote(*args), timeout=ANSWER_TIMEOUT_S)
            except RayTaskError as error:
                if not isinstance(error.cause, IrisError):
                    raise ControllerUnavailableError(
                        f"the Controller failed: {type(error.cause).__name__}: {error.cause}"
                    ) from error
                if not isinstance(error.cause, DeposedError):  # another one has replaced it
                    raise error.cause from None
                trouble = GONE
            except GetTimeoutError:
                trouble = f"the Controller did not answer within {ANSWER_TIMEOUT_S:g} s; see: iris-ray doctor"
            except RayError:  # it is being restarted, was stopped, or is being replaced
                trouble = GONE
            if time.monotonic() > deadline:
                raise ControllerUnavailableError(trouble)
            time.sleep(_ASK_AGAIN_S)
            self._look_up()

    def about(self) -> dict[str, Any]:
        """Epoch, version, process and node."""
        answer: dict[str, Any] = self.ask("about")
        return answer

    def end(self) -> None:
        """End its process for good; returns when its name is free, or another one has taken it."""
        import ray

        ray.kill(self._handle, no_restart=True)
        deadline = time.monotonic() + RESTART_S
        while find_controller() == self._handle and time.monotonic() < deadline:
            time.sleep(0.1)


def find_controller() -> Any:
    """The handle of the Controller, or None."""
    import ray

    from iris_ray.actors.wire.shared_names import CONTROLLER_NAME, NAMESPACE

    try:
        return ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        return None
