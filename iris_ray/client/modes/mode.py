"""The mode of a run: what ``mode=``, ``simulate=`` and ``IRIS_RAY_MODE`` say."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from iris_ray.client.modes.fault_schedule import PlannedFault, parse_schedule
from iris_ray.errors import InvalidModeError
from iris_ray.settings import MODE


class ModeKind(StrEnum):
    """Where a run happens."""

    CLUSTER = "cluster"  # on the Ray cluster, as always
    SIMPLE = "simple"  # in local processes, one for each task, without Ray
    VALIDATE = "validate"  # checked, its plan printed, then as SIMPLE
    SIMULATE = "simulate"  # on a simulated cluster of this machine, with faults


@dataclass(frozen=True, slots=True)
class Mode:
    """Where a run happens, and which faults a simulated one meets."""

    kind: ModeKind
    faults: tuple[PlannedFault, ...] = ()

    @property
    def local(self) -> bool:
        return self.kind is not ModeKind.CLUSTER


def chosen_mode(mode: str | None, simulate: str | None, environ: Mapping[str, str] = os.environ) -> Mode:
    """Return the mode of a run: the argument's, else the variable's, else the cluster.

    Args:
        mode: a name of `ModeKind`; ``"simulate: kill slice 0 after 30s"`` also has the faults. None: not given.
        simulate: faults, such as ``"kill slice 0 after 30s"``; it implies the mode ``simulate``. None: not given.
        environ: has the variable.

    Raises:
        InvalidModeError: no such mode or fault; the message has the nearest.
    """
    if simulate is not None:
        if mode not in (None, ModeKind.SIMULATE):
            raise InvalidModeError(f"simulate={simulate!r} with mode={mode!r}; leave one of them out")
        return Mode(ModeKind.SIMULATE, parse_schedule("simulate", simulate))
    source = "mode" if mode is not None else MODE.name
    written = mode if mode is not None else MODE.read(environ) or ModeKind.CLUSTER
    if not isinstance(written, str):
        raise InvalidModeError(f"mode is {written!r}; give one of {', '.join(ModeKind)}")
    name, colon, schedule = written.partition(":")
    kind = _kind(source, name.strip())
    if colon and kind is not ModeKind.SIMULATE:
        raise InvalidModeError(f'{source} is {written!r}, but only simulate takes faults: "simulate:{schedule}"')
    return Mode(kind, parse_schedule(source, schedule) if colon else ())


def _kind(source: str, name: str) -> ModeKind:
    known = list(ModeKind)
    if name.lower() in known:
        return ModeKind(name.lower())
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    advice = f"did you mean {str(near[0])!r}?" if near else f"give one of {', '.join(known)}"
    raise InvalidModeError(f"{source} is {name!r}, and there is no such mode; {advice}")


def require_no_local_mode(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse what needs a cluster and its queue if the variable asks for a local mode.

    Raises:
        InvalidModeError: it does.
    """
    if chosen_mode(None, None, environ).local:
        raise InvalidModeError(
            f"{MODE.name} is {MODE.read(environ)!r}, which is for run_on_pod; a client needs a cluster with its queue:"
            ' unset the variable, or try IrisClient.local({"v4-16": 2})'
        )
