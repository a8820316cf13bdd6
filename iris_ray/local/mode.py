"""The mode of a run, from ``mode=``, ``simulate=`` and ``IRIS_RAY_MODE``; the faults of a simulation; a run's plan."""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.actors.protocol.payloads import INLINE_BYTES, load
from iris_ray.errors import InvalidFunctionError, InvalidModeError, InvalidRequestError
from iris_ray.model.topology import get_tpu_config
from iris_ray.settings import MODE


class ModeKind(StrEnum):
    """Where a run happens."""

    CLUSTER = "cluster"  # on the Ray cluster, as always
    SIMPLE = "simple"  # in local processes, one for each task, without Ray
    VALIDATE = "validate"  # checked, its plan printed, then as SIMPLE
    SIMULATE = "simulate"  # on a simulated cluster of this machine, with faults


@dataclass(frozen=True, slots=True)
class Mode:
    """Where on this machine a run happens, and the faults of a simulated run."""

    kind: ModeKind
    faults: "tuple[PlannedFault, ...]" = ()


def chosen_mode(mode: str | None, simulate: str | None, environ: Mapping[str, str] = os.environ) -> Mode:
    """Return the local mode of a run: the argument's, else the variable's.

    Args:
        mode: a name of `ModeKind`; ``"simulate: kill slice 0 after 30s"`` also has the faults. None: not given.
        simulate: faults, such as ``"kill slice 0 after 30s"``, which imply the mode ``simulate``. None: not given.
        environ: the environment with the variable.

    Raises:
        InvalidModeError: no such mode or fault; the message has the nearest.
    """
    if simulate is not None:
        if mode not in (None, ModeKind.SIMULATE):
            raise InvalidModeError(f"simulate={simulate!r} with mode={mode!r}; leave one of them out")
        return Mode(ModeKind.SIMULATE, parse_schedule("simulate", simulate))
    source = "mode" if mode is not None else MODE.name
    written = MODE.read(environ) if mode is None else mode
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


# -- fault schedule ----------------------------------------------------------------------------------------------------

FORMS = (
    "kill slice SLICE after TIME",
    "kill host HOST of slice SLICE after TIME",
    "preempt slice SLICE after TIME",
    "preempt slice SLICE after TIME with NOTICE notice",
    "freeze host HOST of slice SLICE after TIME",
    "thaw host HOST of slice SLICE after TIME",
    "add slice after TIME",
)
LOSSES = frozenset({"kill", "preempt", "freeze"})
"""Actions that cost a slice. A new slice then takes its place."""
LONGEST_S = 365 * 24 * 3600.0

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = r"\d+(?:\.\d+)?\s?(?:ms|s|m|h)\b"
_WITHOUT_UNIT = re.compile(r"((?:after|with) \d+(?:\.\d+)?)(?= notice|$| with)")
_VALUES = {"SLICE": r"\d{1,6}", "HOST": r"\d{1,6}", "TIME": _TIME, "NOTICE": _TIME}
_USUAL = {"SLICE": "0", "HOST": "0", "TIME": "30s", "NOTICE": "10s"}
_PLACE = re.compile("|".join(_VALUES))
_PATTERNS = [re.compile(_PLACE.sub(lambda m: f"(?P<{m[0]}>{_VALUES[m[0]]})", form)) for form in FORMS]


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault of a simulated cluster.

    Attributes:
        text: as the user wrote it.
        action: the first word: kill, preempt, freeze, thaw or add.
        after_s: seconds after the job has first run.
        slice_number: the slice, counted in the order of their start; None for add.
        host: the host of the slice; None for all.
        notice_s: seconds of notice of a preemption; 0 for none.
    """

    text: str
    action: str
    after_s: float
    slice_number: int | None = None
    host: int | None = None
    notice_s: float = 0.0


def parse_schedule(source: str, schedule: str) -> tuple[PlannedFault, ...]:
    """Return the faults of a schedule, in the order in which they happen.

    Args:
        source: the place of the schedule, for messages.
        schedule: faults separated by commas: ``"kill slice 0 after 30s, preempt slice 1 after 1m with 10s notice"``.

    Raises:
        InvalidModeError: there is no such fault; the message has the nearest.
    """
    if not isinstance(schedule, str):
        raise InvalidModeError(f'{source} is {schedule!r}; give faults, such as "kill slice 0 after 30s"')
    texts = [" ".join(text.lower().split()) for text in schedule.split(",")]
    faults = [_parse(source, text) for text in texts if text]
    return tuple(sorted(faults, key=lambda fault: fault.after_s))


def require_possible(faults: Sequence[PlannedFault], slices: int, hosts: int) -> None:
    """Refuse faults of slices and hosts that will not exist when they happen.

    Args:
        faults: in the order in which they happen.
        slices: the number of slices at the start.
        hosts: the number of hosts of each slice.

    Raises:
        InvalidModeError: names the first fault that can't happen.
    """
    for fault in faults:
        if fault.slice_number is not None and fault.slice_number >= slices:
            raise InvalidModeError(f"{fault.text!r}: by then there are only the slices 0 to {slices - 1}")
        if fault.host is not None and fault.host >= hosts:
            raise InvalidModeError(f"{fault.text!r}: a slice has the hosts 0 to {hosts - 1}")
        slices += fault.action in LOSSES or fault.action == "add"


def _parse(source: str, text: str) -> PlannedFault:
    found = _match(text)
    if found is None:
        in_seconds = _WITHOUT_UNIT.sub(r"\1s", text)
        if _match(in_seconds):
            raise InvalidModeError(f"{source}: {text!r} lacks the unit of a time; did you mean {in_seconds!r}?")
        raise InvalidModeError(f"{source}: there is no fault {text!r}; did you mean {_nearest(text)!r}?")
    values = found.groupdict()
    number, host, notice = values.get("SLICE"), values.get("HOST"), values.get("NOTICE")
    after_s, notice_s = _seconds(values["TIME"]), _seconds(notice) if notice else 0.0
    if max(after_s, notice_s) > LONGEST_S:
        raise InvalidModeError(f"{source}: {text!r} has a time of more than a year; give a shorter one")
    return PlannedFault(
        text,
        text.split()[0],
        after_s,
        None if number is None else int(number),
        None if host is None else int(host),
        notice_s,
    )


def _match(text: str) -> re.Match[str] | None:
    return next(filter(None, (pattern.fullmatch(text) for pattern in _PATTERNS)), None)


def _seconds(written: str) -> float:
    found = re.fullmatch(r"([\d.]+)\s?(\w+)", written)
    assert found is not None, "the pattern has seen it"
    return float(found[1]) * _SECONDS[found[2]]


def _nearest(text: str) -> str:
    """Return the form that is most similar to a text, with the values in the text."""
    slices, hosts, times = re.findall(r"slice (\d+)", text), re.findall(r"host (\d+)", text), re.findall(_TIME, text)
    values = {"SLICE": slices[:1], "HOST": hosts[:1], "TIME": times[:1], "NOTICE": times[1:2]}
    verbs = difflib.get_close_matches(text.partition(" ")[0], [form.partition(" ")[0] for form in FORMS], n=1)
    forms = [form for form in FORMS if form.startswith(tuple(verbs))] or FORMS
    filled = [_PLACE.sub(lambda m: (values[m[0]] or [_USUAL[m[0]]])[0], form) for form in forms]
    return difflib.get_close_matches(text, filled, n=1, cutoff=0.0)[0]


# -- plan --------------------------------------------------------------------------------------------------------------


def require_runnable(request: RunRequest) -> None:
    """Check what ``validate`` checks beyond other modes: that the function and modules load on this machine.

    Raises:
        InvalidFunctionError: the function can't be unpickled.
        InvalidRequestError: this machine lacks a module of ``preload``.
    """
    try:
        load(request.pickled_function)
    except Exception as error:
        raise InvalidFunctionError(f"the function can't be unpickled: {type(error).__name__}: {error}") from error
    for module in request.process.preload:
        if not _exists(module):
            raise InvalidRequestError(
                f"preload holds {module!r}, and there is no such module here; install it, or leave it out"
            )


def plan_in_words(request: RunRequest) -> str:
    """Return the plan of a run on a cluster, a line for each part."""
    return "\n".join([f"plan of {request.spec.job_id}", *(f"  {what:<12}{text}" for what, text in _parts(request))])


def _parts(request: RunRequest) -> Iterator[tuple[str, str]]:
    spec = request.spec
    assert spec.device is not None, "a gang on slices has a type"
    assert spec.coscheduling is not None, "and numbers of slices"
    config, counts = get_tpu_config(spec.device), spec.coscheduling.num_groups
    one_of = " or ".join(map(str, counts))
    if spec.part is None:
        unit, hosts = "slice", config.vm_count
        yield "slices", f"{one_of} of {config.name}, each of {hosts} hosts with {config.chips_per_vm} chips"
    else:
        unit, hosts = "part", spec.replicas
        yield "parts", f"{one_of} of {config.name} in the shape {spec.part}, each of {hosts} host{'s' * (hosts > 1)}"
    most = max(counts)
    on = f"{most} {unit}{'s' * (most > 1)}"
    each = "one process" if spec.processes_per_host == 1 else f"{spec.processes_per_host} processes"
    tasks = spec.replicas * spec.processes_per_host
    yield "tasks", f"{most * tasks} on {on}, {each} on each host, all or none"
    for slice_id in range(min(most, 8)):
        yield "", f"{unit} {slice_id}: tasks {slice_id * tasks} to {(slice_id + 1) * tasks - 1}"
    if most > 8:
        yield "", "…"
    yield "retries", f"{spec.max_retries_failure:,} after failures, {spec.max_retries_preemption:,} after lost hosts"
    yield "queue", f"user {spec.user}, band {spec.priority.name}"
    yield "spares", str(spec.spares)
    if others := {name: amount for name, amount in spec.resources.items() if name != "TPU"}:
        yield "each task", ", ".join(f"{amount:g} {name}" for name, amount in others.items())
    yield "hosts", "; ".join(map(str, spec.constraints))
    if spec.preferences:
        yield "preferred", "; ".join(map(str, spec.preferences))
    if spec.tolerations:
        yield "tolerates", ", ".join(spec.tolerations)
    size = len(request.pickled_function) if isinstance(request.pickled_function, bytes) else 0
    travels = "once to each node" if size > INLINE_BYTES else "with each launch"
    yield "function", f"{spec.name}, {size:,} bytes, travels {travels}"
    env = {**request.env, **request.secrets, **request.process.runtime_env.get("env_vars", {})}
    if env:
        yield "variables", ", ".join(sorted(env))
    if parts := sorted(set(request.process.runtime_env) - {"env_vars"}):
        yield "runtime_env", ", ".join(parts)
    if request.process.preload:
        yield "preload", ", ".join(request.process.preload)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of the module is missing
        return False
