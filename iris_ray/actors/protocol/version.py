"""The protocol version, by which a Controller and a client of different versions of iris_ray know if they can talk."""

from iris_ray.errors import VersionMismatchError

PROTOCOL_VERSION = 10
"""Raise this number when a Controller and a client of the version before could misunderstand each other: when a method
that one calls on the other changes its signature or meaning, or a message its fields or its module."""

NO_PROTOCOL = 0
"""The protocol of Controllers from before there was a protocol version."""

SOME_OLDER_VERSION = "an older version"
"""The version of such a Controller, in messages."""


def require_same_protocol(theirs: int, their_version: str, our_version: str) -> None:
    """Check that this client can talk to a Controller.

    Args:
        theirs, their_version: the Controller's protocol and its version of iris_ray.
        our_version: the client's version of iris_ray.

    Raises:
        VersionMismatchError: the protocols differ; the message says what to do.
    """
    if theirs == PROTOCOL_VERSION:
        return
    found = (
        f"the cluster's Controller is iris_ray {their_version} (protocol {theirs}), and this is iris_ray {our_version}"
        f" (protocol {PROTOCOL_VERSION})"
    )
    if theirs > PROTOCOL_VERSION:
        raise VersionMismatchError(f"{found}: install iris_ray {their_version} here")
    raise VersionMismatchError(
        f"{found}: replace the Controller with `iris-ray cluster controller upgrade`, or install its version here"
    )
