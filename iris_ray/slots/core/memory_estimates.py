"""Estimates the memory that models need on each device, in the form that `ModelSpec.memory` takes.

Give a model whose need is known that number instead.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import BinaryIO, Final

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import Holds, Number, Whole, require, shown
from iris_ray.slots.core.devices import MOST_CHIPS

# -- gguf --------------------------------------------------------------------------------------------------------------
# The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file begins with the letters GGUF, a version,
# the numbers of tensors and of facts, the facts (a name, a type, a value), and for each tensor its name, shape, type
# and offset. Numbers are little-endian. The data follows, aligned. We take the sizes of tensors from their offsets, so
# new types do no harm; a last tensor that is cut off goes unnoticed.

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""The alignment of the data in bytes, unless the fact ``general.alignment`` says otherwise."""
MOST_ITEMS = 10_000_000
"""The limit of facts, of tensors, and of items of an array. A damaged file may claim any number."""
LONGEST_TEXT = 2**26

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9

Fact = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The head of a GGUF file.

    Attributes:
        facts: single values by name, such as ``general.architecture``; of a list of numbers, the largest.
        lengths: the number of items of each fact that is a list.
        tensors: bytes of each tensor, by name, padding included.
    """

    facts: Mapping[str, Fact]
    lengths: Mapping[str, int]
    tensors: Mapping[str, int]

    @property
    def architecture(self) -> str:
        """The model's architecture, such as ``llama``; "unknown" if the file does not say."""
        return str(self.facts.get("general.architecture", "unknown"))

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number of this architecture, such as ``block_count``; of a list, the largest.

        Raises:
            InvalidSlotError: the number is missing, and there is no default; or it is not a whole number of 0 or more.
        """
        found = self.facts.get(f"{self.architecture}.{name}", default)
        if not isinstance(found, (int, float)):
            raise InvalidSlotError(f"the GGUF file has no {self.architecture}.{name}; give the memory yourself")
        if not (0 <= found < inf and found == int(found)):
            raise InvalidSlotError(f"the GGUF file is damaged: its {self.architecture}.{name} is {found}")
        return int(found)

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary; 0 if the file does not say."""
        return self.lengths.get("tokenizer.ggml.tokens", self.number("vocab_size", 0))


def read_gguf(file: BinaryIO, size: int) -> GGUFModel:
    """Read the head of a GGUF file.

    Only the head is read. A last tensor that is cut off goes unnoticed.

    Args:
        file: opened at its beginning, for reading bytes.
        size: bytes of the whole file.

    Raises:
        InvalidSlotError: it is not a GGUF file of a known version, its head is damaged, or its weights are cut off
            before the last tensor.
    """
    reader = _GgufReader(file)
    if reader.take(4) != MAGIC:
        raise InvalidSlotError("this is not a GGUF file: it does not begin with the letters GGUF")
    version = reader.number("<I")
    if version not in VERSIONS:
        raise InvalidSlotError(f"the GGUF file is of version {version}; only 2 and 3 are known")
    tensors, facts = reader.count(), reader.count()
    for _ in range(facts):
        reader.fact()
    offsets = dict(reader.tensor() for _ in range(tensors))
    return GGUFModel(reader.facts, reader.lengths, _sizes(offsets, size - reader.data_start()))


def _sizes(offsets: Mapping[str, int], data: int) -> dict[str, int]:
    """Return the bytes of each tensor, from the offset of the next one."""
    in_order = sorted(offsets, key=lambda name: offsets[name])
    bounds = [*(offsets[name] for name in in_order), data]
    if bounds != sorted(bounds):
        raise InvalidSlotError(f"the GGUF file is cut off: its data ends after {data:,} bytes, within its tensors")
    return {name: end - begin for name, (begin, end) in zip(in_order, pairwise(bounds), strict=True)}


@dataclass(slots=True)
class _GgufReader:
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
            raise InvalidSlotError(f"the GGUF file is damaged: it has metadata of the unknown type {kind}")
        return lambda: self.value(_NUMBERS[kind])

    def _skip_array(self, name: str) -> int:
        """Skip an array, but keep the largest of its numbers as a fact: some models list their heads by layer."""
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


# -- memory estimates --------------------------------------------------------------------------------------------------

BATCH: Final = 512
"""Tokens that are computed at a time while a prompt is read."""
CACHE_BYTES: Final = 2
"""Bytes of one number in the cache of keys and values."""
WORK_BYTES: Final = 4
"""Bytes of one number in the buffers of the computation."""
SHARES: Final = Holds(
    lambda value: isinstance(value, (list, tuple)) and not any(map(Number(1e-6, most=1e9).problem, value)),
    "numbers from 0.000001 to a billion, one for each device, such as [2, 1]",
)
RUNTIME_BYTES: Final = 512 * 2**20
"""Bytes that a process needs on each device before it holds any model: the driver's context, and buffers."""


def gguf_memory(
    model: GGUFModel,
    *,
    context: int,
    concurrency: int = 1,
    degrees: Iterable[int] = (1,),
    split: Sequence[float] = (),
) -> dict[int, int | tuple[int, ...]]:
    """Return the bytes on each device that a runtime like llama.cpp's needs for a GGUF file.

    Layers are spread over the devices, each whole on one, and the output counts as one more layer. The estimate is for
    the device with the most layers, or for each device of ``split``. It is the sum of:

    - the weights of its layers, each as large as the largest one, and all weights that belong to no layer;
    - for each of its layers the cache: context × concurrency × (length of a key + of a value) × their heads × 2 bytes;
    - the buffers for a batch of 512 tokens, in 32 bits: four embeddings, and the largest of attention, feed-forward and
      output;
    - 512 MiB for the process.

    Args:
        model: the head of the file.
        context: tokens of one request, prompt and answer; the context that the model was trained for is the limit.
        concurrency: requests at a time; each has a cache of its own.
        degrees: numbers of devices that share the layers evenly.
        split: the shares of one more number of devices, in their order, as llama.cpp's ``--tensor-split`` takes them:
            (2, 1) is two thirds of the layers on the first of two devices. Give the program the same split.

    Raises:
        InvalidSlotError: a number makes no sense, ``split`` is for a number of devices in ``degrees``, the file lacks a
            fact that is needed, or holds only a part of a model.
    """
    degrees = _checked(degrees, context=context, concurrency=concurrency)
    require("split", split, SHARES, InvalidSlotError)
    if len(split) in degrees:
        raise InvalidSlotError(f"split is {shown(split)}, and the model is even on {len(split)} devices; leave one out")
    if (parts := model.facts.get("split.count", 1)) != 1:
        raise InvalidSlotError(
            f"the GGUF file is one of {parts} parts, and knows only its own weights; join them with llama-gguf-split"
            " --merge, or give the memory yourself"
        )
    tokens = min(context, model.number("context_length", context) or context)
    layers = model.number("block_count")
    layer = max(_layer_bytes(model).values(), default=0) + tokens * concurrency * _cache_bytes(model)
    beside = sum(size for name, size in model.tensors.items() if not name.startswith("blk."))
    fixed = beside + _work_bytes(model, tokens) + RUNTIME_BYTES

    memory: dict[int, int | tuple[int, ...]] = {
        degree: max(_layers_of_each(layers, [1] * degree)) * layer + fixed for degree in degrees
    }
    if split:
        memory[len(split)] = tuple([count * layer + fixed for count in _layers_of_each(layers, split)])
    return memory


def _layers_of_each(layers: int, split: Sequence[float]) -> list[int]:
    """Return how many layers each device gets from llama.cpp: layer i of n, if its range of shares has i / (n + 1).

    llama.cpp computes in 32 bits, which decides for a layer at the end of a range.
    """
    so_far = list(accumulate(map(_in_32_bits, split), lambda one, other: _in_32_bits(one + other)))
    firsts = [0]
    for share in (_in_32_bits(each / so_far[-1]) for each in so_far):
        first = max(0, ceil(share * (layers + 1)) - 2)
        while first < layers and _in_32_bits(first / (layers + 1)) < share:
            first += 1
        firsts.append(min(first, layers))
    return [end - begin for begin, end in pairwise(firsts)]


def _in_32_bits(number: float) -> float:
    """Return the nearest number of 32 bits. A sum or quotient of two such numbers is that of 32-bit arithmetic."""
    nearest: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return nearest


def vllm_memory(device_memory: int, utilisation: float, degrees: Iterable[int] = (1,)) -> dict[int, int]:
    """Return the bytes on each device that vLLM takes: a share of the device, whatever the model.

    Args:
        device_memory: bytes of one device.
        utilisation: vLLM's ``gpu_memory_utilization``.
        degrees: the values of its ``tensor_parallel_size`` that would do.

    Raises:
        InvalidSlotError: a number makes no sense.
    """
    degrees = _checked(degrees, device_memory=device_memory)
    require("utilisation", utilisation, Number(above=True, most=1), InvalidSlotError)
    return dict.fromkeys(degrees, ceil(device_memory * utilisation))


def split_memory(total: int, degrees: Iterable[int], beside: int = 0) -> dict[int, int]:
    """Return the bytes on each device if a model's bytes are divided evenly among its devices.

    Args:
        total: the bytes to divide: weights and cache.
        degrees: the numbers of devices among which it can be divided.
        beside: further bytes that each device needs, such as those of the process.

    Raises:
        InvalidSlotError: a number makes no sense.

    Example:
        >>> split_memory(140 * 10**9, (2, 4))
        {2: 70000000000, 4: 35000000000}
    """
    degrees = _checked(degrees, total=total)
    require("beside", beside, Whole(exactly=True), InvalidSlotError)
    return {degree: ceil(total / degree) + beside for degree in degrees}


def _checked(degrees: Iterable[int], **values: int) -> tuple[int, ...]:
    """Return the numbers of devices; refuse them, or values by name, unless all are ints of 1 or more in range."""
    if not isinstance(degrees, Iterable):
        raise InvalidSlotError(f"degrees is {shown(degrees)}; give numbers of devices, such as (1, 2)")
    found = tuple(degrees)
    for name, value in values.items():
        require(name, value, Whole(1, exactly=True), InvalidSlotError)
    for degree in found:
        require("a degree", degree, Whole(1, MOST_CHIPS, exactly=True), InvalidSlotError)
    return found


def _layer_bytes(model: GGUFModel) -> dict[str, int]:
    """Return the bytes of the weights of each layer; their tensors are called ``blk.<number>.<name>``."""
    layers: dict[str, int] = {}
    for name, size in model.tensors.items():
        if name.startswith("blk."):
            number = name.split(".")[1]
            layers[number] = layers.get(number, 0) + size
    return layers


def _cache_bytes(model: GGUFModel) -> int:
    """Return the bytes of the cache for one token in one layer."""
    heads = model.number("attention.head_count", 1)
    each = model.number("embedding_length") // max(heads, 1)
    key, value = model.number("attention.key_length", each), model.number("attention.value_length", each)
    return model.number("attention.head_count_kv", heads) * (key + value) * CACHE_BYTES


def _work_bytes(model: GGUFModel, tokens: int) -> int:
    embedding = model.number("embedding_length")
    attention = tokens * model.number("attention.head_count", 1)
    feed_forward = 2 * model.number("feed_forward_length", 4 * embedding)
    return BATCH * WORK_BYTES * (4 * embedding + max(attention, feed_forward, model.vocabulary))
