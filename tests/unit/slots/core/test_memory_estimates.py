"""What models need, read from real GGUF files that the format's own package wrote."""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import example, given
from hypothesis import strategies as st

from iris_ray.errors import InvalidSlotError
from iris_ray.slots.core.memory_estimates import (
    BATCH,
    RUNTIME_BYTES,
    WORK_BYTES,
    GGUFModel,
    gguf_memory,
    read_gguf,
    split_memory,
    vllm_memory,
)
from tests.support.gguf_files import EMBEDDING, FEED_FORWARD, HEADS, KV_HEADS, LAYERS, TOKENS, write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> GGUFModel:
    with path.open("rb") as file:
        return read_gguf(file, path.stat().st_size)


def test_gguf_header_reads_as_it_was_written(model: GGUFModel) -> None:
    assert model.architecture == "llama"
    assert (model.number("block_count"), model.number("attention.head_count_kv")) == (LAYERS, KV_HEADS)
    assert model.vocabulary == TOKENS
    assert model.facts["general.small"] is True


def test_tensor_sizes_agree_with_gguf_library(path: Path, model: GGUFModel) -> None:
    theirs = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    assert model.tensors.keys() == theirs.keys()
    for name, size in theirs.items():
        assert size <= model.tensors[name] < size + 32


def test_estimate_adds_layers_cache_buffers_and_process(model: GGUFModel) -> None:
    weights = EMBEDDING * EMBEDDING * 2 + EMBEDDING * FEED_FORWARD * 34 // 32
    cache = KV_HEADS * (16 + 16) * 2
    work = BATCH * WORK_BYTES * (4 * EMBEDDING + max(1000 * HEADS, 2 * FEED_FORWARD, TOKENS))
    fixed = TOKENS * EMBEDDING * 4 + work + RUNTIME_BYTES
    memory = gguf_memory(model, context=1000, concurrency=3, degrees=[1, 2, 3])
    assert memory == {
        1: 4 * (weights + 3000 * cache) + fixed,
        2: 3 * (weights + 3000 * cache) + fixed,
        3: 2 * (weights + 3000 * cache) + fixed,
    }
    layer = weights + 3000 * cache
    uneven = gguf_memory(model, context=1000, concurrency=3, split=(3, 1, 1))
    assert uneven == {1: 4 * layer + fixed, 3: tuple(layers * layer + fixed for layers in (3, 1, 0))}


def llama_cpps_layers(layers: int, split: Sequence[float]) -> list[int]:
    """Count the layers of each device as llama.cpp gives them out (src/llama-model.cpp, `get_layer_buft_list`).

    Layer i of n goes to the first device whose share, with those before it, exceeds i / (n + 1), in 32 bits.
    """
    so_far = np.cumsum(np.array(split, np.float32), dtype=np.float32)
    so_far /= so_far[-1]
    owners = [bisect_right(so_far, np.float32(layer) / np.float32(layers + 1)) for layer in range(layers)]
    return [owners.count(number) for number in range(len(split))]


SHARES = st.integers(1, 48) | st.integers(1, 300).map(lambda hundredths: hundredths / 100)


@given(st.integers(1, 130), st.lists(SHARES, min_size=1, max_size=8))
@example(55, [0.8, 0.62, 1.6, 0.18])
@example(68, [0.85, 0.3])
def test_each_device_has_memory_for_the_layers_that_llama_cpp_gives_it(layers: int, split: list[float]) -> None:
    facts: dict[str, Any] = {"block_count": layers, "embedding_length": 1, "attention.head_count": 1}
    head = GGUFModel({"general.architecture": "a", **{f"a.{name}": value for name, value in facts.items()}}, {}, {})
    (one,) = gguf_memory(head, context=1).values()
    (fixed,) = gguf_memory(replace(head, facts={**head.facts, "a.block_count": 0}), context=1).values()
    assert isinstance(one, int)
    assert isinstance(fixed, int)
    layer = (one - fixed) // layers
    sizes = gguf_memory(head, context=1, degrees=(), split=split)[len(split)]
    assert isinstance(sizes, tuple)
    estimated = [(size - fixed) // layer for size in sizes]
    real = llama_cpps_layers(layers, split)
    assert estimated == real
    even = gguf_memory(head, context=1, degrees=[len(split)])[len(split)]
    assert isinstance(even, int)
    assert (even - fixed) // layer == max(llama_cpps_layers(layers, [1] * len(split)))


def test_context_beyond_models_limit_costs_nothing(model: GGUFModel) -> None:
    assert gguf_memory(model, context=10**6) == gguf_memory(model, context=4096)


@pytest.mark.parametrize("cut", [3, 10, 40, 300, -12_000])
def test_truncated_file_is_refused(path: Path, cut: int) -> None:
    data = path.read_bytes()[:cut]
    with pytest.raises(InvalidSlotError, match=r"cut off|not a GGUF"):
        read_gguf(BytesIO(data), len(data))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"PK\x03\x04" + bytes(100), "does not begin with"),
        (b"GGUF\x09\x00\x00\x00" + bytes(100), "version 9"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 100, "damaged"),
        (struct.pack("<4sIQQQ17sII", b"GGUF", 3, 0, 1, 17, b"general.alignment", 4, 0), "aligned to 0 bytes"),
    ],
)
def test_file_that_is_no_gguf_is_refused_in_words(data: bytes, why: str) -> None:
    with pytest.raises(InvalidSlotError, match=why):
        read_gguf(BytesIO(data), len(data))


def test_missing_number_is_named(model: GGUFModel) -> None:
    bare = GGUFModel({"general.architecture": "odd"}, {}, {})
    with pytest.raises(InvalidSlotError, match=r"odd\.block_count"):
        gguf_memory(bare, context=10)


@pytest.mark.parametrize("name", ["block_count", "embedding_length", "context_length", "attention.head_count_kv"])
@pytest.mark.parametrize("value", [nan, inf, -1, 4.5])
def test_senseless_number_in_the_file_is_refused(model: GGUFModel, name: str, value: float) -> None:
    damaged = replace(model, facts={**model.facts, f"llama.{name}": value})
    with pytest.raises(InvalidSlotError, match=rf"the GGUF file is damaged: its llama\.{name} is {value}"):
        gguf_memory(damaged, context=10)


def test_context_of_zero_in_the_file_is_no_limit(model: GGUFModel) -> None:
    unlimited = replace(model, facts={**model.facts, "llama.context_length": 0})
    assert gguf_memory(unlimited, context=4096) == gguf_memory(model, context=4096)


@pytest.mark.parametrize("kw", [{"context": 0}, {"context": 8, "concurrency": 0}, {"context": 8, "degrees": [0]}])
def test_senseless_numbers_are_refused(model: GGUFModel, kw) -> None:
    with pytest.raises(InvalidSlotError, match=r"give an int (of 1 or more|from 1 to 16384)"):
        gguf_memory(model, **kw)


@pytest.mark.parametrize("estimate", [split_memory, vllm_memory, gguf_memory])
def test_bytes_in_place_of_the_number_of_devices_are_refused(model: GGUFModel, estimate: Any) -> None:
    given = {split_memory: (10,), vllm_memory: (10, 0.5), gguf_memory: (model,)}[estimate]
    kw = {"context": 8} if estimate is gguf_memory else {}
    with pytest.raises(InvalidSlotError, match="a degree is 16000000000; give an int from 1 to 16384"):
        estimate(*given, degrees=[16 * 10**9], **kw)


@pytest.mark.parametrize("split", ["2,1", [2, 0], [-1], 2, [True, 1], [1e-300, 1e-300], [nan, 1]])
def test_senseless_split_is_refused(model: GGUFModel, split: Any) -> None:
    with pytest.raises(
        InvalidSlotError, match=r"split is .*; give numbers from 0.000001 to a billion, one for each device"
    ):
        gguf_memory(model, context=8, split=split)


def test_even_and_uneven_shares_of_as_many_devices_exclude_each_other(model: GGUFModel) -> None:
    with pytest.raises(InvalidSlotError, match=r"split is \[2, 1\], and the model is even on 2 devices; leave one out"):
        gguf_memory(model, context=8, degrees=[1, 2], split=[2, 1])


def test_vllm_takes_its_share_of_each_device() -> None:
    assert vllm_memory(80 * 10**9, 0.9, [1, 2]) == {1: 72 * 10**9, 2: 72 * 10**9}
    with pytest.raises(InvalidSlotError, match="utilisation"):
        vllm_memory(80 * 10**9, 1.5)


def test_total_is_divided_evenly_and_rounded_up() -> None:
    assert split_memory(10, (1, 3), beside=2) == {1: 12, 3: 6}
    for wrong in ((0, (1,)), (10, (0,)), (10.5, (1,)), (10, (1,), -1)):
        with pytest.raises(InvalidSlotError):
            split_memory(*wrong)


def test_one_part_of_split_model_gives_no_estimate(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    writer.add_block_count(2)
    writer.add_embedding_length(EMBEDDING)
    for number in range(2):
        writer.add_tensor(f"blk.{number}.attn_q.weight", np.ones((EMBEDDING, EMBEDDING), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part = tmp_path / "model-00001-of-00002.gguf"
    with part.open("rb") as file:
        found = read_gguf(file, part.stat().st_size)
    with pytest.raises(InvalidSlotError, match="is one of 2 parts, and knows only its own weights"):
        gguf_memory(found, context=1000)
