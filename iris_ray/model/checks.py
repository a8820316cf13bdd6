"""Checks of values that people and other programs hand over: predicates, and functions that refuse a value.

To Python True is an int, NaN a number and 10**400 a finite one. To the predicates here they are not. An error message
names the value and says what to give: "spares is -1; give an int of 0 or more".
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
"""Characters of a value that a message shows at most."""
MOST_COMPARED = 500
"""How many names are compared closely with an unknown one; a hundred take a millisecond."""

Refusal = type[InvalidRequestError]


def shown(value: object) -> str:
    """Return the text of a value for a message, even if its class can't give one."""
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


# -- numbers -------------------------------------------------------------------------------------------------------


def is_whole(value: object) -> TypeGuard[int]:
    """An int, also one of NumPy."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def is_real(value: object) -> TypeGuard[float]:
    """A number, also one of NumPy. It may be infinite or NaN, or larger than a float can be."""
    return isinstance(value, (float, Real)) and not isinstance(value, bool)


def is_int(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """An int of Python, not below another number."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_plain_int(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """An int of no subclass, not below another number. For values that `plain` does not rebuild later."""
    return type(value) is int and value >= least


def is_count(value: object) -> TypeGuard[int]:
    """An int of 0 or more."""
    return is_int(value, 0)


def is_positive_int(value: object) -> TypeGuard[int]:
    """An int of 1 or more."""
    return is_int(value, 1)


def is_number(value: object) -> TypeGuard[float]:
    """An int or a float of Python that is finite as a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_amount(value: object) -> TypeGuard[float]:
    """A finite number of 0 or more."""
    return is_number(value) and value >= 0


is_seconds = is_amount


def is_positive_seconds(value: object) -> TypeGuard[float]:
    """A finite number above 0."""
    return is_number(value) and value > 0


def is_seconds_or_forever(value: object) -> TypeGuard[float]:
    """A number of 0 or more, or infinity."""
    return is_amount(value) or (isinstance(value, float) and value == math.inf)


def is_timeout(value: object) -> TypeGuard[float]:
    """A number of seconds, also one of NumPy. Infinity waits for ever; a negative number does not wait."""
    try:
        return is_real(value) and not math.isnan(value)
    except OverflowError:
        return False


# -- text ----------------------------------------------------------------------------------------------------------


def is_name(value: object) -> TypeGuard[str]:
    """A str that is not empty."""
    return isinstance(value, str) and len(value) > 0


_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_JOB_ID, _USER = re.compile(rf"{_PART}(?:/{_PART})*"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
_NOT_IN_IDS, _NOT_IN_USERS = re.compile(r"[^A-Za-z0-9._-]+"), re.compile(r"[^A-Za-z0-9._@+-]+")
# Shells, terminals, spreadsheets and file systems give these characters no meaning of their own.


def is_job_id(value: object) -> TypeGuard[str]:
    """Parts of ASCII letters, digits, ``.``, ``_`` and ``-``, with ``/`` between them. Each begins with none of these.

    So nobody's id is a command to another's shell or terminal, a formula, or a path out of a directory.
    """
    return isinstance(value, str) and _JOB_ID.fullmatch(value) is not None


def is_user(value: object) -> TypeGuard[str]:
    """A user's name: ASCII letters, digits, ``.``, ``_``, ``-``, ``@`` and ``+``, the first a letter or digit."""
    return isinstance(value, str) and _USER.fullmatch(value) is not None


def part_of_id(text: str) -> str:
    """Return any text as a part of a job's id: other characters become ``-``."""
    return _NOT_IN_IDS.sub("-", text).strip("._-") or "job"


def as_user(text: str) -> str:
    """Return any text as a user's name: other characters become ``-``."""
    return _NOT_IN_USERS.sub("-", text).strip("._@+-") or "unnamed"


def is_unicode(text: str) -> bool:
    """Whether text can be encoded. Half of a surrogate pair, as in the name of a file that is no UTF-8, can't."""
    try:
        return text.isascii() or text.encode() is not None
    except UnicodeEncodeError:
        return False


def is_texts(value: object) -> TypeGuard[list[str] | tuple[str, ...]]:
    """A list or tuple of str."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)


def is_variables(value: object) -> TypeGuard[Mapping[str, str]]:
    """A mapping from str to str."""
    return isinstance(value, Mapping) and all(isinstance(part, str) for item in value.items() for part in item)


# -- refusals ------------------------------------------------------------------------------------------------------


def require(holds: bool, what: str, value: object, wanted: str, error: Refusal = InvalidRequestError) -> None:
    """Refuse a value with "WHAT is VALUE; give WANTED", as an ``error``, unless its check holds."""
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
    """Return the known names that are most similar to a name, best first; ``cutoff`` is the least similarity, to 1."""
    return difflib.get_close_matches(name, _likely(name, list(known)), n=most, cutoff=cutoff)


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that does not exist, with the nearest existing names."""
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
    """Return the error for a number that does not exist; ``known`` are the existing numbers."""
    there_are = f"there are {known[0]} to {known[-1]}" if known else "there is none at all"
    return UnknownNameError(f"there is no {what} with the number {number}; {there_are}")


def _likely(name: str, known: list[str]) -> list[str]:
    """Return the names next to this one in the alphabet, which share its beginning. Few names are all returned."""
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
