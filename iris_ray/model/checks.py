"""Checks of values from people and other programs: predicates, and functions that refuse a value.

To Python, True is an int, NaN is a number, and 10**400 is finite; to the predicates here, they are not. An error
message names the value and the values that are accepted: "spares is -1; give an int of 0 or more".
"""

import difflib
import heapq
import ipaddress
import math
import re
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any, ClassVar, Final, Protocol, TypeGuard

from iris_ray.errors import InvalidRequestError, UnknownNameError

MOST_SHOWN = 100
"""The largest number of characters of a value that a message shows."""
MOST_COMPARED, LONGEST_COMPARED = 500, 48
"""The number of names, and of their first characters, that are compared with an unknown name."""
MOST_MEASURED = 10
"""The number of compared names whose similarity is measured. That takes time with the cube of their length."""

Refusal = type[InvalidRequestError]


def shown(value: object) -> str:
    """Return a value's `repr`, cut to `MOST_SHOWN` characters, for a message; its type's name if `repr` raises."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


# -- numbers -------------------------------------------------------------------------------------------------------


def is_whole(value: object) -> TypeGuard[int]:
    """Whether the value is an int, including NumPy's ints."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """Whether the value is a real number, including NumPy's, infinity, NaN, and ints that are too large for a float."""
    return isinstance(value, (float, Real)) and not isinstance(value, bool)


def is_int(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether the value is a Python int of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a Python int or float whose value as a float is finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_timeout(value: object) -> TypeGuard[float]:
    """Whether the value is a timeout in seconds: a real number. Infinity means no limit."""
    try:
        return is_real(value) and not math.isnan(value)
    except OverflowError:
        return False


# -- text ----------------------------------------------------------------------------------------------------------


def is_name(value: object) -> TypeGuard[str]:
    """Whether the value is a non-empty str."""
    return isinstance(value, str) and len(value) > 0


_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_JOB_ID, _USER = re.compile(rf"{_PART}(?:/{_PART})*"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_NOT_IN_IDS, _NOT_IN_USERS = re.compile(r"[^A-Za-z0-9._-]+"), re.compile(r"[^A-Za-z0-9._@+-]+")
# Shells, terminals, spreadsheets and file systems give these characters no meaning of their own.


def is_job_id(value: object) -> TypeGuard[str]:
    """Whether the value is a job id: parts of ASCII letters, digits, ``.``, ``_`` and ``-``, separated by ``/``.

    Each part begins with a letter or digit. An id therefore can't act as a command in a shell or terminal, as a
    formula, or as a path out of a directory.
    """
    return isinstance(value, str) and _JOB_ID.fullmatch(value) is not None


def is_user(value: object) -> TypeGuard[str]:
    """Whether the value is a user name: ASCII letters, digits and ``._-@+``, beginning with a letter or digit."""
    return isinstance(value, str) and _USER.fullmatch(value) is not None


def part_of_id(text: str) -> str:
    """Convert text to a part of a job id, with ``-`` in place of characters that an id can't have."""
    return _NOT_IN_IDS.sub("-", text).strip("._-") or "job"


def as_user(text: str) -> str:
    """Convert text to a user name, with ``-`` in place of characters that a name can't have."""
    return _NOT_IN_USERS.sub("-", text).strip("._@+-") or "unnamed"


def is_unicode(text: str) -> bool:
    """Whether text can be encoded as UTF-8. A lone surrogate, as in a file name that isn't UTF-8, can't."""
    try:
        return text.isascii() or text.encode() is not None
    except UnicodeEncodeError:
        return False


def is_texts(value: object) -> TypeGuard[list[str] | tuple[str, ...]]:
    """Whether the value is a list or tuple of str."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def is_variables(value: object) -> TypeGuard[Mapping[str, str]]:
    """Whether the value is a mapping from str to str."""
    return isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item)


# -- checks --------------------------------------------------------------------------------------------------------

AUTO: Final = "auto"
"""A number that iris_ray determines itself."""


class Check(Protocol):
    """A check of values of one kind. Options, messages, files and arguments are all refused by these."""

    @property
    def wanted(self) -> str:
        """A description of valid values, for people: ``seconds, 0 or more``."""

    def problem(self, value: object) -> str | None:
        """Return the problem as a predicate to follow the value's name in a message; None if the value is valid."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An int from ``least`` to ``most``, or None if ``or_none``.

    Attributes:
        exactly: whether ints of subclasses are refused, for values that `plain` does not rebuild later.
    """

    least: int = 0
    most: int | None = None
    or_none: bool = False
    exactly: bool = False

    @property
    def wanted(self) -> str:
        numbers = f"an int of {self.least} or more" if self.most is None else f"an int from {self.least} to {self.most}"
        return numbers + ", or None" * self.or_none

    def problem(self, value: object) -> str | None:
        if value is None and self.or_none:
            return None
        if is_int(value, self.least) and value <= (self.most or value) and (type(value) is int or not self.exactly):
            return None
        return f"is {shown(value)}; give {self.wanted}"


@dataclass(frozen=True, slots=True)
class Number:
    """A number, or None if ``or_none``.

    Attributes:
        least: the smallest number; None for no limit.
        above: whether the number must exceed ``least``.
        endless: whether infinity is allowed.
        or_none: whether None is allowed.
        auto: whether `AUTO` is allowed.
        most: the largest number; None for no limit.
    """

    what: ClassVar[str] = "a number"
    least: float | None = 0
    above: bool = False
    endless: bool = False
    or_none: bool = False
    auto: bool = False
    most: float | None = None

    @property
    def wanted(self) -> str:
        number = "" if self.least is None else f"{self.least:.10g}"
        least = number and (f", more than {number}" if self.above else f", {number} or more")
        most = "" if self.most is None else f", {self.most:.10g} at most"
        others = ", or infinity" * self.endless + f", {AUTO!r}" * self.auto + ", or None" * self.or_none
        return f"{self.what}{least}{most}{others}"

    def problem(self, value: object) -> str | None:
        if (value is None and self.or_none) or (self.auto and isinstance(value, str) and value == AUTO):
            return None
        if self.endless and isinstance(value, float) and value == math.inf:
            return None
        if is_number(value):
            least = -math.inf if self.least is None else self.least
            if (value > least if self.above else value >= least) and (self.most is None or value <= self.most):
                return None
        return f"is {shown(value)}; give {self.wanted}"


class Seconds(Number):
    """A number of seconds."""

    __slots__ = ()
    what = "seconds"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several ints, strs or members of an enum."""

    choices: tuple[Any, ...]
    or_none: bool = False

    @property
    def wanted(self) -> str:
        return f"one of {', '.join(map(_choice, self.choices))}" + ", or None" * self.or_none

    def problem(self, value: object) -> str | None:
        if self.or_none and value is None:
            return None
        is_alike = isinstance(value, type(self.choices[0])) and not isinstance(value, bool)
        return None if is_alike and value in self.choices else f"is {shown(value)}; give {self.wanted}"


def _choice(one: object) -> str:
    return f"{type(one).__name__}.{one.name}" if isinstance(one, Enum) else repr(one)


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list or tuple with items of one type.

    Attributes:
        wrong: returns an item's problem, to follow the item in a message; "" if there is none.
    """

    kind: type
    wanted: str
    wrong: Callable[[Any], str] = lambda _: ""

    def problem(self, value: object) -> str | None:
        if not isinstance(value, (list, tuple)):
            return f"is {shown(value)}; give {self.wanted}"
        for one in value:
            if not isinstance(one, self.kind):
                return f"has {shown(one)}; give {self.wanted}"
            if wrong := self.wrong(one):
                return f"has {shown(one)}{wrong}"
        return None


class Holds:
    """A value for which a predicate holds.

    Args:
        holds: the predicate, or a type whose instances are valid.
        valid: a description of valid values.
        or_none: whether None is allowed.
        hides: whether messages have no values, because they may be secret.
    """

    def __init__(self, holds: Any, valid: str, or_none: bool = False, hides: bool = False) -> None:
        self._holds = (lambda value: isinstance(value, holds)) if isinstance(holds, type) else holds
        self._valid, self._or_none, self._hides = valid, or_none, hides
        self.wanted = valid + ", or None" * or_none

    def problem(self, value: object) -> str | None:
        if (value is None and self._or_none) or self._holds(value):
            return None
        return f"must be {self.wanted}" if self._hides else f"is {shown(value)}; give {self.wanted}"


def of_text(check: Check) -> Check:
    """Return the same check of a text: on a command line, and in a variable, nobody can write None."""
    return Holds(check._holds, check._valid, hides=check._hides) if isinstance(check, Holds) else check


FLAG = Holds(bool, "True or False")
NAME = Holds(is_name, "a str that is not empty")
TIMEOUT = Holds(is_timeout, "seconds, or math.inf to wait for ever")
VARIABLES = Holds(is_variables, "a mapping of names to values, all str", hides=True)


def texts(example: str) -> Holds:
    """Return the check of a list of str."""
    return Holds(is_texts, f"a list of str, such as {example}")


def require(what: str, value: object, check: Check, error: Refusal = InvalidRequestError) -> None:
    """Refuse a value that a check does not accept, as in "spares is -1; give an int of 0 or more"."""
    if (problem := check.problem(value)) is not None:
        raise error(f"{what} {problem}")


def require_fields(who: str, owner: object, checks: Mapping[str, Check], error: Refusal = InvalidRequestError) -> None:
    """Refuse an object with a field that its check does not accept; messages begin with ``who``."""
    for name, check in checks.items():
        require(f"{who}{name}", getattr(owner, name), check, error)


# -- unknown names -------------------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return the known names most similar to a name, best first; ``cutoff`` is the least similarity, from 0 to 1.

    The time that this takes is bounded, whatever the names are: strangers choose them.
    """
    matcher = difflib.SequenceMatcher(b=name[:LONGEST_COMPARED])

    def similarity(one: str, measure: Callable[[], float]) -> float:
        matcher.set_seq1(one[:LONGEST_COMPARED])
        return measure()

    likely = heapq.nlargest(
        MOST_MEASURED, _likely(name, list(known)), key=lambda one: similarity(one, matcher.quick_ratio)
    )
    best = heapq.nlargest(most, ((similarity(one, matcher.ratio), one) for one in likely))
    return [one for ratio, one in best if ratio >= cutoff]


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an unknown name, with the most similar known names."""
    there_are = list(known)
    compared = _likely(name, there_are)
    near = nearest(name, compared) or [one for one in compared if name and name in one][:3]
    if not near:
        by_stem: dict[str, list[str]] = {}
        for one in compared:
            by_stem.setdefault(one.rpartition("-")[0], []).append(one)
        near = [one for stem in reversed(nearest(name, by_stem, cutoff=0.6)) for one in by_stem[stem]][-3:]
    if near:
        return UnknownNameError(f"there is no {what} {shown(name)}; did you mean {' or '.join(near)}?")
    if not there_are:
        return UnknownNameError(f"there is no {what} {shown(name)}, nor any other {what}")
    some = ", ".join(there_are[:5]) + (", …" if len(there_are) > 5 else "")
    return UnknownNameError(f"there is no {what} {shown(name)}; there are {some}")


def unknown_number(what: str, number: int, known: range) -> UnknownNameError:
    """Return the error for an unknown number; ``known`` is the range of numbers that exist."""
    there_are = f"there are {known[0]} to {known[-1]}" if known else "there are none"
    return UnknownNameError(f"there is no {what} with the number {number}; {there_are}")


def _likely(name: str, known: list[str]) -> list[str]:
    """Return at most `MOST_COMPARED` known names: the alphabetical neighbours of a name, which share its beginning."""
    if len(known) <= MOST_COMPARED:
        return known
    alphabetical = sorted(known)
    place = bisect(alphabetical, name)
    return alphabetical[max(0, place - MOST_COMPARED // 2) : place + MOST_COMPARED // 2]


def is_loopback(host: str | None) -> bool:
    """Return whether a host name is a loopback address, or ``localhost``, without asking a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address((host or "").strip("[]")).is_loopback
    except ValueError:
        return False
