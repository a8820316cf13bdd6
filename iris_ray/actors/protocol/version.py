"""Versions, by which processes of different installations of iris_ray know whether they can work together.

Processes tell each other their versions as a dictionary of plain values, so that any version can read that of another.
"""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import iris_ray
from iris_ray.errors import VersionMismatchError
from iris_ray.model.job_spec import FIELDS_OF_A_JOB

PROTOCOL_VERSION = 26
"""Raise this number when processes of this version and of the one before could misunderstand each other: when a method
that one calls on the other changes its signature or meaning, or a message its fields or its module; or when processes
of this version can't do without a method that those of the one before lack. A new field of `JobSpec` needs no new
number, as processes also compare these; one of `RunRequest` does."""

NO_PROTOCOL = 0
"""The protocol of versions from before there was a protocol version."""

SOME_OLDER_VERSION = "an older version"
"""The version of such an iris_ray, in messages."""

NO_VERSIONS: Mapping[str, Any] = {"protocol": NO_PROTOCOL, "version": SOME_OLDER_VERSION}
"""The versions that are assumed of a process that can't tell its own."""

VERSIONS_DO_NOT_FIT = 3
"""The exit code of the process that is to start a Controller, if the version on the head does not go with its own."""


def package_directory() -> str:
    """Return the directory from which this process has imported iris_ray."""
    return str(Path(iris_ray.__file__).parent)


def versions_here() -> dict[str, Any]:
    """Return the versions of this process of a cluster, where its iris_ray is, and on which machine.

    New keys may be added; keys that are here keep their meaning for ever.
    """
    import ray

    return installed_versions() | {"address": ray.util.get_node_ip_address()}


def installed_versions() -> dict[str, Any]:
    """Return `versions_here` without the machine, for a process that is not connected to Ray."""
    import ray

    return {
        "protocol": PROTOCOL_VERSION,
        "job": list(FIELDS_OF_A_JOB),
        "version": iris_ray.__version__,
        "package": package_directory(),
        "ray": ray.__version__,
        "python": platform.python_version(),
    }


def in_words(versions: Mapping[str, Any]) -> str:
    """Return an iris_ray in words: its version, its protocol, and where it is."""
    words = f"iris_ray {versions['version']} (protocol {versions['protocol']})"
    words += f" from {versions['package']}" if versions.get("package") else ""
    return words + (f" on {versions['address']}" if versions.get("address") else "")


def require_fit(theirs: Mapping[str, Any], ours: Mapping[str, Any], who: str, upgrade: str) -> None:
    """Check that another process and this one can work together: releases of the same protocol can, if a job has the
    same options in both.

    Args:
        theirs, ours: the versions of both, as of `versions_here`.
        who: the other process, for the message, such as "the cluster's Controller".
        upgrade: what to do if the other process has an older iris_ray, with "or" before what else would help.

    Raises:
        VersionMismatchError: they can't; the message has both versions, where each is, and what to do.
    """
    their_job, our_job = (set(versions.get("job", FIELDS_OF_A_JOB)) for versions in (theirs, ours))
    if theirs["protocol"] != ours["protocol"] or their_job != our_job:
        found = f"{who} is {in_words(theirs)}, and this is {in_words(ours)}"
        if theirs["protocol"] == ours["protocol"]:
            found += f"; only one of them knows {', '.join(sorted(their_job ^ our_job))} of a job"
        if (theirs["protocol"], len(their_job)) > (ours["protocol"], len(our_job)):
            raise VersionMismatchError(f"{found}: install iris_ray {theirs['version']} here")
        raise VersionMismatchError(f"{found}: {upgrade}, or install its version here")
    for what in ("Ray", "Python"):
        their, our = theirs.get(what.lower()), ours.get(what.lower())
        if their and our and their.split(".")[:2] != our.split(".")[:2]:
            raise VersionMismatchError(
                f"{who} runs on {what} {their} ({in_words(theirs)}), and this on {what} {our} ({in_words(ours)}):"
                f" one may be unable to read the other's pickles; use the same {what} in the image and here"
            )


REPLACE_CONTROLLER = "replace the Controller with `iris-ray cluster controller upgrade`"
THE_CONTROLLER = "the cluster's Controller"


def require_fitting_controller(theirs: Mapping[str, Any]) -> None:
    """Check that this process can talk to a Controller of these versions. Raise as `require_fit`."""
    require_fit(theirs, versions_here(), THE_CONTROLLER, REPLACE_CONTROLLER)
