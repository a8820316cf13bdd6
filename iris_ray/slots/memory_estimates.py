"""How much memory models need on each device, by the number of devices that share them.

Estimates are what `ModelSpec.memory` takes. A model whose need is known should be given that instead.
"""

from collections.abc import Iterable
from math import ceil
from typing import Final

from iris_ray.errors import InvalidSlotError
from iris_ray.model.checks import require_plain_int
from iris_ray.slots.gguf import GGUFModel

BATCH: Final = 512
"""Tokens that are computed at a time while a prompt is read."""
CACHE_BYTES: Final = 2
"""Of one number in the cache of keys and values: 16 bits."""
WORK_BYTES: Final = 4
"""Of one number in what is computed: 32 bits."""
RUNTIME_BYTES: Final = 512 * 2**20
"""What a process needs on each device before it holds any model: the driver's context, and buffers."""


def gguf_memory(
    model: GGUFModel, *, context: int, concurrency: int = 1, degrees: Iterable[int] = (1,)
) -> dict[int, int]:
    """Return the bytes on each device that a runtime like Ollama's needs for a GGUF file.

    Layers are spread over the devices, each whole on one; counted is the device with the most. It is the sum of:

    - the weights of its layers, and those that belong to no layer;
    - for each of its layers the cache: context × concurrency × (length of a key + of a value) × their heads × 2 bytes;
    - what is computed for a batch of 512 tokens: the largest of attention, feed-forward and output, in 32 bits;
    - 512 MiB for the process.

    Args:
        model: the head of the file.
        context: tokens of one request, prompt and answer. At most as many as the model was trained for count.
        concurrency: requests at a time; each has a cache of its own.
        degrees: numbers of devices.

    Raises:
        InvalidSlotError: a number makes no sense, or the file does not say what is needed, or is a part of a model.
    """
    degrees = tuple(degrees)
    for name, value in (("context", context), ("concurrency", concurrency), *(("a degree", n) for n in degrees)):
        require_plain_int(name, value, 1, InvalidSlotError)
    if (parts := model.facts.get("split.count", 1)) != 1:
        raise InvalidSlotError(
            f"the GGUF file is one of {parts} parts, and knows only its own weights; join them with llama-gguf-split"
            " --merge, or give the memory yourself"
        )
    tokens = min(context, model.number("context_length", context))
    layers = model.number("block_count")
    layer = max(_layer_bytes(model).values(), default=0) + tokens * concurrency * _cache_bytes(model)
    beside = sum(size for name, size in model.tensors.items() if not name.startswith("blk."))
    fixed = beside + _work_bytes(model, tokens) + RUNTIME_BYTES
    return {degree: ceil(layers / degree) * layer + fixed for degree in degrees}


def vllm_memory(device_memory: int, utilisation: float, degrees: Iterable[int] = (1,)) -> dict[int, int]:
    """Return the bytes on each device that vLLM takes: a share of it, whatever the model.

    Args:
        device_memory: bytes of one device.
        utilisation: vLLM's ``gpu_memory_utilization``.
        degrees: its ``tensor_parallel_size``, one or several that would do.

    Raises:
        InvalidSlotError: the share is not above 0 and at most 1.
    """
    if not 0 < utilisation <= 1:
        raise InvalidSlotError(f"utilisation is {utilisation!r}; give a share above 0 and at most 1, such as 0.9")
    return dict.fromkeys(degrees, ceil(device_memory * utilisation))


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
