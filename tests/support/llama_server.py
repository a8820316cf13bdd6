"""llama.cpp's own HTTP server, from the package xllamacpp: python llama_server.py --port N --model FILE --alias NAME

`write_tiny_model` makes a model of random weights for it: it speaks nonsense, and all else is real.
"""

import argparse
import importlib
import threading
from pathlib import Path
from typing import Any

WIDTH, INNER, LAYERS, HEADS = 64, 128, 2, 4


def write_tiny_model(path: Path) -> None:
    """Write a GGUF file of half a megabyte, whose tokens are the bytes and a few letters."""
    import gguf
    import numpy as np

    chance = np.random.default_rng(0)
    letters = list("▁abcdefghijklmnopqrstuvwxyz")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_file_type(0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-1.0] * len(letters))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(letters))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    sizes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH)}
    for layer in range(LAYERS):
        square = {f"blk.{layer}.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        wide = {f"blk.{layer}.{name}": (INNER, WIDTH) for name in ("ffn_gate", "ffn_up")}
        sizes |= {**square, **wide, f"blk.{layer}.ffn_down": (WIDTH, INNER)}
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for name, size in sizes.items():
        writer.add_tensor(f"{name}.weight", (0.1 * chance.standard_normal(size)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    arguments = parser.parse_args()
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path, params.port, params.hostnames = arguments.model, arguments.port, ["127.0.0.1"]
    params.n_ctx, params.n_parallel, params.warmup = 256, 2, False
    params.cpuparams.n_threads = 1
    params.chat_template = "chatml"
    params.model_alias = type(params.model_alias)([arguments.alias])
    server = llama.Server(params)
    print(f"listens at {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
