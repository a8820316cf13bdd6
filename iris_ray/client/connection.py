"""The way to a cluster and its Controller, for programs that people wait for. Nothing is started by asking."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from iris_ray.errors import InvalidRequestError, NoClusterError

AUTO = "auto"
_PROBE_S = 3.0

TRY_A_CLUSTER = (
    "give --address HOST:PORT or set RAY_ADDRESS, run this on a node of the cluster, or see it at work without one:"
    " iris-ray demo"
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
