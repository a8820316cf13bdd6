"""Whether the iris_ray of another process goes with this one."""

import re
from collections.abc import Awaitable, Mapping
from typing import Any

from ray.exceptions import ActorDiedError, RuntimeEnvSetupError

from iris_ray.actors.calls.asking import answer
from iris_ray.actors.protocol.answers import OtherVersion, Unreachable
from iris_ray.actors.protocol.version import in_words, require_fit, versions_here
from iris_ray.errors import VersionMismatchError

_NOT_IMPORTED = re.compile(r"^.*(?:ImportError|ModuleNotFoundError)\b.*$", re.MULTILINE)


async def _started(versions: Awaitable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the answer. Raise ImportError if the actor could not be made, because iris_ray can't be imported there."""
    try:
        return await versions
    except ActorDiedError as error:
        if lines := _NOT_IMPORTED.findall(str(error)):
            raise ImportError(lines[-1].strip()) from None
        raise


async def misfit(
    versions: Awaitable[Mapping[str, Any]], name: str, host: int, timeout_s: float | None
) -> Unreachable | None:
    """Return why a process on a host can't work with this one; None if it can.

    Args:
        versions: the call that asks it for its versions.
        name: the process, for the message.
        host: the index of its host.
        timeout_s: how long it may take to start; seconds.
    """
    ours = versions_here()
    install = f"install iris_ray {ours['version']} in the image of the hosts"
    try:
        theirs = await answer(_started(versions), name, timeout_s)
        if isinstance(theirs, Unreachable):
            return theirs
        require_fit(theirs, ours, name, install)
    except RuntimeEnvSetupError:
        raise
    except VersionMismatchError as error:
        return OtherVersion(str(error), (host,))
    except Exception as error:  # it has no iris_ray, or one that does not know the question
        why = (str(error).strip().splitlines() or [""])[-1]
        return OtherVersion(
            f"{name} can't use iris_ray: {type(error).__name__}: {why}; this is {in_words(ours)}: {install}",
            (host,),
        )
    return None
