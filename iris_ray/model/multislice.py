"""Several slices as one gang: which counts a job can use, and the MEGASCALE variables that join them.

libtpu reads the variables when the process first touches the TPU. A single slice must have none of them set:
``MEGASCALE_NUM_SLICES=1`` still switches megascale on, and stale values of a provider or of an earlier attempt make
JAX wait for peers that don't exist. So they are always overwritten or removed, never inherited.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from iris_ray.errors import InvalidSliceCountError

MEGASCALE_PREFIX = "MEGASCALE_"


@dataclass(frozen=True, slots=True)
class MultisliceInfo:
    """What one slice of a multislice gang must know to find the others.

    Args:
        coordinator_ip: address of slice 0's worker 0, reachable from every host; not an IPv6 literal, because JAX
            cuts ``MEGASCALE_COORDINATOR_ADDRESS`` at its first colon.
        slice_id: 0-based number of this slice.
        num_slices: how many slices the gang has; at least 1.
        port: the coordinator's port.
        debug_port: libtpu's debug port, which is 8081 unless set and must differ from ``port``; the port after
            ``port`` if left out.
    """

    coordinator_ip: str
    slice_id: int
    num_slices: int
    port: int = 8081
    debug_port: int | None = None

    def to_env(self) -> dict[str, str]:
        """The variables for every process of this slice; empty for a gang of one slice."""
        if self.num_slices == 1:
            return {}
        debug_port = self.port + 1 if self.debug_port is None else self.debug_port
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{self.coordinator_ip}:{self.port}",
            "MEGASCALE_NUM_SLICES": str(self.num_slices),
            "MEGASCALE_SLICE_ID": str(self.slice_id),
            "MEGASCALE_PORT": str(self.port),
            "MEGASCALE_DEBUG_PORT": str(debug_port),
        }


def slice_counts(num_slices: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of slices that a job can use, ascending: ``2`` → ``(2,)``, ``[4, 2]`` → ``(2, 4)``.

    Raises:
        InvalidSliceCountError: not a positive int, nor a non-empty sequence of distinct positive ints. ``True`` and
            strings are refused although Python would take them for an int and a sequence.
    """
    single = _as_int(num_slices)
    if single is not None:
        counts = [single]
    elif isinstance(num_slices, Sequence) and not isinstance(num_slices, (str, bytes, bytearray)):
        counts = []
        for item in num_slices:
            count = _as_int(item)
            if count is None:
                raise InvalidSliceCountError(f"num_slices holds {item!r}; every count must be an int")
            counts.append(count)
    else:
        raise InvalidSliceCountError(
            f"num_slices is {num_slices!r}; give an int such as 2, or the counts that the job can use, such as [2, 4]"
        )
    if not counts:
        raise InvalidSliceCountError("num_slices is empty; name at least one count, such as [2, 4]")
    if min(counts) < 1:
        raise InvalidSliceCountError(f"num_slices holds {min(counts)}; a job needs at least 1 slice")
    if len(set(counts)) != len(counts):
        raise InvalidSliceCountError(f"num_slices names a count twice: {counts}")
    return tuple(sorted(counts))


def _as_int(value: object) -> int | None:
    """The value if it is an int, NumPy's included; bool is none here."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
