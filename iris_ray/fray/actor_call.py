"""What a caller and an actor say to each other: one method's call, and its result or error, as bytes over gRPC."""

import os
import pickle
import secrets
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from iris_ray.errors import RemoteUserError, ResultNotPicklableError, UnsupportedOptionError

SERVICE, METHOD = "iris_ray.fray.Actor", "Call"
PATH = f"/{SERVICE}/{METHOD}"
TOKEN = "iris-ray-token"
"""The key of the call's metadata under which the address's token travels."""

KEEPALIVE_MS = 10_000
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # hosts of a cluster reach each other
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # a host that has vanished is noticed while it is waited for
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
]


@dataclass(frozen=True, slots=True)
class ActorAddress:
    """Where an actor listens, and the word without which it takes no call.

    Attributes:
        target: ``host:port``.
        token: made at random for each server. It is as well protected as Ray's key-value store.
    """

    target: str
    token: str

    @classmethod
    def of_port(cls, host: str, port: int) -> "ActorAddress":
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", secrets.token_hex(16))

    @classmethod
    def parse(cls, text: str) -> "ActorAddress":
        return cls(*text.split())

    def __str__(self) -> str:
        return f"{self.target} {self.token}"

    def __repr__(self) -> str:
        return f"ActorAddress({self.target})"


def require_no_tls(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse actors where Ray encrypts what it sends: their calls would not be.

    Raises:
        UnsupportedOptionError: it does.
    """
    if environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        raise UnsupportedOptionError("RAY_USE_TLS is set, and calls of Fray's actors are not encrypted")


def pack_call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a call as bytes.

    Raises:
        TypeError, pickle.PicklingError: an argument can't travel.
    """
    packed: bytes = cloudpickle.dumps((method, args, kwargs))
    return packed


def pack_result(result: Any) -> bytes:
    """Return a method's result as bytes, or the error that it can't travel."""
    try:
        return pickle.dumps((True, cloudpickle.dumps(result), ""))
    except Exception as error:
        return pack_error(ResultNotPicklableError(f"an actor's method returned what can't be pickled: {error}"))


def pack_error(error: BaseException) -> bytes:
    """Return a method's error as bytes, with its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps((False, cloudpickle.dumps(error), text))
    except Exception:
        return pickle.dumps((False, b"", text))


def unpack_answer(answer: bytes) -> Any:
    """Return a method's result, or raise its error; a note of that has the traceback from inside the actor.

    Raises:
        RemoteUserError: the method raised what can't be rebuilt here.
    """
    fine, payload, text = pickle.loads(answer)
    if fine:
        return cloudpickle.loads(payload)
    raise _rebuilt(payload, text)


def _rebuilt(payload: bytes, text: str) -> BaseException:
    try:
        error = cloudpickle.loads(payload)
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        return RemoteUserError(f"an actor's method raised what can't be rebuilt here:\n{text}")
    error.add_note(f"In the actor:\n{text}")
    return error
