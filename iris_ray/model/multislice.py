"""Gangs on several slices: the numbers of slices that they can use, and the MEGASCALE variables that join the slices.

libtpu reads the variables when the process first touches the TPU. A single slice must have none of them set:
``MEGASCALE_NUM_SLICES=1`` still switches megascale on, and stale values of a provider or of an earlier attempt make
JAX wait for peers that don't exist. So every attempt overwrites or removes them, and inherits none.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from iris_ray.errors import InvalidSliceCountError
from iris_ray.model.checks import shown

MEGASCALE_PREFIX = "MEGASCALE_"
MOST_SLICES = 100_000
"""Limit for one gang: far more than anybody has, and few enough for a mistaken request to do no harm."""
MOST_COUNTS = 1_000
"""Limit for the numbers of slices in one request."""


@dataclass(frozen=True, slots=True)
class MultisliceInfo:
    """What each slice of a gang must know to find the other slices.

    Args:
        coordinator_ip: address of slice 0's worker 0, reachable from every host; not an IPv6 literal, because JAX
            cuts ``MEGASCALE_COORDINATOR_ADDRESS`` at its first colon.
        slice_id: 0-based number of this slice.
        num_slices: how many slices the gang has; at least 1.
        port: the coordinator's port.
        debug_port: libtpu's debug port, which is 8081 unless set and must differ from ``port``; the port after
            ``port`` if left out.
        own_port: the port of this process, where several share a host; None: ``port``.
    """

    coordinator_ip: str
    slice_id: int
    num_slices: int
    port: int = 8081
    debug_port: int | None = None
    own_port: int | None = None

    def to_env(self) -> dict[str, str]:
        """Return the variables for every process of this slice; none for a gang of one slice."""
        if self.num_slices == 1:
            return {}
        debug_port = self.port + 1 if self.debug_port is None else self.debug_port
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{self.coordinator_ip}:{self.port}",
            "MEGASCALE_NUM_SLICES": str(self.num_slices),
            "MEGASCALE_SLICE_ID": str(self.slice_id),
            "MEGASCALE_PORT": str(self.own_port or self.port),
            "MEGASCALE_DEBUG_PORT": str(debug_port),
        }


def parse_num_slices(num_slices: int | Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of slices that a job can use, ascending: ``2`` → ``(2,)``, ``[4, 2]`` → ``(2, 4)``.

    Raises:
        InvalidSliceCountError: not a positive int, nor a non-empty sequence of distinct positive ints, or too many.
            ``True`` and strings are refused although Python would take them for an int and a sequence.
    """
    numbers = _as_ints(num_slices)
    if not numbers:
        raise InvalidSliceCountError("num_slices is empty; name at least one number, such as [2, 4]")
    if min(numbers) < 1:
        raise InvalidSliceCountError(f"num_slices holds {shown(min(numbers))}; a job needs at least 1 slice")
    if max(numbers) > MOST_SLICES:
        raise InvalidSliceCountError(f"num_slices holds {shown(max(numbers))}; the limit is {MOST_SLICES:,} slices")
    if len(set(numbers)) != len(numbers):
        raise InvalidSliceCountError(f"num_slices names a number twice: {numbers}")
    return tuple(sorted(numbers))


def _as_ints(num_slices: int | Sequence[int]) -> list[int]:
    single = _as_int(num_slices)
    if single is not None:
        return [single]
    if not isinstance(num_slices, Sequence) or isinstance(num_slices, (str, bytes, bytearray)):
        raise InvalidSliceCountError(
            f"num_slices is {num_slices!r}; give an int such as 2, or the numbers that the job can use, such as [2, 4]"
        )
    numbers: list[int] = []
    for item in num_slices:
        if len(numbers) == MOST_COUNTS:
            raise InvalidSliceCountError(f"num_slices holds more than {MOST_COUNTS:,} numbers, which is the limit")
        number = _as_int(item)
        if number is None:
            raise InvalidSliceCountError(f"num_slices holds {item!r}; every number must be an int")
        numbers.append(number)
    return numbers


def _as_int(value: object) -> int | None:
    """Return the value as an int if it is one, NumPy's included, or None; a bool is not an int here."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
