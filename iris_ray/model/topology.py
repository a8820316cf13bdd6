"""TPU types: the chips, hosts and VMs of a slice type such as ``v4-32``.

One rule per generation computes everything, without a table of sizes. Sources:

- Google Cloud's page on each generation, such as https://cloud.google.com/tpu/docs/v4 (v2, v3, v5e, v5p, v6e and
  tpu7x have their own): TensorCores per chip, chips per host, slice shapes, the largest slice.
- ``ray._private.accelerators.tpu`` (Ray 2.60): how Ray spells a type in the label ``ray.io/tpu-pod-type``.

Assumptions that no document states:

- v4, v5p and v7x: every multiple of four chips up to the largest slice is accepted. Google documents shapes
  whose sides are all at most 4 or all multiples of 4, so a size between those, such as v4-40, is accepted
  although it may not be available. Refusing an existing size would be worse.
- v7x-2 is one chip: Google and xpk have a machine type for it, ``tpu7x-standard-1t``. Ray counts four, its default.
- v5p ends at v5p-17920, the whole pod of 8,960 chips, as in xpk, although Google schedules no more than v5p-12288.
- v7 is ``tpu7`` with up to 256 chips, which xpk and JAX list in addition to TPU7x.
- v5litepod-2 is one VM of two chips: Marin's Iris lists it, though Google does not offer it.
- v8t and v8i are TPU8t and TPU8i. JAX knows their cores per chip, and Google has published the sizes of their pods,
  9,600 and 1,152 chips. Their hosts are unpublished: VMs of four chips are a guess, and a live node's count wins.
- v2-16 and v3-16 are refused: neither Google nor Ray lists that shape.
- v2-64 is accepted: Ray lists its shape (4x8), though Google does not always offer it.
"""

import re
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import isqrt
from typing import Final

from iris_ray.errors import InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.checks import is_number, shown

__all__ = ["TPU_GENERATIONS", "TPUConfig", "default_topology", "get_tpu_config", "other_topologies"]

_CHIPS_PER_VM: Final = 4  # chips per VM of every slice that does not fit into one VM


@dataclass(frozen=True, slots=True)
class _Generation:
    """The rule of one generation.

    ``single_vm_chips`` are the sizes, in chips, of slices in a single VM; all larger slices consist of VMs of four
    chips. ``dimensions`` is the number of dimensions of the torus: 2-D slices come in powers of two from 4x4 on, 3-D
    slices in whole VMs. ``devices_per_chip`` is the number of times that a host may count each chip: JAX and libtpu see
    two devices in a chip with separate cores (``jax._src.tpu_info``), and ``RAY_TPU_RESOURCE_PER_CHIP=2`` makes Ray
    count these.
    """

    name: str
    max_chips: int
    cores_per_chip: int = 2  # if 1, the number in the type's name counts chips
    chips_per_host: int = 4  # physical host
    single_vm_chips: tuple[int, ...] = (4,)
    dimensions: int = 3
    devices_per_chip: int = 1
    spellings: tuple[str, ...] = ()
    google_name: str = ""

    @cache  # noqa: B019 - the rules live as long as the process
    def sizes(self) -> tuple[int, ...]:
        """Return all valid sizes (numbers after the hyphen), ascending."""
        if self.dimensions == 3:
            larger = list(range(2 * _CHIPS_PER_VM, self.max_chips + 1, _CHIPS_PER_VM))
        else:
            larger = [2**n for n in range(4, self.max_chips.bit_length())]
        return tuple(chips * self.cores_per_chip for chips in (*self.single_vm_chips, *larger))

    def nearest(self, size: int) -> list[str]:
        """Return the type of this size if it exists, or else those of the next smaller and the next larger size."""
        sizes = self.sizes()
        below, above = bisect_right(sizes, size) - 1, bisect_left(sizes, size)
        return [f"{self.name}-{sizes[i]}" for i in sorted({below, above}) if 0 <= i < len(sizes)]

    def explain_sizes(self) -> str:
        """Return a description of the rule for error messages."""
        sizes, singles = self.sizes(), len(self.single_vm_chips)
        unit = "chips" if self.cores_per_chip == 1 else f"TensorCores, {self.cores_per_chip} a chip"
        multiples = f"multiples of {_CHIPS_PER_VM * self.cores_per_chip}"
        step = multiples if self.dimensions == 3 else "powers of two"
        listed = ", ".join(map(str, sizes[:singles]))
        return f"{self.name} sizes count {unit}: {listed}, then {step} from {sizes[singles]} to {sizes[-1]}"


_V5E: Final = _Generation(
    "v5litepod",
    max_chips=256,
    cores_per_chip=1,
    chips_per_host=8,
    single_vm_chips=(1, 2, 4, 8),
    dimensions=2,
    spellings=("v5e", "v5lite"),
)
_V7X: Final = _Generation("v7x", max_chips=9216, single_vm_chips=(1, 4), devices_per_chip=2, google_name="tpu7x")
_RULES: Final = (
    _Generation("v2", max_chips=256, dimensions=2, devices_per_chip=2),
    _Generation("v3", max_chips=1024, dimensions=2, devices_per_chip=2),
    _Generation("v4", max_chips=4096),
    _V5E,
    _Generation("v5p", max_chips=8960),
    replace(_V5E, name="v6e", single_vm_chips=(1, 4, 8), spellings=()),
    replace(_V7X, name="v7", max_chips=256, google_name="tpu7"),
    _V7X,
    _Generation("v8t", max_chips=9600, cores_per_chip=1, google_name="tpu8t"),
    _Generation("v8i", max_chips=1152, devices_per_chip=2, google_name="tpu8i"),
)
_BY_NAME: Final = {name: rule for rule in _RULES for name in (rule.name, *rule.spellings)}

TPU_GENERATIONS: Final = tuple(rule.name for rule in _RULES)
"""The canonical names of the generations, oldest first."""

# "v4-32", "TPU-v4-32", "tpu7x-8", "v5litepod_16": the generation, and the rest.
_SPELLING: Final = re.compile(r"(?:tpu[-_ ]?v?|v)(?P<generation>\d+[a-z]*)(?P<rest>.*)", re.ASCII | re.DOTALL)
_SIZE: Final = re.compile(r"[-_ ](\d{1,12})", re.ASCII)
_ALMOST_SIZE: Final = re.compile(r"[^\da-z]*(\d{1,12})[^\da-z]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class TPUConfig:
    """A TPU slice type in numbers.

    A scheduler needs ``vm_count``: VMs run the operating system, carry the worker ids and get one task each by default.
    ``host_count`` is the number of physical machines. The two differ for v5litepod and v6e, whose machines have eight
    chips: a v5litepod-16 is two machines that Google splits into four VMs of four chips, and a v6e-1 has an eighth of a
    machine, which counts as one.

    Attributes:
        name: The canonical type, as Ray's node label ``ray.io/tpu-pod-type`` carries it: ``"v5litepod-16"``.
        chip_count: Chips of the whole slice.
        host_count: Physical machines the slice touches, never more than ``vm_count``.
        vm_count: TPU VMs: the workers of the slice.
        chips_per_vm: Chips that one VM sees, its ``TPU`` count in Ray.
    """

    name: str
    chip_count: int
    host_count: int
    vm_count: int
    chips_per_vm: int

    @property
    def generation(self) -> str:
        """The part of the name before the hyphen, one of ``TPU_GENERATIONS``."""
        return self.name.partition("-")[0]

    @property
    def accelerator_type(self) -> str:
        """The type in the spelling of Google Cloud's tools, which differs from ``name`` from v7 on: ``"tpu7x-8"``."""
        google_name = _BY_NAME[self.generation].google_name or self.generation
        return self.name.replace(self.generation, google_name, 1)

    @property
    def devices_per_chip(self) -> int:
        """The number of JAX devices per chip: two on v2, v3, v7, v7x and v8i, whose cores are separate devices."""
        return _BY_NAME[self.generation].devices_per_chip

    def with_live_hosts(self, chips_per_host: float) -> "TPUConfig":
        """Return this type with the hosts of a live slice, which may differ from the rule.

        A v5litepod-8 is one VM of eight chips by rule, but on GKE it may consist of two VMs of four chips. A v7x-16 has
        two VMs of four chips, whether a node counts its chips or the two devices of each.

        Args:
            chips_per_host: Chips on one live node of the slice, a whole number: its ``TPU`` resource (a float
                in Ray). A number that exceeds a host's chips counts devices, if the generation has several per chip.

        Returns:
            The same slice with ``vm_count`` and ``chips_per_vm`` as observed.

        Raises:
            InvalidRequestError: a slice of this type can't consist of such nodes.

        Example:
            >>> get_tpu_config("v5litepod-8").with_live_hosts(4).vm_count
            2
        """
        if not is_number(chips_per_host) or chips_per_host < 1 or chips_per_host % 1 != 0:
            given = shown(chips_per_host)
            raise InvalidRequestError(f"{self.name}: a host has a positive whole number of chips, not {given}.")
        chips, rule = int(chips_per_host), _BY_NAME[self.generation]
        most = min(rule.chips_per_host, self.chip_count)
        if chips > most and chips % rule.devices_per_chip == 0:
            chips //= rule.devices_per_chip
        if chips > most:
            raise InvalidRequestError(
                f"{self.name}: a host can't have {chips_per_host:g} chips, since it has {most} at most. "
                f"Does RAY_TPU_RESOURCE_PER_CHIP make Ray count each chip more often than the type has devices?"
            )
        if self.chip_count % chips:
            raise InvalidRequestError(f"{self.name}: {self.chip_count} chips can't be hosts of {chips} chips each.")
        return replace(self, vm_count=self.chip_count // chips, chips_per_vm=chips)


def get_tpu_config(tpu_type: str) -> TPUConfig:
    """Return the configuration of a TPU type.

    Case and surrounding blanks don't matter. The name may begin with ``TPU``. The size may follow a hyphen, an
    underscore or a blank. v5e and v5lite mean v5litepod; tpu7, tpu7x, tpu8t and tpu8i mean v7, v7x, v8t and v8i.

    Args:
        tpu_type: Its name, as Google Cloud's ``--accelerator-type`` or Ray spells it. Its number counts
            TensorCores for v2, v3, v4, v5p, v7, v7x and v8i (two per chip), chips for v5litepod, v6e and v8t.

    Returns:
        The configuration by rule. What a live node reports may differ: see ``TPUConfig.with_live_hosts``.

    Raises:
        UnknownTPUTypeError: the type does not exist; the message says why and ends with the nearest types.

    Example:
        >>> get_tpu_config("v4-32")
        TPUConfig(name='v4-32', chip_count=16, host_count=4, vm_count=4, chips_per_vm=4)
        >>> get_tpu_config("TPU-v5e-16").name
        'v5litepod-16'
    """
    if not isinstance(tpu_type, str):
        raise _unknown(tpu_type, f"a string is needed, not {type(tpu_type).__name__}", _examples(_RULES))
    return _config(tpu_type)


@lru_cache(maxsize=1024)
def _config(tpu_type: str) -> TPUConfig:
    """Return the configuration of a TPU type; cached, because it is asked for often in large queues."""
    rule, size = _parse(tpu_type)
    if size not in rule.sizes():
        raise _unknown(tpu_type, rule.explain_sizes(), rule.nearest(size))
    chips = size // rule.cores_per_chip
    chips_per_vm = chips if chips in rule.single_vm_chips else _CHIPS_PER_VM
    return TPUConfig(
        name=f"{rule.name}-{size}",
        chip_count=chips,
        host_count=-(-chips // rule.chips_per_host),
        vm_count=chips // chips_per_vm,
        chips_per_vm=chips_per_vm,
    )


def default_topology(config: TPUConfig) -> str:
    """Return the default shape of a slice in chips, such as ``"2x2x4"`` for v4-32.

    Google's default is the shape nearest to a cube or square. A slice may have another shape of the same size;
    the live node's label ``ray.io/tpu-topology`` has the actual one.

    Sides ascend, except that Google writes the four-chip slice as 2x2x1. Shapes as documented (all sides at
    most 4, or all multiples of 4) come first; other sizes get the most compact shape that 2x2x1 hosts tile.
    """
    chips = config.chip_count
    if _BY_NAME[config.generation].dimensions == 2:
        width = 2 ** ((chips.bit_length() - 1) // 2)
        return f"{width}x{chips // width}"
    if chips == 1:
        return "1x1x1"
    if chips == _CHIPS_PER_VM:
        return "2x2x1"

    shape = min(_tileable_boxes(chips), key=lambda sides: (not _is_documented(sides), _surface(sides)))
    return "x".join(map(str, shape))


def other_topologies(config: TPUConfig) -> tuple[str, ...]:
    """Return the documented shapes of slices of this type besides the default: ``("4x4x16",)`` for v4-512."""
    if _BY_NAME[config.generation].dimensions == 2 or config.chip_count <= _CHIPS_PER_VM:
        return ()
    boxes = (sides for sides in _tileable_boxes(config.chip_count) if sides[0] > 1 and _is_documented(sides))
    shapes = ("x".join(map(str, sides)) for sides in sorted(boxes, key=_surface))
    return tuple(shape for shape in shapes if shape != default_topology(config))


def _surface(sides: tuple[int, int, int]) -> int:
    """Return half the surface of a box: the smaller it is, the nearer to a cube is the box."""
    a, b, c = sides
    return a * b + b * c + a * c


def _is_documented(sides: tuple[int, int, int]) -> bool:
    return max(sides) <= 4 or all(side % 4 == 0 for side in sides)


def _tileable_boxes(volume: int) -> Iterator[tuple[int, int, int]]:
    """Yield all a <= b <= c with a*b*c = volume and at least two even sides."""
    for a in range(1, isqrt(volume) + 1):
        for b in range(a, isqrt(volume // a) + 1):
            sides = (a, b, volume // (a * b))
            if a * b * sides[2] == volume and sum(side % 2 == 0 for side in sides) >= 2:
                yield sides


def _parse(name: str) -> tuple[_Generation, int]:
    """Parse a name into its generation's rule and its size, which may be invalid."""
    spelled = _SPELLING.fullmatch(name.strip().lower())
    if spelled is None:
        raise _unknown(name, "a type is a generation, a hyphen and a size", _examples(_RULES))
    generation, rest = f"v{spelled['generation']}", spelled["rest"]
    size = _SIZE.fullmatch(rest)
    almost = size or _ALMOST_SIZE.fullmatch(rest)
    rule = _BY_NAME.get(generation)
    if rule is None:
        alike = [other for other in _RULES if other.name.startswith(generation)] or list(_RULES)
        nearest = [other.nearest(int(almost[1]))[0] for other in alike] if almost else _examples(alike)
        known = ", ".join(TPU_GENERATIONS)
        raise _unknown(name, f"there is no generation {reprlib.repr(generation)}, only {known}", nearest)
    if size is None:
        reason = "a hyphen and a whole number should follow the generation" if rest else "the size is missing"
        nearest = rule.nearest(int(almost[1])) if almost else _examples([rule])
        raise _unknown(name, f"{reason}; {rule.explain_sizes()}", nearest)
    return rule, int(size[1])


def _examples(rules: Sequence[_Generation]) -> list[str]:
    """Return some valid types: the smallest and the largest of a single generation, or one of each of several."""
    if len(rules) == 1:
        sizes = rules[0].sizes()
        return [f"{rules[0].name}-{size}" for size in (sizes[0], sizes[-1])]
    return [f"{rule.name}-{rule.sizes()[len(rule.single_vm_chips)]}" for rule in rules]


def _unknown(name: object, reason: str, valid: Sequence[str]) -> UnknownTPUTypeError:
    return UnknownTPUTypeError(f"{reprlib.repr(name)} is not a TPU type: {reason}. Try {', '.join(valid)}.")
