"""Gangs on several slices: the slice counts that they can use, and the MEGASCALE variables that connect the slices.

libtpu reads the variables when the process first touches the TPU. On a single slice none of them may be set:
``MEGASCALE_NUM_SLICES=1`` still enables megascale, and stale values from a provider or an earlier attempt make JAX wait
for peers that don't exist. Every attempt therefore overwrites or removes them.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from iris_ray.errors import InvalidSliceCountError
from iris_ray.model.checks import shown

MEGASCALE_PREFIX = "MEGASCALE_"
MOST_SLICES = 100_000
"""The largest slice count of a gang: more than any cluster has, but too few for a mistaken request to do harm."""
MOST_COUNTS = 1_000
"""The largest number of slice counts in one request."""


@dataclass(frozen=True, slots=True)
class MultisliceInfo:
    """The information that a slice of a gang needs to find the other slices.

    Args:
        coordinator_ip: address of slice 0's worker 0, reachable from every host; not an IPv6 literal, because JAX
            cuts ``MEGASCALE_COORDINATOR_ADDRESS`` at its first colon.
        slice_id: 0-based number of this slice.
        num_slices: the number of slices in the gang; at least 1.
        port: the coordinator's port.
        debug_port: libtpu's debug port, which must differ from ``port`` and would otherwise be 8081; by default, the
            port after ``port``.
        own_port: the port of this process if several share a host; None: ``port``.
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
    """Return the slice counts that a job can use, ascending: ``2`` → ``(2,)``, ``[4, 2]`` → ``(2, 4)``.

    Raises:
        InvalidSliceCountError: the argument is neither a positive int nor a non-empty sequence of distinct positive
            ints, or is too large. ``True`` and strings are refused, although Python treats them as int and sequence.
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
    """Return an int, including NumPy's, as a Python int; None for any other value, including a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
