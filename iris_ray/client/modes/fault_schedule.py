"""What is to happen to a simulated cluster, and when: ``"kill slice 0 after 30s, add slice after 2m"``. Pure."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from iris_ray.errors import InvalidModeError

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
"""What costs a slice; a new one then takes its place."""
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
    """One thing that is to happen.

    Attributes:
        text: as the user wrote it.
        action: the first word: kill, preempt, freeze, thaw or add.
        after_s: seconds after the job has first run.
        slice_number: which slice, in the order in which they were started; None for add.
        host: which host of it; None for all.
        notice_s: of a preemption; 0 without.
    """

    text: str
    action: str
    after_s: float
    slice_number: int | None = None
    host: int | None = None
    notice_s: float = 0.0


def parse_schedule(source: str, schedule: str) -> tuple[PlannedFault, ...]:
    """Return the faults, separated by commas, in the order in which they happen.

    Args:
        source: where it is written, for messages.
        schedule: such as ``"kill slice 0 after 30s, preempt slice 1 after 1m with 10s notice"``; empty: none.

    Raises:
        InvalidModeError: there is no such fault; the message has the nearest.
    """
    if not isinstance(schedule, str):
        raise InvalidModeError(f'{source} is {schedule!r}; give faults, such as "kill slice 0 after 30s"')
    texts = [" ".join(text.lower().split()) for text in schedule.split(",")]
    faults = [_parse(source, text) for text in texts if text]
    return tuple(sorted(faults, key=lambda fault: fault.after_s))


def require_possible(faults: Sequence[PlannedFault], slices: int, hosts: int) -> None:
    """Refuse faults of slices and hosts that there won't be.

    Args:
        faults: in the order in which they happen.
        slices: how many there are at the start.
        hosts: how many each has.

    Raises:
        InvalidModeError: the first fault that can't happen.
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
    """Return the form that is most like this text, with the values that the text has."""
    slices, hosts, times = re.findall(r"slice (\d+)", text), re.findall(r"host (\d+)", text), re.findall(_TIME, text)
    values = {"SLICE": slices[:1], "HOST": hosts[:1], "TIME": times[:1], "NOTICE": times[1:2]}
    verbs = difflib.get_close_matches(text.partition(" ")[0], [form.partition(" ")[0] for form in FORMS], n=1)
    forms = [form for form in FORMS if form.startswith(tuple(verbs))] or FORMS
    filled = [_PLACE.sub(lambda m: (values[m[0]] or [_USUAL[m[0]]])[0], form) for form in forms]
    return difflib.get_close_matches(text, filled, n=1, cutoff=0.0)[0]
