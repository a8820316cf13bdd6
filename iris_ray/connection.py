"""The way to a cluster and its Controller, for programs that people wait for. Nothing is started by asking."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import iris_ray
from iris_ray.errors import ControllerUnavailableError, DeposedError, InvalidRequestError, IrisError, NoClusterError
from iris_ray.protocol import NO_PROTOCOL, SOME_OLDER_VERSION, require_same_protocol

AUTO = "auto"
ANSWER_TIMEOUT_S = 30.0
RESTART_S = 20.0
"""How long a Controller that is just being restarted by Ray is waited for."""
_PROBE_S = 3.0
_ASK_AGAIN_S = 0.5

TRY_A_CLUSTER = (
    "give --address HOST:PORT or set RAY_ADDRESS, run this on a node of the cluster, or see it at work without one:"
    " iris-ray demo"
)
NO_CONTROLLER = (
    "no Controller runs in this cluster: no job has needed one yet, or it was stopped. The next job starts one, and so"
    " does: iris-ray controller start"
)
GONE = (
    f"the Controller is gone and has not come back for {RESTART_S:g} s; jobs that run go on. The next job starts"
    " another one, and so does: iris-ray controller start"
)


def connect(address: str, show_logs: bool = False, **options: Any) -> None:
    """Make this process a driver of the cluster; at most once.

    Args:
        address: HOST:PORT of the cluster's head, or "auto" for the one on this machine.
        show_logs: whether what this process's tasks print appears here.
        options: more for ``ray.init``.

    Raises:
        NoClusterError: there is none, or it can't be reached from here.
        InvalidRequestError: the address makes no sense, or the working directory can't travel.
    """
    if address != AUTO:
        _require_answer(address)
    import ray
    from ray.exceptions import RuntimeEnvSetupError

    if ray.is_initialized():
        return
    try:
        with _without_ray_address():
            ray.init(address=address, log_to_driver=show_logs, logging_level="ERROR", **options)
    except InvalidRequestError:
        raise
    except (Exception, SystemExit) as error:  # Ray ends the process if what answers is no GCS
        if isinstance(error, RuntimeEnvSetupError) and isinstance(error.__cause__, (ValueError, OSError)):
            ray.shutdown()  # it is half connected
            directory, why = options["runtime_env"]["working_dir"], str(error.__cause__).partition(". ")[0]
            raise InvalidRequestError(
                f"the working directory {directory} can't travel to the hosts: {why}; what its .gitignore or .rayignore"
                " names stays here"
            ) from None
        where = "on this machine" if address == AUTO else f"at {address}"
        why = " ".join(str(error).split())[:300]
        if isinstance(error, ConnectionError) and address == AUTO:
            raise NoClusterError(f"no Ray cluster was found {where}; {TRY_A_CLUSTER}") from None
        raise NoClusterError(
            f"the Ray cluster {where} can't be joined: {type(error).__name__}: {why}; `iris-ray doctor` looks further"
        ) from None


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of an address.

    Raises:
        InvalidRequestError: it makes no sense.
    """
    if "://" in address:
        raise InvalidRequestError(
            f"the address is {address}; give HOST:PORT of the cluster's head (Ray's port, 6379 unless set otherwise)."
            " Ray Client and the dashboard's address are not enough: run iris-ray on a node of the cluster, or with"
            " `ray job submit -- iris-ray ...`"
        )
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequestError(f"the address is {address!r}; give HOST:PORT, such as 10.0.0.2:6379")
    return host, int(port)


def _require_answer(address: str) -> None:
    """Ask for a connection first: Ray itself would wait for minutes, and then end the process."""
    host, port = host_and_port(address)
    if host in ("localhost", "127.0.0.1", "::1"):
        import ray

        host = ray.util.get_node_ip_address()  # as Ray does
    try:
        probe = socket.create_connection((host.strip("[]"), port), _PROBE_S)
    except OSError as error:
        why = error.strerror or "no answer"
        raise NoClusterError(f"nothing answers at {address} ({why}); {TRY_A_CLUSTER}") from None
    with probe:
        if not _speaks_grpc(probe):
            raise NoClusterError(
                f"what answers at {address} is not the head of a Ray cluster; give Ray's port, which is 6379 unless set"
                " otherwise (8265 is the dashboard's)"
            )


def _speaks_grpc(probe: socket.socket) -> bool:
    """Whether the other side greets with an HTTP/2 SETTINGS frame, as gRPC's servers do."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return True  # it greets nobody before the handshake
    try:
        return probe.recv(9)[3:4] == b"\x04"
    except OSError:
        return False


@contextmanager
def _without_ray_address() -> Iterator[None]:
    """Ray prefers its variable to what it is told; here it has been weighed already."""
    given = os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        if given is not None:
            os.environ["RAY_ADDRESS"] = given


class Controller:
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

    from iris_ray.actors.controller_client import CONTROLLER_NAME, NAMESPACE

    try:
        return ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        return None
