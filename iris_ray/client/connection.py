"""Connects this process to a Ray cluster, and names its user and jobs. It imports Ray late: few commands need it."""

import getpass
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from iris_ray import settings
from iris_ray.errors import InvalidRequestError, NoClusterError, VersionMismatchError

AUTO = "auto"
_PROBE_S = 3.0

TRY_A_CLUSTER = (
    "give --address http://HEAD:8265 or set RAY_ADDRESS, run this on a node of the cluster, or see it at work without"
    " one: iris-ray demo"
)


def connect(address: str, show_logs: bool = False, **options: Any) -> None:
    """Make this process a driver of the cluster, unless it is one.

    Args:
        address: HOST:PORT of the cluster's head, or "auto" for the one on this machine.
        show_logs: whether the output of this process's tasks appears here.
        options: more for ``ray.init``.

    Raises:
        NoClusterError: there is no cluster, or it can't be reached from here.
        VersionMismatchError: the cluster runs on another Ray, or another Python.
        InvalidRequestError: the address makes no sense, or several clusters run on this machine, or the working
            directory can't travel.
    """
    require_answer(address)
    import ray
    from ray.exceptions import RuntimeEnvSetupError

    if ray.is_initialized():
        return
    try:
        with without_ray_address():
            ray.init(address=address, log_to_driver=show_logs, logging_level="ERROR", **options)
    except (Exception, SystemExit) as error:  # Ray ends the process if what answers is no GCS
        if isinstance(error, RuntimeEnvSetupError) and isinstance(error.__cause__, (ValueError, OSError)):
            ray.shutdown()  # the process is half connected
            directory, why = options["runtime_env"]["working_dir"], str(error.__cause__).partition(". ")[0]
            raise InvalidRequestError(
                f"the working directory {directory} can't travel to the hosts: {why}; files that its .gitignore or"
                " .rayignore names stay here"
            ) from None
        _require_same_ray(error)
        where = "on this machine" if address == AUTO else f"at {address}"
        why = " ".join(str(error).split())[:300]
        raise NoClusterError(
            f"the Ray cluster {where} can't be joined: {type(error).__name__}: {why}; `iris-ray doctor` looks further"
        ) from None


def require_answer(address: str) -> None:
    """Refuse an address at which no cluster answers, before anything is prepared for it.

    Args:
        address: HOST:PORT of the cluster's head, or "auto" for the one on this machine.

    Raises:
        NoClusterError: nothing answers there, or no Ray node runs on this machine.
        InvalidRequestError: the address makes no sense, or several clusters run on this machine.
    """
    if address != AUTO:
        _require_answer(address)
        return
    import ray

    if ray.is_initialized():
        return
    with without_ray_address():
        found = _require_answer_on_this_machine()
    if found is None:
        raise NoClusterError(f"no Ray cluster was found on this machine; {TRY_A_CLUSTER}")


def join(address: str, workspace: Path | str | None) -> None:
    """Connect a process that is in no cluster yet.

    Args:
        address: HOST:PORT of the cluster's head.
        workspace: a directory that travels to the hosts as the working directory of the tasks, or None.

    Raises:
        NoClusterError: there is no cluster, or it can't be reached from here.
        InvalidRequestError: the address or the workspace makes no sense, or the process is in a cluster already.
    """
    import ray

    options: dict[str, Any] = {}
    if workspace is not None:
        require_workspace(workspace)
        options["runtime_env"] = {"working_dir": str(workspace)}
    if ray.is_initialized():
        raise InvalidRequestError(
            "this process is connected to a Ray cluster already; use IrisClient(), or call ray.shutdown() before"
        )
    connect(address, **options)


def require_workspace(workspace: object) -> None:
    if not isinstance(workspace, (str, Path)) or not Path(workspace).is_dir():
        raise InvalidRequestError(f"workspace is {str(workspace)!r}, which is not a directory")


def require_cluster() -> None:
    """Connect to the running cluster if this process is not connected.

    Raises:
        NoClusterError: there is no cluster, or nothing answers at ``$RAY_ADDRESS``, or no Ray node runs on this
            machine, or the process was forked from a connected one.
        InvalidRequestError: the process is a Ray Client, or ``$RAY_ADDRESS`` makes no sense, or it is not set and
            several clusters run on this machine.
    """
    import ray

    from iris_ray.actors.calls.ray_internals import has_inherited_connection, is_client_mode, is_connected

    if is_client_mode():
        raise InvalidRequestError(
            "this process is connected with Ray Client (ray://), which can't own the actors of a gang; run the script"
            " on the cluster, for example with `ray job submit -- python script.py`"
        )
    if has_inherited_connection():
        raise NoClusterError(
            "this process was forked from one that is connected to Ray, and that connection works there only;"
            ' start it by multiprocessing.get_context("spawn") and call ray.init() in it, or run jobs from a thread'
        )
    if not is_connected():
        given = os.environ.get("RAY_ADDRESS") or AUTO
        if given == AUTO:
            _require_answer_on_this_machine()
        elif given != "local":
            _require_answer(given)
        try:
            ray.init(address=AUTO)
        except RuntimeError as error:
            _require_same_ray(error)
            raise
        except ConnectionError as error:
            raise NoClusterError(
                "Ray is not initialised in this process and no running cluster was found. Call"
                " ray.init(address=...), submit the script with `ray job submit`, or try it on a simulated cluster:"
                " iris_ray.testing.SimulatedCluster"
            ) from error


def _require_same_ray(error: BaseException) -> None:
    """Raise VersionMismatchError if Ray has refused to join a cluster of another Ray or Python."""
    what, _, versions = str(error).partition("Version mismatch: ")
    if versions and not what:
        import ray

        ray.shutdown()  # the process is half connected
        raise VersionMismatchError(
            f"{' '.join(versions.split())}: use the Ray and the Python of the cluster's image here, in a virtual"
            " environment of their own"
        ) from None


def this_connection() -> str | None:
    """Return a unique name of this process's connection to a cluster; None if it is not connected."""
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    try:
        return f"{context.gcs_address} {context.get_job_id()}"
    except Exception:  # the connection ends at this moment
        return None


_WHICH = (
    "give HOST:PORT of the head, such as 10.0.0.2:6379, on one of the cluster's nodes, and elsewhere the URL of its"
    " dashboard, such as http://10.0.0.2:8265"
)


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of an address, or raise InvalidRequestError."""
    if not isinstance(address, str):
        raise InvalidRequestError(f"the address is {address!r}; {_WHICH}")
    if address.startswith("ray://"):
        raise InvalidRequestError(f"the address is {address}, and Ray Client can't own the actors of a gang; {_WHICH}")
    if "://" in address and not address.startswith(("http://", "https://")):
        raise InvalidRequestError(f"the address is {address!r}; {_WHICH}")
    if "://" in address:
        raise InvalidRequestError(
            f"the address is {address}; give HOST:PORT of the cluster's head (Ray's port, 6379 unless set otherwise)."
            " The dashboard's address is not enough for this: run iris-ray on a node of the cluster, or with"
            " `ray job submit -- iris-ray ...`; a script goes there with `iris-ray submit --ray-job`"
        )
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidRequestError(f"the address is {address!r}; {_WHICH}")
    return host, int(port)


def _require_answer_on_this_machine() -> str | None:
    """Return the address of the cluster on this machine, if any. Refuse several clusters, and one that has ended.

    Ray keeps the address of a cluster that has ended in a file of its own.
    """
    from iris_ray.actors.calls.ray_internals import addresses_found_on_this_machine

    found = addresses_found_on_this_machine()
    if len(found) > 1:
        raise InvalidRequestError(
            f"{len(found)} Ray clusters run on this machine, at {', '.join(found)}; name one by --address HOST:PORT or"
            " RAY_ADDRESS"
        )
    if found:
        _require_answer(
            found[0], ", where Ray has noted this machine's cluster; if it has ended, `ray stop` deletes the note"
        )
    return found[0] if found else None


def _require_answer(address: str, source: str = "") -> None:
    """Refuse an address at which no Ray head answers, or that can't be joined from this machine.

    Ray itself would wait for minutes, and then end the process.
    """
    host, port = host_and_port(address)
    if host in ("localhost", "127.0.0.1", "::1"):
        import ray

        host = ray.util.get_node_ip_address()  # Ray does the same
    try:
        probe = socket.create_connection((host.strip("[]"), port), _PROBE_S)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have this name
        why = getattr(error, "strerror", None) or "no answer"
        raise NoClusterError(f"nothing answers at {address} ({why}){source}; {TRY_A_CLUSTER}") from None
    with probe:
        if not _speaks_grpc(probe):
            raise NoClusterError(
                f"the server at {address} is not the head of a Ray cluster; give Ray's port, which is 6379 unless set"
                " otherwise (8265 is the dashboard's)"
            )
    from iris_ray.actors.calls.ray_internals import may_join_from_here

    if not may_join_from_here():
        raise NoClusterError(
            f"the cluster at {address} can be joined only from one of its nodes, and no Ray node runs on this machine;"
            " from here, give the URL of its dashboard, such as http://HEAD:8265, to --address or IrisClient.remote, or"
            " have iris-ray submit --ray-job run the script there"
        )


def answers(address: str) -> bool:
    """Return whether something listens at the address of a head, HOST:PORT."""
    host, port = host_and_port(address)
    try:
        socket.create_connection((host.strip("[]"), port), _PROBE_S).close()
    except OSError:
        return False
    return True


def _speaks_grpc(probe: socket.socket) -> bool:
    """Return whether the other side greets with an HTTP/2 SETTINGS frame, as gRPC's servers do."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return True  # with TLS the server sends nothing before the handshake
    try:
        return probe.recv(9)[3:4] == b"\x04"
    except OSError:
        return False


@contextmanager
def without_ray_address() -> Iterator[None]:
    """Hide ``RAY_ADDRESS`` and its kind for a block: Ray prefers them to the address that it is given."""
    names = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    given = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(given)


def current_user() -> str:
    """Return the user of this process: ``$IRIS_USER``, or the name of the operating system's account.

    Raises:
        InvalidRequestError: ``IRIS_USER`` has characters that a name can't have.
    """
    from iris_ray.model.checks import Holds, as_user, is_user, require  # late: help and completion do without the model

    named = settings.USER.read()
    if named:
        wanted = "a name of letters, digits, '.', '_', '-', '@' and '+' that begins with a letter or digit"
        require(settings.USER.name, named, Holds(is_user, wanted))
        return named
    try:
        return as_user(getpass.getuser())
    except (KeyError, OSError):  # an account without a name, as containers have them
        return str(os.getuid())


def new_job_id(name: str) -> str:
    """Return a new job id. The id of a job that a task submits begins with the id of the task's job and "/".

    Its eight hexadecimal digits include a letter, because commands read ``JOB/task-40415926`` as a task of ``JOB``.
    """
    from iris_ray.model.checks import part_of_id
    from iris_ray.task.job_info import get_job_info

    parent = get_job_info()
    while (digits := secrets.token_hex(4)).isdecimal():
        pass
    own = f"{part_of_id(name)}-{digits}"
    return f"{parent.job_id}/{own}" if parent else own
