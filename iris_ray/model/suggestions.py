"""What to say about a name that nothing has."""

import difflib
from collections.abc import Iterable

from iris_ray.errors import UnknownNameError


def unknown(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that does not exist, with the nearest ones that do."""
    there_are = list(known)
    near = (
        difflib.get_close_matches(name, there_are, n=3, cutoff=0.5)
        or [n for n in there_are if name and name in n][:3]
        or [n for n in there_are if difflib.get_close_matches(name, [n.rpartition("-")[0]], cutoff=0.6)][-3:]
    )
    if near:
        return UnknownNameError(f"there is no {what} {name!r}; did you mean {' or '.join(near)}?")
    some = ", ".join(there_are[:5]) + (", …" if len(there_are) > 5 else "")
    return UnknownNameError(f"there is no {what} {name!r}; there {'are ' + some if some else 'are none at all'}")
