"""Parts of slices: connected boxes of whole hosts, each of which one gang can use like a slice of its own.

A part has a shape in chips, such as ``2x4``. The parts of one shape tile the slice, so a part is a group of hosts by
one more attribute, whose value follows from the slice's shape and the host's number in the slice. Sources:

- A host of a slice with several hosts has 2x2 chips, or 2x2x1 in three dimensions (Google Cloud's page on each
  generation, such as https://cloud.google.com/tpu/docs/v4).
- Hosts are numbered along x first, then y, then z, which is the order of ``TPU_PROCESS_ADDRESSES`` within
  ``TPU_PROCESS_BOUNDS`` (JAX's ``jax/_src/test_multiprocess.py``, torch_xla's ``torch_xla/_internal/tpu.py``). No
  document says that every slice keeps to it.
- libtpu 0.0.52 has the message "a subslice spanning multiple hosts must use the full slice chips_per_host_bounds": it
  knows parts of whole hosts.

Ray 2.60 numbers parts as well, in labels ``ray.io/tpu-subslice-…``. It reads the first number of ``2x4`` as y and the
second as x, whereas JAX's coordinates on a 2x4 slice have x below 2. Its numbers are therefore not used here.
"""

import re
from collections import defaultdict
from functools import cache, lru_cache
from itertools import combinations_with_replacement
from math import prod
from typing import Final

from iris_ray.errors import InvalidTopologyError
from iris_ray.model.checks import shown
from iris_ray.model.topology import TPUConfig, default_topology, get_tpu_config, other_topologies
from iris_ray.model.workers import TOPOLOGY_LABEL, TPU_NAME

__all__ = [
    "CHIPS_PER_HOST",
    "hosts_of_shape",
    "is_on_slices",
    "part_attribute",
    "part_of_host",
    "part_shapes",
    "require_shape",
    "shape_of_attribute",
    "shape_of_part",
    "shapes_of",
    "slice_of",
    "split_by",
]

CHIPS_PER_HOST: Final = 4
"""Only slices of hosts with four chips have parts: the shape of their hosts is known."""

_ATTRIBUTE: Final = "tpu-part-"
_SEPARATOR: Final = ":"  # no slice has it in its name, since a label of Ray can't hold it
_HOST: Final = (2, 2, 1)

Sides = tuple[int, ...]


# -- names -------------------------------------------------------------------------------------------------------------


def part_attribute(shape: str) -> str:
    """Return the attribute whose value the hosts of a part share, for use as ``group_by``."""
    return _ATTRIBUTE + shape


def shape_of_attribute(group_by: str | None) -> str | None:
    """Return the shape of the parts that an attribute numbers; None for any other attribute."""
    return group_by.removeprefix(_ATTRIBUTE) if group_by is not None and group_by.startswith(_ATTRIBUTE) else None


def is_on_slices(group_by: str | None) -> bool:
    """Return whether the groups by an attribute are slices or parts of slices."""
    return group_by == TPU_NAME or shape_of_attribute(group_by) is not None


def slice_of(name: str) -> str:
    """Return the name of the slice of a part; a slice's name is returned as it is."""
    return name.partition(_SEPARATOR)[0]


def shape_of_part(name: str) -> str | None:
    """Return the shape of the part of this name, such as ``v6e-16-0:2x4:1``; None for a slice."""
    return name.split(_SEPARATOR)[1] if _SEPARATOR in name else None


# -- shapes ------------------------------------------------------------------------------------------------------------


def hosts_of_shape(shape: str) -> int:
    """Return the number of hosts in a part."""
    return prod(_sides(shape)) // CHIPS_PER_HOST


@cache
def part_shapes(topology: str) -> tuple[str, ...]:
    """Return the shapes of the parts of a slice, the smallest first.

    They are the shapes that Google documents for slices and that tile this one: in two dimensions 2x2, 2x4, 4x4 and so
    on, in three those whose sides ascend and are all at most 4 or all multiples of 4, and 2x2x1.

    Args:
        topology: the slice's shape in chips, such as ``"4x4"``.
    """
    whole = _sides(topology)
    if any(side % least for side, least in zip(whole, _HOST, strict=False)):
        return ()  # its hosts do not tile it
    if len(whole) == 2:
        sides = [2**n for n in range(1, max(whole).bit_length())]
        shapes: list[Sides] = [(a, b) for a in sides for b in (a, 2 * a)]
    else:
        few = combinations_with_replacement((2, 4), 3)
        many = combinations_with_replacement(range(4, max(whole) + 1, 4), 3)
        shapes = [(2, 2, 1), *dict.fromkeys([*few, *many])]
    fitting = (s for s in shapes if prod(s) < prod(whole) and _tiles(s, whole))
    return tuple(_in_words(sides) for sides in sorted(fitting, key=lambda sides: (prod(sides), sides)))


def shapes_of(device: TPUConfig) -> tuple[str, ...]:
    """Return the shapes of the parts of slices of a type, in their default shape, the smallest first."""
    has_parts = device.vm_count > 1 and device.chips_per_vm == CHIPS_PER_HOST
    return part_shapes(default_topology(device)) if has_parts else ()


def require_shape(device: TPUConfig, topology: object) -> str:
    """Return the shape of a part of slices of a type.

    Raises:
        InvalidTopologyError: slices of this type have no such parts; the message lists the shapes that there are.
    """
    whole, shapes = default_topology(device), shapes_of(device)
    given = topology.strip().lower() if isinstance(topology, str) else topology
    if given in shapes:
        return str(given)
    asked = f"topology is {shown(topology)}"
    if not shapes:
        chips = device.chips_per_vm
        why = f"is one host with {chips} {'chips' if chips > 1 else 'chip'} and so " if device.vm_count == 1 else ""
        on_gke = ", not even on GKE, where it may be two hosts" if chips == 2 * CHIPS_PER_HOST else ""
        raise InvalidTopologyError(
            f"{asked}, but a {device.name} slice {why}has no parts{on_gke}; leave topology out, or ask for a part of a"
            " larger type"
        )
    if given == whole:
        raise InvalidTopologyError(
            f"{asked}, which is a whole {device.name} slice; leave topology out, or ask for a part: {_listed(shapes)}"
        )
    others = other_topologies(device)
    if given in others:
        raise InvalidTopologyError(
            f"{asked}, which is a whole {device.name} slice of another shape than {whole}, the default; to run on such"
            f" slices, leave topology out and give the constraint {TOPOLOGY_LABEL}={given}"
        )
    having = [other for other in others if given in part_shapes(other)]
    raise InvalidTopologyError(
        f"{asked}; a {device.name} slice, which has {whole} chips, has parts of whole hosts in these shapes:"
        f" {_listed(shapes)}"
        + (f" ({having[0]} slices have such parts, but only those of the default shape can be used)" if having else "")
    )


# -- parts of a slice --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=100_000)
def part_of_host(tpu_type: str, told: str | None, hosts: int, host_index: int, shape: str) -> str | None:
    """Return the end of the name of the part that a host belongs to, such as ``":2x4:1"``; None if there is none.

    Parts are numbered so that those that together make up a larger part follow each other.

    Args:
        tpu_type: the slice's type.
        told: the slice's shape as its hosts have told Ray; None if they have not. Otherwise, it has Google's default.
        hosts: the number of hosts in the slice.
        host_index: the host's number in the slice.
        shape: the shape of the part.
    """
    whole = _topology(tpu_type, told)
    if prod(_sides(whole)) != hosts * CHIPS_PER_HOST or host_index >= hosts or shape not in part_shapes(whole):
        return None
    numbers = _numbers(whole, shape)
    width = len(str(len(numbers) - 1))  # names in their order sort like the numbers
    number = numbers[_position(whole, shape, host_index)]
    return f"{_SEPARATOR}{shape}{_SEPARATOR}{number:0{width}}"


@lru_cache(maxsize=100_000)
def split_by(tpu_type: str, told: str | None, shape: str, host_index: int) -> tuple[frozenset[int], ...]:
    """Return the hosts of the slice, and of each larger part, that a gang on a host's part splits.

    Hosts of the same larger part get the same object.

    Args:
        tpu_type, told, shape: as for `part_of_host`.
        host_index: the number of any host of the part.
    """
    whole = _topology(tpu_type, told)
    larger = (
        _boxes(whole, shape_around)[_position(whole, shape_around, host_index)]
        for shape_around in _larger(whole, shape)
    )
    return (_hosts(whole), *larger)


def _topology(tpu_type: str, told: str | None) -> str:
    config = get_tpu_config(tpu_type)
    by_rule = default_topology(config)
    is_sound = told is not None and _SHAPE.fullmatch(told) and prod(_sides(told)) == config.chip_count
    return told if told and is_sound and len(_sides(told)) == len(_sides(by_rule)) else by_rule


_SHAPE: Final = re.compile(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){1,2}", re.ASCII)


@cache
def _sides(shape: str) -> Sides:
    return tuple(map(int, shape.split("x")))


def _tiles(part: Sides, whole: Sides) -> bool:
    return len(part) == len(whole) and all(side % own == 0 for own, side in zip(part, whole, strict=True))


def _position(whole: str, shape: str, host_index: int) -> Sides:
    """Return the place of a host's part among the parts of a slice, by axis."""
    place, rest = [], host_index
    for side, own, least in zip(_sides(whole), _sides(shape), _HOST, strict=False):
        rest, along = divmod(rest, side // least)
        place.append(along * least // own)
    return tuple(place)


@cache
def _numbers(whole: str, shape: str) -> dict[Sides, int]:
    """Return the numbers of the parts of a slice by their places: those within each larger part follow each other."""
    scales = (*_larger(whole, shape), shape)
    places = dict.fromkeys(sorted(tuple(_position(whole, scale, i) for scale in scales) for i in _hosts(whole)))
    return {place[-1]: number for number, place in enumerate(places)}


@cache
def _hosts(whole: str) -> frozenset[int]:
    return frozenset(range(prod(_sides(whole)) // CHIPS_PER_HOST))


@cache
def _boxes(whole: str, shape: str) -> dict[Sides, frozenset[int]]:
    """Return the hosts of each part of a slice, by the places of the parts."""
    found: defaultdict[Sides, set[int]] = defaultdict(set)
    for host_index in _hosts(whole):
        found[_position(whole, shape, host_index)].add(host_index)
    return {place: frozenset(hosts) for place, hosts in found.items()}


@cache
def _larger(whole: str, shape: str) -> tuple[str, ...]:
    """Return the shapes of larger parts that parts of a shape tile, the largest first."""
    shapes = part_shapes(whole)[::-1]
    return tuple(larger for larger in shapes if larger != shape and _tiles(_sides(shape), _sides(larger)))


def _in_words(sides: Sides) -> str:
    return "x".join(map(str, sides))


def _listed(shapes: tuple[str, ...]) -> str:
    return ", ".join(shapes)
