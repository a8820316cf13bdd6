"""GGUF files that the format's own package writes."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

LAYERS, EMBEDDING, HEADS, KV_HEADS, FEED_FORWARD, TOKENS = 4, 64, 4, 2, 160, 100


def write_gguf(path: Path) -> Path:
    """Write a small model of the shape of Llama, with weights in 32, 16 and 8 bits."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(EMBEDDING)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV_HEADS] * LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_rope_freq_base(10000.0)
    writer.add_bool("general.small", True)
    writer.add_token_list([f"token {number}" for number in range(TOKENS)])
    writer.add_tensor("token_embd.weight", np.ones((TOKENS, EMBEDDING), np.float32))
    for number in range(LAYERS):
        writer.add_tensor(f"blk.{number}.attn_q.weight", np.ones((EMBEDDING, EMBEDDING), np.float16))
        down = quantize(np.ones((EMBEDDING, FEED_FORWARD), np.float32), GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.{number}.ffn_down.weight", down, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
