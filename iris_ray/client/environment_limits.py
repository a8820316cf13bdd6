"""What the environment of a job may be: its values, and how large it is."""

from collections.abc import Mapping

from iris_ray.errors import InvalidRequestError

MAX_ENV_BYTES = 1 << 20
"""Limit for all variables of a job, names included: they travel to every host with every attempt."""
MAX_VARIABLE_BYTES = 128 * 1024 - 1
"""Limit for one variable, ``NAME=value``: Linux starts no process with a longer one (MAX_ARG_STRLEN, less the NUL)."""

_INSTEAD = "put it into a file, or let the function close over it: that travels by Ray's object store"


def plain_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables as exact str, also those of a subclass such as an Enum: a host need not have its module."""
    return {_plain(name): _plain(value) for name, value in env.items()}


def _plain(text: str) -> str:
    return str.__str__(text) if isinstance(text, str) else text


def require_env_travels(env: Mapping[str, str]) -> None:
    """Refuse variables that no process can have, or that are too large for a launch. No message has their values.

    Raises:
        InvalidRequestError: the first variable that is wrong, or the limit that they exceed.
    """
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidRequestError(
                f"the environment variable {name!r} can't be set: its name is empty or holds =, or there is a NUL in it"
            )
    sizes = {name: len(f"{name}={value}".encode(errors="replace")) for name, value in env.items()}
    largest = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(largest, 0) > MAX_VARIABLE_BYTES:
        raise InvalidRequestError(
            f"the environment variable {largest[:100]} takes {sizes[largest]:,} bytes, and the limit is"
            f" {MAX_VARIABLE_BYTES:,}: Linux starts no process with a longer one; {_INSTEAD}"
        )
    if (total := sum(sizes.values())) > MAX_ENV_BYTES:
        raise InvalidRequestError(
            f"the job's {len(sizes)} environment variables take {total:,} bytes in all, and the limit is"
            f" {MAX_ENV_BYTES:,}; the largest is {largest[:100]} ({sizes[largest]:,} bytes); {_INSTEAD}"
        )
