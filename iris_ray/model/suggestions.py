"""What to say about a name that nothing has."""

import difflib
from bisect import bisect
from collections.abc import Iterable

from iris_ray.errors import UnknownNameError

MOST_COMPARED = 500
"""Names that are compared closely; a hundred take a millisecond."""


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that does not exist, with the nearest ones that do."""
    there_are = list(known)
    compared = there_are if len(there_are) <= MOST_COMPARED else _likely(name, there_are)
    near = (
        difflib.get_close_matches(name, compared, n=3, cutoff=0.5)
        or [n for n in compared if name and name in n][:3]
        or [n for n in compared if difflib.get_close_matches(name, [n.rpartition("-")[0]], cutoff=0.6)][-3:]
    )
    if near:
        return UnknownNameError(f"there is no {what} {name!r}; did you mean {' or '.join(near)}?")
    if not there_are:
        return UnknownNameError(f"there is no {what} {name!r}, nor any other {what}")
    some = ", ".join(there_are[:5]) + (", …" if len(there_are) > 5 else "")
    return UnknownNameError(f"there is no {what} {name!r}; there are {some}")


def unknown_number(what: str, number: int, known: range) -> UnknownNameError:
    """The error for a number that nothing has; ``known`` are those that something has."""
    there_are = f"there are {known[0]} to {known[-1]}" if known else "there is none at all"
    return UnknownNameError(f"there is no {what} with the number {number}; {there_are}")


def _likely(name: str, known: list[str]) -> list[str]:
    """Return the names around this one in the alphabet: they begin like it for longest."""
    alphabetical = sorted(known)
    place = bisect(alphabetical, name)
    return alphabetical[max(0, place - MOST_COMPARED // 2) : place + MOST_COMPARED // 2]
