"""Checks of values from people and other programs: predicates, and functions that refuse a value.

To Python, True is an int, NaN is a number, and 10**400 is finite; to the predicates here, they are not. An error
message names the value and the values that are accepted: "spares is -1; give an int of 0 or more".
"""

import difflib
import ipaddress
import math
import re
import sys
from bisect import bisect
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TypeGuard

from iris_ray.errors import InvalidRequestError, UnknownNameError

MOST_SHOWN = 100
"""The largest number of characters of a value that a message shows."""
MOST_COMPARED = 500
"""The largest number of names that are compared closely with an unknown one. Comparing 100 takes a millisecond."""

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


def is_plain_int(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Like `is_int`, but refuses subclasses: for values that `plain` does not rebuild later."""
    return type(value) is int and value >= least


def is_count(value: object) -> TypeGuard[int]:
    """Whether the value is an int of 0 or more."""
    return is_int(value, 0)


def is_positive_int(value: object) -> TypeGuard[int]:
    """Whether the value is an int of 1 or more."""
    return is_int(value, 1)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a Python int or float whose value as a float is finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_amount(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number of 0 or more."""
    return is_number(value) and value >= 0


is_seconds = is_amount


def is_positive_seconds(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number above 0."""
    return is_number(value) and value > 0


def is_seconds_or_forever(value: object) -> TypeGuard[float]:
    """Whether the value is a number of 0 or more, or infinity."""
    return is_amount(value) or (isinstance(value, float) and value == math.inf)


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


# -- refusals ------------------------------------------------------------------------------------------------------


def require(holds: bool, what: str, value: object, wanted: str, error: Refusal = InvalidRequestError) -> None:
    """Raise ``error`` with the message "WHAT is VALUE; give WANTED" unless the check holds."""
    if not holds:
        raise error(f"{what} is {shown(value)}; give {wanted}")


def require_int(what: str, value: object, least: int, error: Refusal = InvalidRequestError) -> None:
    """Refuse a value that is not an int of ``least`` or more; see `require`."""
    require(is_int(value, least), what, value, f"an int of {least} or more", error)


def require_plain_int(what: str, value: object, least: int, error: Refusal = InvalidRequestError) -> None:
    """Refuse a value that is not `is_plain_int`; see `require`."""
    require(is_plain_int(value, least), what, value, f"an int of {least} or more", error)


def require_amount(what: str, value: object, error: Refusal = InvalidRequestError) -> None:
    """Refuse a value that is not a finite number of 0 or more; see `require`."""
    require(is_amount(value), what, value, "a number of 0 or more", error)


def require_texts(what: str, value: object, example: str) -> None:
    """Refuse a value that is not a list of str; see `require`."""
    require(is_texts(value), what, value, f"a list of str, such as {example}")


def require_variables(env: object) -> None:
    """Refuse a value that is not a mapping of names to str. The message shows no values, which may be secret."""
    if not is_variables(env):
        raise InvalidRequestError("env must be a mapping of names to values, all str")


# -- unknown names -------------------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return the known names most similar to a name, best first; ``cutoff`` is the least similarity, from 0 to 1."""
    return difflib.get_close_matches(name, _likely(name, list(known)), n=most, cutoff=cutoff)


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an unknown name, with the most similar known names."""
    there_are = list(known)
    compared = _likely(name, there_are)
    near = (
        nearest(name, compared)
        or [one for one in compared if name and name in one][:3]
        or [one for one in compared if nearest(name, [one.rpartition("-")[0]], cutoff=0.6)][-3:]
    )
    if near:
        return UnknownNameError(f"there is no {what} {name!r}; did you mean {' or '.join(near)}?")
    if not there_are:
        return UnknownNameError(f"there is no {what} {name!r}, nor any other {what}")
    some = ", ".join(there_are[:5]) + (", …" if len(there_are) > 5 else "")
    return UnknownNameError(f"there is no {what} {name!r}; there are {some}")


def unknown_number(what: str, number: int, known: range) -> UnknownNameError:
    """Return the error for an unknown number; ``known`` is the range of numbers that exist."""
    there_are = f"there are {known[0]} to {known[-1]}" if known else "there is none at all"
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
