"""Whether two versions of iris_ray can talk to each other: the Controller is one, and its clients may be another."""

from iris_ray.errors import VersionMismatchError

PROTOCOL_VERSION = 3
"""To be raised whenever a Controller and a client of the version before could misunderstand each other: another
signature or meaning of a method that one calls on the other, other fields of what travels between them."""

NO_PROTOCOL = 0
"""Of Controllers from before there was a number."""

SOME_OLDER_VERSION = "an older version"
"""What such a Controller is said to be of."""


def require_same_protocol(theirs: int, their_version: str, our_version: str) -> None:
    """Of a client: can it talk to this Controller?

    Raises:
        VersionMismatchError: it can't; the message says what to do.
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
        f"{found}: replace the Controller with `iris-ray controller upgrade`, or install its version here"
    )
