"""Reads the head of a GGUF file: what the model is made of, without its weights.

A GGUF file begins with the letters GGUF, a version, the numbers of tensors and of facts, the facts (a name, a type, a
value), and for each tensor its name, shape, type and offset. Numbers are little-endian. The data follows, aligned.
Sizes of tensors are taken from their offsets, so new types do no harm. Nobody notices if the last tensor is cut off.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import BinaryIO

from iris_ray.errors import InvalidSlotError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Of the data in bytes, unless the fact ``general.alignment`` says otherwise."""
MOST_ITEMS = 10_000_000
"""Of facts, tensors, or items of an array. A damaged file may claim any number."""
LONGEST_TEXT = 2**26

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9

Fact = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """What the head of a file says.

    Attributes:
        facts: single values by name, such as ``general.architecture``.
        lengths: how many items the facts have that are lists.
        tensors: bytes of each tensor, by name, padding included.
    """

    facts: Mapping[str, Fact]
    lengths: Mapping[str, int]
    tensors: Mapping[str, int]

    @property
    def architecture(self) -> str:
        """Such as ``llama``."""
        return str(self.facts.get("general.architecture", "unknown"))

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number of this architecture, such as ``block_count``.

        Raises:
            InvalidSlotError: it is missing, and there is no default.
        """
        found = self.facts.get(f"{self.architecture}.{name}", default)
        if not isinstance(found, (int, float)):
            raise InvalidSlotError(f"the GGUF file has no {self.architecture}.{name}; give the memory yourself")
        return int(found)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are; 0 if the file does not say."""
        return self.lengths.get("tokenizer.ggml.tokens", self.number("vocab_size", 0))


def read_gguf(file: BinaryIO, size: int) -> GGUFModel:
    """Return what the head of a GGUF file says.

    Args:
        file: at its beginning. Only the head is read.
        size: bytes of the whole file.

    Raises:
        InvalidSlotError: it is no GGUF file of a known version, or it is damaged.
    """
    reader = _Reader(file)
    if reader.take(4) != MAGIC:
        raise InvalidSlotError("this is no GGUF file: it does not begin with the letters GGUF")
    version = reader.number("<I")
    if version not in VERSIONS:
        raise InvalidSlotError(f"the GGUF file is of version {version}; only 2 and 3 are known")
    tensors, facts = reader.count(), reader.count()
    for _ in range(facts):
        reader.fact()
    offsets = dict(reader.tensor() for _ in range(tensors))
    return GGUFModel(reader.facts, reader.lengths, _sizes(offsets, size - reader.data_start()))


def _sizes(offsets: Mapping[str, int], data: int) -> dict[str, int]:
    """Return the bytes of each tensor: they lie one after the other."""
    in_order = sorted(offsets, key=lambda name: offsets[name])
    bounds = [*(offsets[name] for name in in_order), data]
    if bounds != sorted(bounds):
        raise InvalidSlotError(f"the GGUF file is cut off: its data ends after {data:,} bytes, within its tensors")
    return {name: end - begin for name, (begin, end) in zip(in_order, pairwise(bounds), strict=True)}


@dataclass(slots=True)
class _Reader:
    file: BinaryIO
    facts: dict[str, Fact] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    position: int = 0

    def take(self, size: int) -> bytes:
        found = self.file.read(size)
        if len(found) != size:
            raise InvalidSlotError("the GGUF file is cut off: its head has no end")
        self.position += size
        return found

    def number(self, layout: str) -> int:
        return int(self.value(layout))

    def value(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def count(self) -> int:
        number = self.number("<Q")
        if number > MOST_ITEMS:
            raise InvalidSlotError(f"the GGUF file is damaged: it claims to have {number:,} items of one kind")
        return number

    def text(self) -> str:
        length = self.number("<Q")
        if length > LONGEST_TEXT:
            raise InvalidSlotError(f"the GGUF file is damaged: it claims to have a text of {length:,} bytes")
        return self.take(length).decode(errors="replace")

    def fact(self) -> None:
        name, kind = self.text(), self.number("<I")
        if kind == _ARRAY:
            self.lengths[name] = self._skip_array(name)
        else:
            self.facts[name] = self._single(kind)()

    def _single(self, kind: int) -> Callable[[], Fact]:
        if kind == _TEXT:
            return self.text
        if kind not in _NUMBERS:
            raise InvalidSlotError(f"the GGUF file is damaged: there is no type of facts with the number {kind}")
        return lambda: self.value(_NUMBERS[kind])

    def _skip_array(self, name: str) -> int:
        """Read over an array. Of numbers, the largest one is kept as a fact: some models list their heads by layer."""
        kind, length = self.number("<I"), self.count()
        if kind == _ARRAY:
            raise InvalidSlotError(f"the GGUF file is damaged: {name} is a list of lists")
        single = self._single(kind)
        largest = None
        for _ in range(length):
            item = single()
            if not isinstance(item, str):
                largest = item if largest is None else max(largest, item)
        if largest is not None:
            self.facts[name] = largest
        return length

    def tensor(self) -> tuple[str, int]:
        name = self.text()
        for _ in range(self.number("<I")):
            self.number("<Q")
        self.number("<I")
        return name, self.number("<Q")

    def data_start(self) -> int:
        alignment = self.facts.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise InvalidSlotError(f"the GGUF file is damaged: its data is aligned to {alignment!r} bytes")
        return -(-self.position // alignment) * alignment
